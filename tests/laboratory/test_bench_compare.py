"""What `outrider bench compare` asks of each arm, and when."""

import asyncio
import gzip
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from pkgutil import resolve_name

import pytest

from benchmarks.compare import equally_long
from benchmarks.compare.arms import (
    LLAMA_CPP,
    LOOKUPS,
    NGRAM,
    OUTRIDER,
    OUTRIDER_VLLM,
    PLAIN,
    PLUGIN,
    POOL,
    Q4_1,
    VLLM,
    Arm,
    chosen_arms,
)
from benchmarks.compare.bursts import TRACE, bursty_arrivals, trace_arrivals
from benchmarks.compare.comparison import Comparison
from benchmarks.compare.systems import ModelFiles, RunningArm, outrider_config, peer_command
from benchmarks.compare.turns import Turn, TurnFailed, closed_loop, open_loop
from benchmarks.load import LoadRequest, TimedAnswer
from benchmarks.report import describe_environment
from drafters.vllm_plugin.proposer import SETTING, PoolProposer


@dataclass
class Server:
    """Answers at once if it is not suspended, and notes what it was asked."""

    asked: list[LoadRequest] = field(default_factory=list)
    error: str | None = None
    num_failing: int = 0  # answers after it went on, while its links are down
    num_proposed: int = 0
    is_suspended: bool = True

    async def ask(self, ask: LoadRequest) -> TimedAnswer:
        await asyncio.sleep(0)
        assert not self.is_suspended
        if ask.id == "awake":
            self.num_failing -= 1
            error = "503" if self.num_failing >= 0 else None
            return TimedAnswer(1.0, [0.5, 1.0], "text", 3, num_proposed=self.num_proposed, error=error)
        assert self.num_failing < 0
        self.asked.append(ask)
        return TimedAnswer(1.0, [0.5, 1.0], "text", 3, error=self.error)

    def suspend(self) -> None:
        self.is_suspended = True

    def resume(self) -> None:
        self.is_suspended = False


def running(server: Server, arm: Arm | None = None) -> RunningArm:
    return RunningArm(ARM if arm is None else arm, server, server)  # type: ignore[arg-type]


ARM = Arm(OUTRIDER, "bf16", PLAIN)
ASKS = [LoadRequest(f"r{i}", (1, 2), 3) for i in range(4)]


def test_the_plain_arm_asks_for_no_drafts() -> None:
    """A control of the comparison: with drafts, it would be the other arm."""
    server = Server()
    closed_loop(running(server), ASKS, 2)
    open_loop(running(server), ASKS, [0.0] * 4)
    assert [ask.drafting for ask in server.asked] == ["off"] * 8


def test_a_request_without_an_answer_ends_the_comparison() -> None:
    with pytest.raises(TurnFailed, match="outrider bf16, no drafting: 500"):
        closed_loop(running(Server(error="500")), ASKS, 2)


def test_a_server_runs_in_its_turn_alone_and_is_asked_when_it_answers_again() -> None:
    server = Server(num_failing=2)
    closed_loop(running(server), ASKS, 2)
    assert len(server.asked) == 4
    assert server.is_suspended


