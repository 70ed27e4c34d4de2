"""SPIN: `lbss`, its learning-based selection of drafters (section IV, algorithms 1 and 2), and a baseline of section VI; the
other one, `epsilon-greedy`, lies in `router/drafter/`.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate
from math import inf
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, JsonValue

from router.assignment import (
    NO_LEVELS,
    TARGET_ONLY,
    Chain,
    Levels,
    NothingLearned,
    Observation,
    PoolMember,
    RequestView,
    ScoreCounts,
    drafter_of,
    lessons,
)
from router.cost_model import Floats, Ints
from router.drafter.epsilon_greedy import GoodputEstimates
from router.drafter.seats import FreeCapacity
from router.estimates.decayed import ExpiringCache

_DROPPED = ""  # by lines 9 and 10
MAX_EPOCH = 62
_SOLVER = "scipy.optimize"  # takes 0.8 s to import, which targets and other policies need not pay


class LbssSnapshot(BaseModel):
    model_config = ConfigDict(extra="forbid")

    epoch: Annotated[int, Field(ge=1, le=MAX_EPOCH)]
    drafters: dict[str, JsonValue]


class Lbss:
    """Alternates exploration in chunks with exploitation that doubles in length."""

    def __init__(self, exploration_slots: int, chunk_slots: int, seed: int = 0) -> None:
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
    """Index of the width, laid end to end, that the share ``rank`` of their sum falls into; at rank 1 beyond the last."""
    return bisect_right(list(accumulate(widths)), rank * sum(widths))
