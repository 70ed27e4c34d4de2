"""The acceptance model: by drafter, draft position and request. A request's rates are shrunk towards the drafter's, these
towards the mean of all drafters:

    L = 1 + s sum over k < draft_len of a_0 a_1 ... a_k        a: acceptance by position, s: share of drafts in time
"""

from collections.abc import Iterable, Sequence
from itertools import chain, repeat, zip_longest
from typing import Annotated, Generic

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue

from router.assignment import Observation, PoolMember, ScoreCounts, drafter_of
from router.cost_model import Floats
from router.estimates.decayed import DecayedSums, ExpiringCache, Key

REQUEST_ROUNDS = 8.0  # of a request's own before they outweigh its drafter's
MEMORY_ROUNDS = 1000.0  # after which an observation of a drafter has faded to 1/e
_REQUEST_MEMORY = 100.0  # the same of a request, whose text changes as it goes on
_PRIOR_DRAFTS = 2.0  # that the mean of all drafters counts as
PRIOR_ROUNDS = 8.0  # assumed in time before the first of a drafter
# Forgetting per round with another drafter, in rounds of its own. A drafter that was left because it was late, or seldom
# queried, is so rated better with time until a request tries it, seldom enough for that to cost little.
_ELSEWHERE = 1 / 16

Rates = tuple[float, ...]  # by position


class PositionCounts(Generic[Key]):
    """Decayed counts by key and draft position: drafts that reached the position, and those that were right there."""

    def __init__(self, memory: float) -> None:
        self.reached: DecayedSums[Key] = DecayedSums(memory)
        self.right: DecayedSums[Key] = DecayedSums(memory)

    def add(self, key: Key, num_reached: tuple[int, ...], num_right: tuple[int, ...]) -> None:
        num_drafts = num_reached[0] if num_reached else 0
        self.reached.add(key, num_reached, num_drafts)
        self.right.add(key, num_right, num_drafts)

    def num_drafts(self, key: Key) -> float:
        return next(iter(self.reached.get(key, 0)), 0.0)

    def rates(self, key: Key, prior: Rates, strength: float) -> Rates:
        """At each known position and those of ``prior``, which counts as ``strength`` drafts."""
        counts = zip_longest(self.reached.get(key, 0), self.right.get(key, 0), range(len(prior)), fillvalue=0.0)
        priors = chain(prior, repeat(prior[-1]))
        return tuple([(b + strength * known) / (a + strength) for (a, b, _), known in zip(counts, priors, strict=False)])


def _of_those(sums: tuple[float, float]) -> tuple[float, float]:
    rounds, in_time = sums
    if in_time > rounds:
        raise ValueError(f"{in_time} of {rounds} rounds in time")
    return sums


_Sum = Annotated[float, Field(ge=0)]
OnTimeSums = dict[str, Annotated[tuple[_Sum, _Sum], AfterValidator(_of_those)]]


class OnTimeRates(DecayedSums[str]):
    """Share of rounds in which a drafter's draft arrives in time: a late draft is not wrong, but useless. Sums by drafter:
    rounds that could have had a draft, and those that had one."""

    def observe(self, observations: Iterable[Observation]) -> None:
        new = dict.fromkeys(self.sums, (0.0, 0.0))
        for seen in observations:
            drafter = drafter_of(seen.drafter)
            rounds, in_time = new.get(drafter, (0.0, 0.0))
            new[drafter] = (rounds + seen.num_awaited, in_time + seen.num_in_time)
        total = sum(rounds for rounds, _ in new.values())
        for drafter, (rounds, in_time) in new.items():
            self.add(drafter, (rounds, in_time), rounds + _ELSEWHERE * (total - rounds))

    def shares(self, drafters: Sequence[str]) -> Floats:
        """On-time share of each, from 0 to 1."""
        known = np.array([self.get(drafter, 2) for drafter in drafters])
        found: Floats = (known[:, 1] + PRIOR_ROUNDS) / (known[:, 0] + PRIOR_ROUNDS)
        return found


def _possible(counts: tuple[list[float], list[float]]) -> tuple[list[float], list[float]]:
    if any(right > reached + 0.01 for reached, right in zip_longest(*counts, fillvalue=0.0)):
        raise ValueError(f"more tokens are right than positions were reached: {counts}")
    return counts


