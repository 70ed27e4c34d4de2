"""The gateways as the round sees them: whose request is whose, and what each is to be told."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from cluster.errors import LinkClosed
from cluster.transport.base import Link
from cluster.types import Commit
from engine.outbox import GatewayPort


@dataclass(slots=True)
class Callers:
    """Not thread-safe: the round owns it. ``end`` is called for each request that nobody waits for any more."""

    end: Callable[[str], None]
    _ports: dict[Link, GatewayPort] = field(default_factory=dict)
    _port_of: dict[str, GatewayPort] = field(default_factory=dict)  # by request

    def link_up(self, link: Link) -> None:
        self._ports[link] = GatewayPort(link)

    def link_down(self, link: Link) -> None:
        """Its requests end: there is nobody to tell."""
        port = self._ports.pop(link, None)
        if port is not None:
            for request_id in [key for key, owner in self._port_of.items() if owner is port]:
                del self._port_of[request_id]
                self.end(request_id)

    def knows(self, link: Link) -> bool:
        return link in self._ports

    def own(self, link: Link, request_id: str) -> None:
        """The request came by this link."""
        self._port_of[request_id] = self._ports[link]

    def abort(self, link: Link, request_id: str) -> None:
        """The caller is gone. Nobody can abort what came by another link."""
        port = self._port_of.get(request_id)
        if port is not None and port.link is link:
            del self._port_of[request_id]
            self.end(request_id)

    def refuse(self, link: Link, commit: Commit) -> None:
        """The one commit of a request that was not taken."""
        self._ports[link].publish([commit])

    def tell(self, commits: Iterable[Commit]) -> None:
        for commit in commits:
            port = self._port_of.get(commit.request_id)
            if port is not None:
                port.publish([commit])
                if commit.finish is not None:
                    del self._port_of[commit.request_id]

    def flush(self) -> None:
        """Sends every gateway what it is to be told."""
        for link, port in tuple(self._ports.items()):
            try:
                port.flush()
            except LinkClosed:
                self.link_down(link)
