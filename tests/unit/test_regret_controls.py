"""The regret test of `lbss` where places are contested and switches cost time, and three routers that must fail it."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import numpy as np
import pytest
from pydantic import JsonValue

from router.assignment import NO_LEVELS, AssignmentPolicy, Chain, Levels, Observation, PoolMember, RequestView, ScoreCounts
from router.papers.not_a_bandit import Hedge
from router.papers.spin import Lbss
from tests.support.arms import Arms, Floats, run, slope_by_doubling

pytestmark = pytest.mark.slow

NUM_SLOTS = 4096
FIRST = 64  # slots, by which every policy has seen something of everything
SEEDS = range(6)
MAX_GROWTH = 0.5  # of regret per doubling, as an exponent: 0 like log T, 1 like T
PERMUTED = 0.3

Make = Callable[[int], AssignmentPolicy]


@cache
def arms() -> Arms:
    """Nine requests for three places at each of three drafters. Seven are best with the first drafter; the three that gain
    most there came last. By what one epoch shows of them, they often are not those three. A switch takes half a slot."""
    rates = np.full((9, 3), 0.45)
    rates[:4, 0], rates[6:, 0] = 0.55, 0.65
    return Arms(rates, capacity=3, prompt_lens=(100,) * 9, switch_s=0.12)


class FirstCome:
    """In place of a matching: each request in order of arrival takes the best place that is left."""

    def __call__(self, values: Floats) -> tuple[np.ndarray, np.ndarray]:
        left, rows, columns = set(range(values.shape[1])), [], []
        for row, of_request in enumerate(values):
            if left:
                best = max(left, key=of_request.__getitem__)
                left.remove(best)
                rows.append(row)
                columns.append(best)
        return np.array(rows, np.int64), np.array(columns, np.int64)


class Broken:
    """A policy whose placements are changed."""

    def __init__(self, policy: AssignmentPolicy) -> None:
        self._policy = policy

    def observe(
        self, observations: Sequence[Observation], scores: Sequence[ScoreCounts] = (), levels: Levels = NO_LEVELS
    ) -> None:
        self._policy.observe(observations, scores)

    def snapshot(self) -> JsonValue:
        return self._policy.snapshot()

    def restore(self, snapshot: JsonValue) -> None:
        self._policy.restore(snapshot)


class LastEpoch(Broken):
    """Forgets at the end of each epoch what was seen in it."""

    def __init__(self, seed: int) -> None:
        super().__init__(lbss(seed))
        self._seed = seed
        self._epoch: JsonValue = 1

    def assign(self, requests: Sequence[RequestView], pool: Sequence[PoolMember]) -> Mapping[str, Chain]:
        snapshot = self._policy.snapshot()
        if isinstance(snapshot, dict) and snapshot["epoch"] != self._epoch:
            self._epoch = snapshot["epoch"]
            self._policy = lbss(self._seed)
            self._policy.restore({"epoch": self._epoch, "drafters": {}})
        return self._policy.assign(requests, pool)


class Permuted(Broken):
    """A policy, some of whose placements are exchanged with each other in each slot."""

    def __init__(self, policy: AssignmentPolicy, seed: int) -> None:
        super().__init__(policy)
        self._random = np.random.default_rng(seed)

    def assign(self, requests: Sequence[RequestView], pool: Sequence[PoolMember]) -> Mapping[str, Chain]:
        chains = dict(self._policy.assign(requests, pool))
        names = list(chains)
        moved = self._random.choice(len(names), round(PERMUTED * len(names)), replace=False)
        moved_chains = [chains[names[i]] for i in moved]
        chains.update(zip((names[i] for i in np.roll(moved, 1)), moved_chains, strict=True))
        return chains


def regrets(make: Make, full_information: bool = False) -> list[Floats]:
    return [run(make(seed), arms(), NUM_SLOTS, seed, full_information).regret for seed in SEEDS]


def growth(found: Sequence[Floats]) -> float:
    """The slope of log2 of what each doubling of time adds to the mean: 0 where regret grows like log T, 1 like T."""
    added = slope_by_doubling(np.mean(found, axis=0), FIRST)
    return float(np.polyfit(np.arange(len(added)), np.log2(np.maximum(added, 1e-9)), 1)[0])


def lbss(seed: int) -> AssignmentPolicy:
    return Lbss(exploration_slots=8, chunk_slots=2, seed=seed)


@cache
def sound() -> list[Floats]:
    return regrets(lbss)


def fails(found: Sequence[Floats]) -> bool:
    """The regret test: growth, and a total within three standard errors of the policy's."""
    totals, expected = (np.array([one[-1] for one in runs]) for runs in (found, sound()))
    error = np.sqrt((totals.var(ddof=1) + expected.var(ddof=1)) / len(SEEDS))
    return growth(found) > MAX_GROWTH and totals.mean() - expected.mean() > 3.0 * error


def test_lbss_passes_where_places_are_contested() -> None:
    """SPIN, theorem 1, with equation 6's cost of switching. Exploitation is longer than estimates of requests unheard of are
    kept."""
    assert growth(sound()) < MAX_GROWTH


def test_first_come_instead_of_matching_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.papers.spin.heaviest_matching", FirstCome())
    assert fails(regrets(lbss))


def test_estimates_of_the_last_epoch_alone_fail() -> None:
    assert fails(regrets(LastEpoch))


def test_permuted_placements_fail() -> None:
    assert fails(regrets(lambda seed: Permuted(lbss(seed), seed)))


def test_hedge_with_permuted_placements_fails() -> None:
    def total(seed: int, broken: bool) -> float:
        policy = Hedge()
        made = Permuted(policy, seed) if broken else policy
        return float(run(made, arms(), 512, seed, full_information=True).regret[-1])

    assert min(total(seed, True) for seed in range(3)) > 3.0 * max(total(seed, False) for seed in range(3))
