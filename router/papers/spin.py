"""SPIN: `lbss`, its learning-based selection of drafters (section IV, algorithms 1 and 2), and the baselines of section VI.

The time slot of `lbss` is the router's; its goodput r_ij(t) is the committed tokens per second of an `Observation`.

    Algorithm 1                                                          here
    1   for epoch k = 1, 2, ...                                          `_Calendar.next_slot`
    2     exploration: estimate g_ij by algorithm 2                      `_explore`, `observe`
    3-4   exploitation: solve (10)-(12), run so for 2^k time slots       `_exploit`, then `_keep`
    Algorithm 2 (alpha slots, in chunks of beta)
    3-6     every request draws a drafter uniformly                      `_explore`, first loop
    7-11    of those over B_j, B_j are kept at random, others dropped    `_explore`, second loop
    13-16   it stays so for the beta slots of a chunk                    `_keep`
    18    the estimate is the mean of what was observed                  `GoodputEstimates`

As in section IV.B and figure 8, each chunk draws anew. (10)-(12) is a maximum-weight matching of requests with B_j replicas
of each drafter j. The paper's set of requests is fixed; here requests come and go:

- A request that arrives within a chunk draws at once; one that arrives during exploitation is matched with free places.
- An unexplored pair counts as the mean of its drafter; an unexplored drafter as the mean of the others.
- The mean is over the exploration of all epochs: only so do estimates sharpen with k, as theorem 1 needs.
- Requests of a drafter that closes are treated as new. Slots without requests are no part of an epoch.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate
from math import inf
from random import Random
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter

from router.assignment import (
    NO_LEVELS,
    TARGET_ONLY,
    Chain,
    Levels,
    NoRegret,
    NothingLearned,
    Observation,
    PoolMember,
    RequestView,
    ScoreCounts,
    drafter_of,
    lessons,
)
from router.drafter.matching import Floats, Ints
from router.drafter.seats import FreeCapacity
from router.estimates.decayed import DecayedSums, ExpiringCache

_DROPPED = ""  # by lines 9 and 10
MAX_EPOCH = 62
_SOLVER = "scipy.optimize"  # takes 0.8 s to import, which targets and other policies need not pay


class LbssSnapshot(BaseModel):
    model_config = ConfigDict(extra="forbid")

    epoch: Annotated[int, Field(ge=1, le=MAX_EPOCH)]
    drafters: dict[str, JsonValue]


class Lbss(NoRegret):
    """Alternates exploration in chunks with exploitation that doubles in length."""

    def __init__(self, exploration_slots: int = 16, chunk_slots: int = 2, seed: int = 0) -> None:
        self._calendar = _Calendar(exploration_slots, chunk_slots)
        self._means = GoodputEstimates(inf)
        self._chosen: ExpiringCache[str] = ExpiringCache()  # request -> its drafter in this chunk, or this exploitation
        self._random = np.random.default_rng(seed)
        import_module(_SOLVER)  # here rather than in a slot, which it would hold up

    def observe(
        self, observations: Sequence[Observation], scores: Sequence[ScoreCounts] = (), levels: Levels = NO_LEVELS
    ) -> None:
        """Line 15: learns from exploration alone."""
        if self._calendar.exploring:
            self._means.observe(lessons(observations))

    def snapshot(self) -> JsonValue:
        """The means over all requests, and their epoch."""
        means = self._means.snapshot()
        return {"epoch": self._calendar.epoch, "drafters": means} if means else None

    def restore(self, snapshot: JsonValue) -> None:
        found = LbssSnapshot.model_validate(snapshot)
        self._means.restore(found.drafters)
        self._calendar.epoch = found.epoch

    def assign(self, requests: Sequence[RequestView], pool: Sequence[PoolMember]) -> Mapping[str, Chain]:
        self._chosen.next_slot()
        self._means.next_slot([request.request_id for request in requests])  # an exploitation may be long
        chains = dict.fromkeys([request.request_id for request in requests], TARGET_ONLY)
        room = FreeCapacity(pool)
        live = [request for request in requests if not request.is_placeholder]
        if live and self._calendar.next_slot():  # slots without requests are no part of an epoch: nothing can be learned
            self._chosen = ExpiringCache()
        newcomers = self._keep(live, room, chains)
        for group in (newcomers, [request for request in requests if request.is_placeholder]):
            if group and room.drafters:
                decide = self._explore if self._calendar.exploring else self._exploit
                for request, drafter in zip(group, decide(group, room), strict=True):
                    self._chosen.put(request.request_id, drafter)
                    seat = room.seat(drafter, request.chain) if drafter != _DROPPED else None
                    chains[request.request_id] = seat or TARGET_ONLY
        return chains

    def _keep(self, requests: Sequence[RequestView], room: FreeCapacity, chains: dict[str, Chain]) -> list[RequestView]:
        """Seats requests at the drafters chosen for them earlier; returns the others."""
        others = []
        for request in requests:
            drafter = self._chosen.get(request.request_id)
            seat = room.seat(drafter, request.chain) if drafter else None
            if seat is not None:
                chains[request.request_id] = seat
            elif drafter != _DROPPED or not self._calendar.exploring:
                others.append(request)
        return others

    def _explore(self, requests: Sequence[RequestView], room: FreeCapacity) -> list[str]:
        drawn = self._random.integers(len(room.drafters), size=len(requests))
        chosen = [room.drafters[j] for j in drawn.tolist()]
        for j, drafter in enumerate(room.drafters):
            crowd = np.flatnonzero(drawn == j)
            num_over = len(crowd) - room.num_free(drafter)
            if num_over > 0:
                for i in self._random.choice(crowd, num_over, replace=False).tolist():
                    chosen[i] = _DROPPED
        return chosen

    def _exploit(self, requests: Sequence[RequestView], room: FreeCapacity) -> list[str]:
        pool = self._means.of_pool(room.drafters)
        weights = np.array([list(self._means.of_request(r.request_id, pool).values()) for r in requests])
        slots = np.repeat(np.arange(len(room.drafters)), [room.num_free(drafter) for drafter in room.drafters])
        rows, columns = heaviest_matching(weights[:, slots])
        chosen = [_DROPPED] * len(requests)
        for i, slot in zip(rows.tolist(), columns.tolist(), strict=True):
            chosen[i] = room.drafters[slots[slot]]
        return chosen


def heaviest_matching(weights: Floats) -> tuple[Ints, Ints]:
    """Matched rows and columns of the largest total of ``weights``: (requests, places)."""
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(weights, maximize=True)
    return rows, columns


@dataclass(slots=True)
class _Calendar:
    """Epoch, stage and slot of the algorithm."""

    exploration_slots: int  # alpha
    chunk_slots: int  # beta
    epoch: int = 1
    exploring: bool = True
    _slot: int = -1  # within the stage

    def next_slot(self) -> bool:
        """Advances a slot; returns whether a chunk or an exploitation starts."""
        self._slot += 1
        if self._slot == (self.exploration_slots if self.exploring else self._exploitation_slots()):
            if not self.exploring:
                self.epoch = min(self.epoch + 1, MAX_EPOCH)
            self.exploring, self._slot = not self.exploring, 0
        return self._slot % self.chunk_slots == 0 if self.exploring else self._slot == 0

    def _exploitation_slots(self) -> int:
        return int(2**self.epoch)


class EpsilonGreedy(NoRegret):
    """Per request and slot: with probability epsilon a uniformly random drafter, else the one with the highest estimated
    goodput, if that is better than the present one's by the hysteresis. With scarce places, requests that stay keep theirs;
    then those with the largest gain choose first.

    ``hysteresis``: relative gain under which a request stays where it is. ``prior_rounds``: of a request's own before they
    outweigh the pool's mean."""

    def __init__(self, epsilon: float = 0.05, hysteresis: float = 0.1, prior_rounds: float = 8.0, seed: int = 0) -> None:
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


