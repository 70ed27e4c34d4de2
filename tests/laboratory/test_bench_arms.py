"""Ratios of arms from rounds of turns: noise that lasts longer than a round cancels, and the best arm is chosen by name."""

import math
import random
from pathlib import Path

import pytest

from benchmarks.arms import AUTO, OFF, Rounds, Turn
from benchmarks.overlap import DRAFTER, RULES, ratio, with_drafter
from benchmarks.serve import local_config, with_state
from cluster.config import load, show


def played(speeds: dict[str, float], num_rounds: int, noise: float, seed: int = 1) -> Rounds:
    """Rounds in which the machine's speed changes by half between rounds, and each turn by ``noise``."""
    rng = random.Random(seed)
    rounds = Rounds()
    for _ in range(num_rounds):
        machine = rng.uniform(0.5, 1.5)
        for arm, speed in speeds.items():
            seconds = machine / speed * math.exp(rng.gauss(0.0, noise))
            rounds.turns.setdefault(arm, []).append(Turn(seconds, seconds / 2))
    return rounds


def test_the_speed_of_the_machine_cancels() -> None:
    rounds = played({OFF: 1.0, AUTO: 1.2, "a": 1.1, "b": 1.3}, 10, noise=0.0)
    assert rounds.ratio(AUTO, OFF).value == pytest.approx(1.2)
    assert rounds.ratio(AUTO, OFF).error == pytest.approx(0.0, abs=1e-12)
    assert rounds.ratio(AUTO, OFF, "cpu_s").value == pytest.approx(1.2)
    assert rounds.best() == "b"
    assert rounds.is_settled()


def test_the_error_says_how_far_the_ratio_may_be_off() -> None:
    ratios = [played({OFF: 1.0, AUTO: 1.2, "a": 1.1}, 16, 0.1, seed).ratio(AUTO, OFF) for seed in range(200)]
    off = [abs(math.log(ratio.value / 1.2)) / ratio.error for ratio in ratios]
    assert 0.6 < sum(each <= 1.0 for each in off) / len(off) < 0.76  # 0.68 of a normal distribution


def test_neither_off_nor_auto_is_the_best_by_name() -> None:
    assert played({OFF: 2.0, AUTO: 3.0, "a": 1.0, "b": 1.5}, 4, noise=0.0).best() == "b"


def test_few_or_noisy_rounds_are_not_settled() -> None:
    speeds = {OFF: 1.0, AUTO: 1.2, "a": 1.1}
    assert not played(speeds, 3, noise=0.0).is_settled()
    assert not played(speeds, 8, noise=0.3).is_settled()


def test_a_server_has_a_state_folder_of_its_own(tmp_path: Path) -> None:
    config = with_state(local_config("smollm2-135m"), tmp_path)
    (tmp_path / "outrider.yaml").write_text(show(config))
    state = load(tmp_path / "outrider.yaml").cluster.state
    assert state.url is None
    assert state.folder == tmp_path


# ---- the benchmark of overlap: servers that differ in nothing but the rule, and ratios of their turns


def test_servers_differ_in_the_rule_of_overlap_alone() -> None:
    configs = [with_drafter(local_config("smollm2-135m"), rule) for rule in RULES.values()]
    planners = [config.planner for config in configs]
    assert [planner.overlap for planner in planners] == list(RULES.values())
    assert len({planner.model_copy(update={"overlap": "gain"}).model_dump_json() for planner in planners}) == 1
    for config in configs:
        (drafter,) = config.drafters
        assert drafter.name == DRAFTER
        assert not drafter.is_colocated


def test_a_ratio_is_the_mean_of_those_of_the_rounds() -> None:
    found = ratio([10.0, 40.0], [10.0, 10.0])
    assert found.value == pytest.approx(2.0)
    assert found.error == pytest.approx(math.log(4.0) / 2)
