"""Regret on synthetic arms whose truth is known: how it grows, and in which order the policies stand."""

from functools import cache

import numpy as np
import pytest

from cluster.config import PolicyConfig
from router.drafter.policies import POLICIES as POLICY_CLASSES
from router.drafter.policies import build_policy
from tests.support.arms import Arms, Floats, run, slope_by_doubling

NUM_SLOTS = 1024
FIRST = 64  # slots, by which every policy has seen something of everything
NUM_SEEDS = 3

POLICIES: dict[str, tuple[PolicyConfig, bool]] = {
    "lbss": (PolicyConfig(kind="lbss", exploration_slots=32), False),
    "hedge": (PolicyConfig(kind="hedge"), True),
    "epsilon-greedy": (PolicyConfig(kind="epsilon-greedy", epsilon=0.2), False),
    "greedy-length": (PolicyConfig(kind="greedy-length"), False),
    "fixed": (PolicyConfig(kind="fixed"), False),
}


@cache
def arms() -> Arms:
    """Nine requests, three to a drafter, each with a drafter that suits it; how long a prompt is says nothing of that."""
    random = np.random.default_rng(0)
    rates = random.uniform(0.15, 0.45, (9, 3))
    rates[np.arange(9), random.permutation(9) % 3] += 0.35
    return Arms(rates, capacity=3, prompt_lens=tuple(random.integers(10, 1000, 9).tolist()))


@cache
def regret(name: str) -> Floats:
    """Mean over seeds, by slot."""
    config, full_information = POLICIES[name]
    runs = []
    for seed in range(NUM_SEEDS):
        seeded = {} if config.kind in ("greedy-length", "fixed") else {"seed": seed}
        policy = POLICY_CLASSES[config.kind](**config.parameters, **seeded)
        runs.append(run(policy, arms(), NUM_SLOTS, seed, full_information).regret)
    mean: Floats = np.mean(runs, axis=0)
    return mean


def growth(name: str) -> float:
    """The slope of log2 of what each doubling of time adds, over the doublings: 0 where regret grows like log T, 1 where it
    grows like T."""
    added = slope_by_doubling(regret(name), FIRST)
    return float(np.polyfit(np.arange(len(added)), np.log2(added), 1)[0])


def test_lbss_grows_like_the_logarithm() -> None:
    """SPIN, theorem 1."""
    assert growth("lbss") < 0.4


@pytest.mark.parametrize("name", ["greedy-length", "fixed", "epsilon-greedy"])
def test_what_goes_on_choosing_wrongly_grows_like_time(name: str) -> None:
    """And so the test above could fail."""
    assert growth(name) > 0.8


def test_full_information_beats_the_bandit() -> None:
    assert regret("hedge")[-1] < 0.1 * regret("lbss")[-1]


def test_prompt_length_chooses_worst() -> None:
    totals = {name: regret(name)[-1] for name in POLICIES if name != "fixed"}
    assert max(totals, key=totals.__getitem__) == "greedy-length"
    assert totals["greedy-length"] > 3 * totals["lbss"]


def test_what_was_measured_is_what_the_seed_says() -> None:
    policy = PolicyConfig(kind="hedge")
    first, again = (run(build_policy(policy), arms(), 20, 7, True) for _ in range(2))
    assert first.regret.tolist() == again.regret.tolist()
    assert first.num_switches == again.num_switches
