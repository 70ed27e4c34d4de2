"""`fixed`: one chain for all requests, or the first drafter of the pool with a free place."""

from collections.abc import Mapping, Sequence

from cluster.config import FixedPolicy
from router.assignment import TARGET_ONLY, Chain, NothingLearned, PoolMember, RequestView, drafter_of
from router.policies.free_capacity import FreeCapacity


class Fixed(NothingLearned):
    """Learns nothing. Correctly seated requests stay; the others take the remaining places in their order. A chain runs in
    the process of its last drafter: only that one needs a place, the others only to be open."""

    def __init__(self, config: FixedPolicy) -> None:
        self._chain = config.chain

    def assign(self, requests: Sequence[RequestView], pool: Sequence[PoolMember]) -> Mapping[str, Chain]:
        room = FreeCapacity(pool)
        choices = (self._chain,) if self._chain is not None else tuple((drafter,) for drafter in room.drafters)
        chains: dict[str, Chain] = {}
        unseated = []
        for request in requests:
            here = tuple(drafter_of(member) for member in request.chain)
            seat = _seat(room, here, request.chain) if here in choices else None
            if seat is None:
                unseated.append(request)
            else:
                chains[request.request_id] = seat
        for request in unseated:
            seats = (_seat(room, choice, request.chain) for choice in choices)
            chains[request.request_id] = next((seat for seat in seats if seat is not None), TARGET_ONLY)
        return chains


def _seat(room: FreeCapacity, chain: Chain, current: Chain) -> Chain | None:
    if not chain or not set(chain).issubset(room.drafters):
        return None
    seat = room.seat(chain[-1], current[-1:])
    return None if seat is None else (*chain[:-1], *seat)
