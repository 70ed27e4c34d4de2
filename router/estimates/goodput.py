"""Goodput: tokens per second of a request with a drafter, shrunk to the mean over all requests."""

from collections.abc import Iterable, Sequence
from typing import Annotated

from pydantic import Field, JsonValue, TypeAdapter

from router.assignment import Observation, drafter_of, lessons
from router.drafter.expiring_cache import ExpiringCache
from router.estimates.decayed import DecayedSums

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Count = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_SNAPSHOT = TypeAdapter(dict[str, tuple[_Positive, _Count, _Positive]])


class GoodputEstimates:
    """Committed tokens per second, bonus token included (SPIN, section IV.A), of a request with a drafter: (c + k C/R) / (t
    + k T/R), with c tokens in t seconds of the request, C tokens in T seconds over all R rounds of the drafter, and k =
    ``prior_rounds``. An untried drafter has the mean of the others."""

    def __init__(self, memory_rounds: float, prior_rounds: float = 0.0) -> None:
        self._memory_rounds = memory_rounds
        self._prior_rounds = prior_rounds
        self._pool: DecayedSums[str] = DecayedSums(memory_rounds)  # by drafter: rounds, committed tokens, seconds
        self._own: ExpiringCache[DecayedSums[str]] = ExpiringCache()  # the same of each request

    def next_slot(self, request_ids: Iterable[str] = ()) -> None:
        """``request_ids``: of live requests, of which nothing is forgotten; of others it is, once it is not read."""
        self._own.next_slot()
        for request_id in request_ids:
            self._own.get(request_id)

    def observe(self, observations: Iterable[Observation]) -> None:
        for seen in lessons(observations):
            own = self._own.get(seen.request_id)
            if own is None:
                own = DecayedSums(self._memory_rounds)
                self._own.put(seen.request_id, own)
            drafter, new = drafter_of(seen.drafter), (seen.num_rounds, seen.num_committed, seen.elapsed_s)
            self._pool.add(drafter, new, seen.num_rounds)
            own.add(drafter, new, seen.num_rounds)

    def snapshot(self) -> JsonValue:
        """The sums over all requests."""
        return {**self._pool.snapshot()}

    def restore(self, snapshot: JsonValue) -> None:
        """Raises ValueError for an invalid snapshot."""
        self._pool.sums = dict(_SNAPSHOT.validate_python(snapshot))
        self._own = ExpiringCache()  # of requests with drafters that the snapshot may not know

    def of_pool(self, drafters: Sequence[str]) -> dict[str, float]:
        """Tokens per second of each drafter over all requests; 0 before the first observation."""
        known = {d: sums[1] / sums[2] for d in drafters if (sums := self._pool.sums.get(d)) is not None}
        mean = sum(known.values()) / len(known) if known else 0.0
        return {drafter: known.get(drafter, mean) for drafter in drafters}

    def of_request(self, request_id: str, pool: dict[str, float]) -> dict[str, float]:
        """A copy of ``pool`` (of `of_pool`) updated with the request's own observations."""
        estimates = pool.copy()
        own = self._own.get(request_id)
        for drafter, (_, num_committed, elapsed_s) in own.sums.items() if own is not None else ():
            if drafter in estimates:
                num_rounds, all_committed, all_elapsed_s = self._pool.sums[drafter]
                weight = self._prior_rounds / num_rounds
                estimates[drafter] = (num_committed + weight * all_committed) / (elapsed_s + weight * all_elapsed_s)
        return estimates
