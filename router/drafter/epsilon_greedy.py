"""`epsilon-greedy`, the default and a baseline of SPIN (section VI): the drafter with the best mean goodput."""

from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Annotated

from pydantic import Field, JsonValue, TypeAdapter

from router.assignment import (
    NO_LEVELS,
    TARGET_ONLY,
    Chain,
    Levels,
    Observation,
    PoolMember,
    RequestView,
    ScoreCounts,
    drafter_of,
    lessons,
    without_lookups,
)
from router.drafter.seats import FreeCapacity
from router.estimates.decayed import DecayedSums, ExpiringCache


class EpsilonGreedy:
    """Per request and slot: with probability epsilon a uniformly random drafter, else the one with the highest estimated
    goodput, if that is better than the present one's by the hysteresis. With scarce places, requests that stay keep theirs;
    then those with the largest gain choose first.

    ``hysteresis``: relative gain under which a request stays where it is. ``prior_rounds``: of a request's own before they
    outweigh the pool's mean."""

    def __init__(self, epsilon: float = 0.02, hysteresis: float = 0.05, prior_rounds: float = 32.0, seed: int = 0) -> None:
        self._epsilon = epsilon
        self._advantage = 1.0 + hysteresis  # of staying
        self._estimates = GoodputEstimates(1000.0, prior_rounds)
        self._seen: ExpiringCache[bool] = ExpiringCache()
        self._random = Random(seed)

    def observe(
        self, observations: Sequence[Observation], scores: Sequence[ScoreCounts] = (), levels: Levels = NO_LEVELS
    ) -> None:
        self._estimates.observe(observations)

    def snapshot(self) -> JsonValue:
        return self._estimates.snapshot()

    def restore(self, snapshot: JsonValue) -> None:
        self._estimates.restore(snapshot)

    def assign(self, requests: Sequence[RequestView], pool: Sequence[PoolMember]) -> Mapping[str, Chain]:
        self._estimates.next_slot()
        self._seen.next_slot()
        pool = without_lookups(pool, sum([not request.is_placeholder for request in requests]))
        room = FreeCapacity(pool)
        if not room.drafters:
            return {request.request_id: TARGET_ONLY for request in requests}
        shared = self._estimates.of_pool(room.drafters)
        chains: dict[str, Chain] = {}
        explorers: list[RequestView] = []
        movers: list[tuple[float, RequestView, dict[str, float]]] = []
        for request in requests:
            if not request.is_placeholder and self._random.random() < self._epsilon:
                explorers.append(request)
                continue
            here = self._place(request, room)
            values = self._estimates.of_request(request.request_id, shared)
            if here is not None:
                values[here] *= self._advantage
            best = max(values.values())
            seat = room.seat(here, request.chain) if here is not None and values[here] >= best else None
            if seat is not None:
                chains[request.request_id] = seat
            else:
                movers.append((best - (values[here] if here is not None else 0.0), request, values))
        for request in explorers:
            open_to = [drafter for drafter in room.drafters if room.num_free(drafter) > 0]
            drawn = self._random.choice(open_to) if open_to else None
            chains[request.request_id] = (room.seat(drawn, request.chain) if drawn is not None else None) or TARGET_ONLY
        for _, request, values in sorted(movers, key=lambda mover: (mover[1].is_placeholder, -mover[0])):
            chains[request.request_id] = self._best_free(request, values, room)
        return chains

    def _place(self, request: RequestView, room: FreeCapacity) -> str | None:
        """The healthy drafter of the request; None for a newcomer, whose default drafter was not chosen for it."""
        if self._seen.get(request.request_id) is None:
            self._seen.put(request.request_id, True)
            return None
        drafter = drafter_of(request.chain[0]) if len(request.chain) == 1 else None
        return drafter if drafter in room.drafters else None

    @staticmethod
    def _best_free(request: RequestView, values: Mapping[str, float], room: FreeCapacity) -> Chain:
        """The best drafter with a free place; of equals, as at the start, the emptiest."""
        for drafter in sorted(room.drafters, key=lambda drafter: (-values[drafter], -room.free_fraction(drafter))):
            seat = room.seat(drafter, request.chain)
            if seat is not None:
                return seat
        return TARGET_ONLY


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
