"""Demand for drafters that are not in memory, and a fallback for the requests assigned to them."""

from collections import Counter
from collections.abc import Mapping, Sequence

from router.assignment import TARGET_ONLY, Chain, PoolMember, RequestView, drafter_of
from router.policies.free_capacity import FreeCapacity


def settle(
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
