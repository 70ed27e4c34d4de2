"""The gateways of a target: which request came by which, and the commits to send to each."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from cluster.errors import LinkClosed
from cluster.transport.base import Link
from cluster.types import Commit
from engine.outbox import GatewayOutbox


@dataclass(slots=True)
class GatewaySessions:
    """Not thread-safe: owned by the round. ``end``: called for each request whose gateway is gone or aborts it."""

    end: Callable[[str], None]
    _outboxes: dict[Link, GatewayOutbox] = field(default_factory=dict)
    _owners: dict[str, GatewayOutbox] = field(default_factory=dict)  # by request
    _closed: list[Link] = field(default_factory=list)  # whose requests are still to be ended

    def link_up(self, link: Link) -> None:
        self._outboxes[link] = GatewayOutbox(link)

    def link_down(self, link: Link) -> None:
        """Ends the requests that came by the link."""
        outbox = self._outboxes.pop(link, None)
        if outbox is not None:
            for request_id in [key for key, owner in self._owners.items() if owner is outbox]:
                del self._owners[request_id]
                self.end(request_id)

    def knows(self, link: Link) -> bool:
        return link in self._outboxes

    def add(self, link: Link, request_id: str) -> None:
        """Records the link of a request."""
        self._owners[request_id] = self._outboxes[link]

    def abort(self, link: Link, request_id: str) -> None:
        """Ends a request, if it came by this link."""
        outbox = self._owners.get(request_id)
        if outbox is not None and outbox.link is link:
            del self._owners[request_id]
            self.end(request_id)

    def displace(self, link: Link, request_id: str) -> None:
        """Ends a request that came by another link of the same gateway: it has lost that link, which this target has not
        noticed, and resumes the request by ``link``. Requests of other gateways stay."""
        outbox = self._owners.get(request_id)
        if outbox is not None and outbox.link is not link and outbox.link.peer.name == link.peer.name:
            self.abort(outbox.link, request_id)

    def refuse(self, link: Link, commit: Commit) -> None:
        """Publishes the only commit of a refused request."""
        self._outboxes[link].publish(commit)

    def publish(self, commits: Iterable[Commit]) -> None:
        for commit in commits:
            outbox = self._owners.get(commit.request_id)
            if outbox is not None:
                outbox.publish(commit)
                if commit.finish is not None:
                    del self._owners[commit.request_id]

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
