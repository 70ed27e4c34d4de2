"""The gateways of a target: which requests came by which, and the commits to send to each."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from cluster.errors import LinkClosed
from cluster.transport.base import Link
from cluster.types import Commit
from engine.outbox import GatewayOutbox
from engine.sequences import LiveSequence, Sequences


@dataclass(slots=True)
class GatewaySessions:
    """Not thread-safe: owned by the round. ``end``: called for each request whose gateway is gone or aborts it."""

    sequences: Sequences
    end: Callable[[str], None]
    _outboxes: dict[Link, GatewayOutbox] = field(default_factory=dict)
    _closed: list[Link] = field(default_factory=list)  # whose requests are still to be ended

    def link_up(self, link: Link) -> None:
        self._outboxes[link] = GatewayOutbox(link)

    def link_down(self, link: Link) -> None:
        """Ends the requests that came by the link."""
        outbox = self._outboxes.pop(link, None)
        if outbox is not None:
            for request_id in [one.request.id for one in self.sequences if one.gateway is outbox]:
                self.end(request_id)

    def knows(self, link: Link) -> bool:
        return link in self._outboxes

    def outbox(self, link: Link) -> GatewayOutbox:
        """Of the gateway at the other end of a link that is up."""
        return self._outboxes[link]

    def abort(self, link: Link, request_id: str) -> None:
        """Ends a request, if it came by this link."""
        sequence = self.sequences.get(request_id)
        if sequence is not None and sequence.gateway is not None and sequence.gateway.link is link:
            self.end(request_id)

    def displace(self, link: Link, request_id: str) -> None:
        """Ends a request that came by another link of the same gateway: it has lost that link, which this target has not
        noticed, and resumes the request by ``link``. Requests of other gateways stay."""
        sequence = self.sequences.get(request_id)
        former = None if sequence is None or sequence.gateway is None else sequence.gateway.link
        if former is not None and former is not link and former.peer.name == link.peer.name:
            self.end(request_id)

    def publish(self, commits: Iterable[tuple[LiveSequence, Commit]]) -> None:
        """Also of requests that these commits end."""
        for sequence, commit in commits:
            if sequence.gateway is not None:
                sequence.gateway.publish(commit)

    def flush(self) -> None:
        """Sends what is pending. Ends no request: ``end_lost`` does."""
        for link, outbox in self._outboxes.items():
            try:
                outbox.flush()
            except LinkClosed:
                self._closed.append(link)

    def end_lost(self) -> None:
        """Ends the requests whose gateway did not take their commits."""
        while self._closed:
            self.link_down(self._closed.pop())
