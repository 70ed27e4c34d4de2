"""Free places of a pool while requests are seated."""

from collections.abc import Iterable, Sequence

from router.assignment import TARGET_ONLY, Chain, PoolMember, RequestView, drafter_of


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
