"""Makes the routing table that the targets read from an assignment."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cluster.types import RoutingTable
from router.assignment import Chain, RequestView

MAX_CHAINS = 16_384


def next_table(
    previous: RoutingTable,
    requests: Sequence[RequestView],
    chains: Mapping[str, Chain],
    defaults: Sequence[Chain],
    versions: Sequence[int],
    scorers: Sequence[str] = (),
) -> RoutingTable:
    """The table of the next slot: ``chains`` of the live ``requests``, ``defaults`` for those not seen yet. Of more than
    MAX_CHAINS it keeps those whose chain changes first: a request that is missing from a table keeps its chain.

    Returns ``previous`` itself if nothing changed and all targets have it by ``versions``. Else the version is above all of
    theirs, so that they take the table of a restarted router. A ``previous`` of version 0 was never published.
    """
    live = {request.request_id: chains[request.request_id] for request in requests if request.request_id in chains}
    if len(live) > MAX_CHAINS:
        moving = [request for request in requests if live.get(request.request_id, request.chain) != request.chain]
        kept = dict.fromkeys([*(r.request_id for r in moving), *live])
        live = {request_id: live[request_id] for request_id in list(kept)[:MAX_CHAINS]}
    table = RoutingTable(previous.version, live, tuple(defaults) or ((),), tuple(scorers))
    if previous.version > 0 and table == previous and all(version == previous.version for version in versions):
        return previous
    return replace(table, version=max(previous.version, *versions) + 1)