class AcceptanceSnapshot(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    acceptance: dict[str, Annotated[tuple[list[_Sum], list[_Sum]], AfterValidator(_possible)]]  # reached, right
    in_time: OnTimeSums


class AcceptanceModel:
    """Learns from drafts and from scores alike. Not thread-safe."""

    def __init__(self) -> None:
        self._pool: PositionCounts[str] = PositionCounts(MEMORY_ROUNDS)
        self.on_time = OnTimeRates(MEMORY_ROUNDS)
        self._requests: ExpiringCache[PositionCounts[str]] = ExpiringCache()

    def next_slot(self, request_ids: Iterable[str]) -> None:
        """``request_ids``: of live requests; of others nothing is kept for long."""
        self._requests.next_slot()
        for request_id in request_ids:
            if self._requests.get(request_id) is None:
                self._requests.put(request_id, PositionCounts(_REQUEST_MEMORY))

    def observe(self, observations: Sequence[Observation], scores: Sequence[ScoreCounts]) -> None:
        """``observations`` as of `lessons`."""
        self.on_time.observe(observations)
        drafts: list[Observation | ScoreCounts] = [*observations, *scores]
        for seen in drafts:
            if seen.positions.num_reached:
                own, counts = self._requests.get(seen.request_id), (seen.positions.num_reached, seen.positions.num_right)
                for known in (self._pool, own) if own is not None else (self._pool,):
                    known.add(drafter_of(seen.drafter), *counts)

    def expected_lens(self, request_ids: Sequence[str], drafters: Sequence[PoolMember]) -> tuple[Floats, Floats]:
        """Tokens of a round that has its draft, bonus token included, and the rounds behind this; both (requests,
        drafters)."""
        shape = len(request_ids), len(drafters)
        lens, num_rounds = np.ones(shape), np.full(shape, REQUEST_ROUNDS)
        priors = [(drafter_of(member.name), self.mean_rates(member)) for member in drafters]
        usual_lens = [_expected_len(rates) for _, rates in priors]
        for i, own in enumerate(map(self._requests.get, request_ids)):
            for j, (name, prior) in enumerate(priors):
                if own is None or name not in own.reached.sums:
                    lens[i, j] = usual_lens[j]
                else:
                    lens[i, j] = _expected_len(own.rates(name, prior, REQUEST_ROUNDS)[: len(prior)])
                    num_rounds[i, j] += own.num_drafts(name)
        return lens, num_rounds

    def mean_rates(self, drafter: PoolMember) -> Rates:
        """At each position of its longest draft, over all requests."""
        num, known, none = drafter.max_draft_len, self._pool, (0.0,) * drafter.max_draft_len
        reached, right = (
            map(sum, zip_longest(*one.sums.values(), none, fillvalue=0.0)) for one in (known.reached, known.right)
        )
        of_all = tuple([(b + 1.0) / (a + 2.0) for a, b in zip(reached, right, strict=False)])[:num]
        return known.rates(drafter_of(drafter.name), of_all, _PRIOR_DRAFTS)[:num]

    def num_drafts(self, drafter: PoolMember) -> float:
        """Drafts and scores behind ``mean_rates``, as far as they are remembered."""
        return self._pool.num_drafts(drafter_of(drafter.name))

    def snapshot(self) -> dict[str, JsonValue]:
        """Without requests."""
        reached, right = self._pool.reached.sums, self._pool.right.sums
        counts: dict[str, JsonValue] = {name: [_rounded(reached[name]), _rounded(right[name])] for name in reached}
        return {"acceptance": counts, "in_time": self.on_time.snapshot()}

    def restore(self, snapshot: AcceptanceSnapshot) -> None:
        self._pool.reached.sums = {name: tuple(reached) for name, (reached, _) in snapshot.acceptance.items()}
        self._pool.right.sums = {name: tuple(right) for name, (_, right) in snapshot.acceptance.items()}
        self.on_time.sums = dict(snapshot.in_time)
        self._requests = ExpiringCache()


def _rounded(sums: tuple[float, ...]) -> list[JsonValue]:
    return [round(one, 3) for one in sums]


def _expected_len(rates: Rates) -> float:
    total = 1.0
    survival = 1.0
    for rate in rates:
        survival *= rate
        total += survival
    return total
