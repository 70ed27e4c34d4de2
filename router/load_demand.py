"""Assignments to drafters that are not in memory are wishes: the requests go elsewhere meanwhile."""

from collections import Counter
from collections.abc import Mapping, Sequence

from router.assignment import TARGET_ONLY, Chain, PoolMember, RequestView, drafter_of
from router.policies.free_capacity import Room


def settle(
    chains: Mapping[str, Chain], requests: Sequence[RequestView], pool: Sequence[PoolMember], absent: frozenset[str]
) -> tuple[dict[str, Chain], dict[str, int]]:
    """The chains with those of ``absent`` members replaced, and how many requests under way wished for each of these.

    A request that is to be with an absent member stays where it is, or takes the emptiest place that is left.
    """
    wishing = [r for r in requests if absent.intersection(chains.get(r.request_id, TARGET_ONLY))] if absent else []
    if not wishing:
        return dict(chains), {}
    settled = dict(chains)
    room = Room([member for member in pool if member.name not in absent])
    wished = {request.request_id for request in wishing}
    for request in requests:
        if request.request_id not in wished:
            for member in chains.get(request.request_id, TARGET_ONLY)[-1:]:
                room.seat(drafter_of(member), (member,))
    wishes: Counter[str] = Counter()
    for request in wishing:
        if request.committed_len:
            wishes.update(absent.intersection(chains[request.request_id]))
        here = request.chain[-1:]
        seat = room.seat(drafter_of(here[0]), here) if here else None
        if seat is None and room.drafters:
            seat = room.seat(max(room.drafters, key=room.free_fraction), TARGET_ONLY)
        stays = seat == here and bool(here)
        settled[request.request_id] = request.chain if stays else seat or TARGET_ONLY
    return settled, dict(wishes)
