"""Goodput: tokens per second of a request with a drafter, shrunk to the mean over all requests."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp
from typing import Annotated

from pydantic import Field, JsonValue, TypeAdapter

from router.assignment import Observation, drafter_of, lessons
from router.policies.expiring_cache import ExpiringCache

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Count = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_SNAPSHOT = TypeAdapter(dict[str, tuple[_Positive, _Count, _Positive]])


@dataclass(slots=True)
class Tally:
    """Decayed sums over verifications."""

    num_rounds: float = 0.0
    num_committed: float = 0.0  # accepted and bonus tokens
    elapsed_s: float = 0.0

    def add(self, seen: Observation, memory_rounds: float) -> None:
        kept = exp(-seen.num_rounds / memory_rounds)
        self.num_rounds = self.num_rounds * kept + seen.num_rounds
        self.num_committed = self.num_committed * kept + seen.num_committed
        self.elapsed_s = self.elapsed_s * kept + seen.elapsed_s


class GoodputEstimates:
    """Committed tokens per second, bonus token included (SPIN, section IV.A).

    Of a request with a drafter if observed, else of the drafter over all requests. An untried drafter has the mean of the
    others.
    """

    def __init__(self, memory_rounds: float) -> None:
        self._memory_rounds = memory_rounds
        self._pool: dict[str, Tally] = {}
        self._own: ExpiringCache[dict[str, Tally]] = ExpiringCache()

    def next_slot(self) -> None:
        self._own.next_slot()

    def observe(self, observations: Iterable[Observation]) -> None:
        for seen in lessons(observations):
            drafter = drafter_of(seen.drafter)
            self._pool.setdefault(drafter, Tally()).add(seen, self._memory_rounds)
            own = self._own.get(seen.request_id)
            if own is None:
                own = {}
                self._own.put(seen.request_id, own)
            own.setdefault(drafter, Tally()).add(seen, self._memory_rounds)

    def snapshot(self) -> JsonValue:
        """The pool's sums; those of requests are not kept."""
        return {drafter: [t.num_rounds, t.num_committed, t.elapsed_s] for drafter, t in self._pool.items()}

    def restore(self, snapshot: JsonValue) -> None:
        """Raises ValueError for an invalid snapshot."""
        self._pool = {drafter: Tally(*sums) for drafter, sums in _SNAPSHOT.validate_python(snapshot).items()}
        self._own = ExpiringCache()  # of requests with drafters that the snapshot may not know

    def of_pool(self, drafters: Sequence[str]) -> dict[str, float]:
        """Tokens per second of each drafter over all requests; 0 before the first observation."""
        known = {d: tally.num_committed / tally.elapsed_s for d in drafters if (tally := self._pool.get(d)) is not None}
        mean = sum(known.values()) / len(known) if known else 0.0
        return {drafter: known.get(drafter, mean) for drafter in drafters}

    def of_request(self, request_id: str, pool: dict[str, float]) -> dict[str, float]:
        """A copy of ``pool`` (of `of_pool`) updated with the request's own observations."""
        estimates = pool.copy()
        for drafter, tally in (self._own.get(request_id) or {}).items():
            if drafter in estimates:
                estimates[drafter] = self._estimate(tally, self._pool[drafter])
        return estimates

    def _estimate(self, own: Tally, shared: Tally) -> float:
        return own.num_committed / own.elapsed_s


class ShrunkGoodput(GoodputEstimates):
    """With c tokens in t seconds of a request and C tokens in T seconds over all R rounds of the drafter, the estimate is
    (c + k C/R) / (t + k T/R): the pool's mean until the request has about k rounds.
    """

    def __init__(self, prior_rounds: float, memory_rounds: float) -> None:
        super().__init__(memory_rounds)
        self._prior_rounds = prior_rounds

    def _estimate(self, own: Tally, shared: Tally) -> float:
        weight = self._prior_rounds / shared.num_rounds
        return (own.num_committed + weight * shared.num_committed) / (own.elapsed_s + weight * shared.elapsed_s)