HISTORY_LEN = 512  # prompts whose lengths say what is short


class GreedyLength(NothingLearned):
    """Drafters in order of size, each as wide as its capacity; a request goes to the drafter at its prompt's rank among
    recent prompts, else to the nearest with a free place, the smaller of two. A placed request stays although ranks move."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=HISTORY_LEN)
        self._seen: ExpiringCache[str] = ExpiringCache()  # request -> drafter that was chosen

    def assign(self, requests: Sequence[RequestView], pool: Sequence[PoolMember]) -> Mapping[str, Chain]:
        self._seen.next_slot()
        room = FreeCapacity(sorted(pool, key=lambda member: member.cost))
        widths = [room.num_free(drafter) for drafter in room.drafters]
        chains: dict[str, Chain] = {}
        unplaced = []
        for request in requests:
            here = drafter_of(request.chain[0]) if len(request.chain) == 1 else None
            placed = self._seen.get(request.request_id)
            if placed is None and not request.is_placeholder:
                self._lengths.append(request.prompt_len)
            seat = room.seat(here, request.chain) if here is not None and here == placed else None
            if seat is None:
                unplaced.append(request)
            else:
                chains[request.request_id] = seat
        lengths = sorted(self._lengths)
        for request in sorted(unplaced, key=lambda request: (request.is_placeholder, request.prompt_len)):
            rank = bisect_left(lengths, request.prompt_len) / max(1, len(lengths))
            wanted = _pointed_at(rank, widths)
            nearest = sorted(range(len(room.drafters)), key=lambda i: (abs(i - wanted), i))
            seats = ((room.drafters[i], room.seat(room.drafters[i], request.chain)) for i in nearest)
            drafter, chain = next(((d, seat) for d, seat in seats if seat is not None), ("", TARGET_ONLY))
            self._seen.put(request.request_id, drafter)
            chains[request.request_id] = chain
        return chains


def _pointed_at(rank: float, widths: Sequence[int]) -> int:
    """Index of the width, laid end to end, that the share ``rank`` of their sum falls into."""
    return min(bisect_right(list(accumulate(widths)), rank * sum(widths)), len(widths) - 1)


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
