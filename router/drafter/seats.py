"""Free places of a pool while requests are seated, the policy `fixed`, and seats of requests whose drafter is absent."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from router.assignment import TARGET_ONLY, Chain, NothingLearned, PoolMember, RequestView, drafter_of


class FreeCapacity:
    """Free places of open members, by drafter; replicas of a drafter are interchangeable. ``drafters`` are those with an
    open member, in the order of the pool, and ``members`` the first open member of each."""

    def __init__(self, pool: Sequence[PoolMember]) -> None:
        self._free: dict[str, int] = {}
        self._replicas: dict[str, list[PoolMember]] = {}
        for member in pool:
            if member.is_open:
                self._free[member.name] = member.capacity
                self._replicas.setdefault(drafter_of(member.name), []).append(member)
        self.drafters = tuple(self._replicas)
        self.members = tuple(replicas[0] for replicas in self._replicas.values())

    def num_free(self, drafter: str) -> int:
        return sum([self._free[member.name] for member in self._replicas.get(drafter, ())])

    def num_copies(self, drafter: str) -> int:
        """Replicas of the drafter that draft at once."""
        return sum([member.num_targets for member in self._replicas[drafter]])

    def seat_all(self, assigned: Iterable[tuple[RequestView, str]]) -> dict[str, Chain]:
        """A place for each request at its drafter. Requests that stay at their replica are seated first. No drafter may be
        assigned more requests than it has free places."""
        chains: dict[str, Chain] = {}
        movers = []
        for request, drafter in assigned:
            here = request.chain[0] if len(request.chain) == 1 else ""
            if drafter_of(here) == drafter and self._free.get(here, 0) > 0:
                self._free[here] -= 1
                chains[request.request_id] = request.chain
            else:
                movers.append((request.request_id, drafter))
        for request_id, drafter in movers:
            seat = self.seat(drafter, TARGET_ONLY)
            assert seat is not None, f"more requests than places for {drafter}"
            chains[request_id] = seat
        return chains

    def free_fraction(self, drafter: str) -> float:
        """Free share of the drafter's places; 0 without any place."""
        return self.num_free(drafter) / max(1, sum([member.capacity for member in self._replicas[drafter]]))

    def seat(self, drafter: str, current: Chain) -> Chain | None:
        """Takes a place at the drafter: at the request's present replica, else at the emptiest. None if it is full."""
        members = [member.name for member in self._replicas.get(drafter, ())]
        if len(current) == 1 and current[0] in members and self._free[current[0]] > 0:
            chosen = current[0]
        else:
            chosen = max(members, key=self._free.__getitem__, default="")
            if not chosen or self._free[chosen] <= 0:
                return None
        self._free[chosen] -= 1
        return (chosen,)


class Fixed(NothingLearned):
    """Learns nothing. Correctly seated requests stay; the others take the remaining places in their order. A chain runs in
    the process of its last drafter: only that one needs a place, the others only to be open. ``chain`` None: the first
    drafter of the pool that has capacity."""

    def __init__(self, chain: Chain | None = None) -> None:
        self._chain = chain

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


def reseat_absent(
    chains: Mapping[str, Chain], requests: Sequence[RequestView], pool: Sequence[PoolMember], absent: frozenset[str]
) -> tuple[dict[str, Chain], dict[str, int]]:
    """Replaces chains of ``absent`` members; returns the chains, and the live requests assigned to each absent member. A
    request assigned to an absent member stays where it is, or goes to the drafter with the largest free share."""
    unserved = [r for r in requests if absent.intersection(chains.get(r.request_id, TARGET_ONLY))] if absent else []
    if not unserved:
        return dict(chains), {}
    settled = dict(chains)
    room = FreeCapacity([member for member in pool if member.name not in absent])
    unserved_ids = {request.request_id for request in unserved}
    for request in requests:
        if request.request_id not in unserved_ids:
            for member in chains.get(request.request_id, TARGET_ONLY)[-1:]:
                room.seat(drafter_of(member), (member,))
    load_demand: Counter[str] = Counter()
    for request in unserved:
        if request.committed_len:
            load_demand.update(absent.intersection(chains[request.request_id]))
        here = request.chain[-1:]
        seat = room.seat(drafter_of(here[0]), here) if here else None
        if seat is None and room.drafters:
            seat = room.seat(max(room.drafters, key=room.free_fraction), TARGET_ONLY)
        stays = seat == here and bool(here)
        settled[request.request_id] = request.chain if stays else seat or TARGET_ONLY
    return settled, dict(load_demand)