@pytest.mark.parametrize(("server", "arm"), [(Server(num_failing=99), ARM), (Server(), Arm(OUTRIDER, "bf16", POOL))])
def test_a_server_that_does_not_go_on_or_goes_on_without_its_drafters_ends_the_comparison(
    server: Server, arm: Arm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.compare.turns.AWAKE_S", 0.0)
    with pytest.raises(TurnFailed, match="after it went on"):
        closed_loop(running(server, arm), ASKS, 2)
    assert server.is_suspended


def test_arms_of_one_server_answer_different_prompts() -> None:
    """The second one would find the prompts of the first in the prefix cache, and drafts would be known answers."""
    for family in (OUTRIDER, OUTRIDER_VLLM):
        own = chosen_arms(True, [family])
        for pool, plain in zip(own[::2], own[1::2], strict=True):
            assert (pool.drafting, plain.drafting) == (POOL, PLAIN)
            assert pool.server == plain.server
            assert pool.prompt_set != plain.prompt_set
        assert len({arm.server for arm in own}) == len({arm.precision for arm in own})
    assert {arm.prompt_set for arm in chosen_arms(True, [VLLM, LLAMA_CPP])} == {0}


def test_prompts_of_one_place_are_equally_long_and_keep_both_ends_of_the_template() -> None:
    cut = equally_long([(1, 2, 3, 4, 5), (1, 2, 6, 7, 8, 9, 5)])
    assert cut == [(1, 2, 3, 4, 5), (1, 2, 8, 9, 5)]
    assert equally_long([(1,), (2, 3)]) == [(1,), (3,)]


def test_bursts_have_the_mean_rate_that_was_asked_for() -> None:
    arrivals = bursty_arrivals(4000, 5.0, seed=1)
    assert arrivals == sorted(arrivals)
    assert 4000 / arrivals[-1] == pytest.approx(5.0, rel=0.1)
    in_burst = sum(at % 9.0 < 3.0 for at in arrivals)
    assert in_burst / 4000 == pytest.approx(0.8, abs=0.03)  # 8 times the rate for a third of the time


def test_a_slice_of_a_trace_is_stretched_to_the_rate_and_keeps_its_burst(tmp_path: Path) -> None:
    calm, burst = [float(i) for i in range(0, 300, 3)], [300 + i / 100 for i in range(60)]
    (tmp_path / TRACE).parent.mkdir()
    with gzip.open(tmp_path / TRACE, "wt") as file:
        file.write("arrival_s,prompt_tokens,output_tokens\n")
        file.writelines(f"{at_s},1,1\n" for at_s in [*calm, *burst, *(400.0 + i for i in range(100))])
    arrivals = trace_arrivals(tmp_path, 80, 4.0)
    assert len(arrivals) == 80
    assert arrivals == sorted(arrivals)
    assert arrivals[0] == 0.0
    assert arrivals[-1] == pytest.approx(20.0)
    assert min(later - earlier for earlier, later in zip(arrivals, arrivals[8:], strict=False)) < 0.1


def test_the_figures_compare_the_best_of_each_family_at_medians() -> None:
    arms = chosen_arms(True, [OUTRIDER, OUTRIDER_VLLM, VLLM, LLAMA_CPP])
    comparison = Comparison(arms, (1,))
    speeds = {(OUTRIDER, POOL): 60.0, (OUTRIDER, PLAIN): 40.0, (OUTRIDER_VLLM, POOL): 50.0, (OUTRIDER_VLLM, PLAIN): 29.0}
    for arm in arms:
        speed = speeds.get((arm.family, arm.drafting), 30.0 if arm.precision != Q4_1 else 100.0)
        if (arm.family, arm.precision, arm.drafting) == (OUTRIDER, Q4_1, POOL):
            speed = 70.0
        for factor in (0.5, 1.0, 7.0):
            comparison.add(arm, 1, Turn(speed * factor, (1 / speed,), (0.1,), ("text",)))
        if arm.family != LLAMA_CPP:
            comparison.add_burst(arm, Turn(speed, (1 / speed,) * 3, (0.1,) * 3, ()))
    for ratio in (1.02, 3.0, 0.9):
        comparison.add_overhead(1, ratio)
    figures = comparison.figures()
    assert figures["over_vllm.batch_1"] == pytest.approx(70 / 30)
    assert figures["over_llama_cpp.batch_1"] == pytest.approx(2.0)  # not of Q4
    assert figures["over_llama_cpp_same_weights.batch_1"] == pytest.approx(0.7)
    assert figures["plain_over_llama_cpp.batch_1"] == pytest.approx(0.4)
    assert figures["vllm_target_overhead"] == figures["vllm_target_overhead.batch_1"] == 1.02
    assert {(arm.family, arm.drafting) for arm in comparison.overhead_arms} == {(OUTRIDER_VLLM, PLAIN), (VLLM, PLAIN)}
    assert set(comparison.overhead_arms) <= set(arms)
    assert figures["vllm_target_speedup.batch_1"] == pytest.approx(50 / 30)
    assert figures["tpot_p99_over_vllm"] == pytest.approx(30 / 70)
    assert all(value == 1.0 for name, value in figures.items() if name.startswith("identical_fraction"))


def test_what_drafts_in_vllms_server_is_compared_with_that_server_without_drafts() -> None:
    arms = chosen_arms(True, [PLUGIN, VLLM])
    comparison = Comparison(arms, (1,))
    for arm in arms:
        speed = {LOOKUPS: 45.0, NGRAM: 33.0, PLAIN: 30.0}[arm.drafting]
        comparison.add(arm, 1, Turn(speed, (0.1,), (0.1,), ("text" if arm.drafting != NGRAM else "other",)))
    figures = comparison.figures()
    assert figures["plugin_over_vllm.batch_1"] == pytest.approx(1.5)
    assert figures["vllm_ngram_over_vllm.batch_1"] == pytest.approx(1.1)
    assert "over_vllm.batch_1" not in figures  # of our own servers
    (same,) = (value for name, value in figures.items() if name.startswith("identical_fraction.outrider-in-vllm"))
    assert same == 1.0


def test_the_plugin_is_vllms_server_but_for_its_speculative_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.compare.systems.python_of", lambda family: tmp_path)
    files = ModelFiles("smollm2-135m", tmp_path, tmp_path, tmp_path)
    plugin, plain = (peer_command(Arm(family, "fp32", kind), files) for family, kind in ((PLUGIN, LOOKUPS), (VLLM, PLAIN)))
    assert plugin.command[:-2] == plain.command
    speculation = json.loads(plugin.command[-1])
    assert resolve_name(speculation["model"]) is PoolProposer
    assert json.loads(plugin.environment[SETTING])["members"][-1]["path"] == "table"


def test_outrider_on_vllm_is_configured_as_a_server_would_and_in_the_precision_of_its_arm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server leaves a core of several to other processes."""
    cores = replace(describe_environment(), num_cores=4)
    monkeypatch.setattr("benchmarks.serve.describe_environment", lambda: cores)
    target = outrider_config(Arm(OUTRIDER_VLLM, "fp32", POOL), "smollm2-135m").target
    assert target.resources.threads == 3
    assert (target.engine, target.dtype, target.block_len) == ("vllm", "float32", 32)
    native = [outrider_config(Arm(OUTRIDER, precision, POOL), "smollm2-135m").target for precision in ("bf16", Q4_1)]
    assert [(target.engine, target.dtype) for target in native] == [("native", "bfloat16"), ("native", "as-shipped")]
