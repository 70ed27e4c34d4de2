"""`greedy-length`: shorter prompts get smaller drafters (SPIN, section VI, baseline "Greedy")."""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate

from cluster.config import GreedyLengthPolicy
from router.assignment import TARGET_ONLY, Chain, NothingLearned, PoolMember, RequestView, drafter_of
from router.expiring_cache import ExpiringCache
from router.policies.free_capacity import FreeCapacity

HISTORY_LEN = 512  # prompts whose lengths say what is short


class GreedyLength(NothingLearned):
    """Drafters in order of size, each as wide as its capacity; a request goes to the drafter at its prompt's rank among
    recent prompts, else to the nearest with a free place, the smaller of two. A placed request stays although ranks move."""

    def __init__(self, config: GreedyLengthPolicy) -> None:
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
