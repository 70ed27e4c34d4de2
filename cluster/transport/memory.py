"""Links within one process: ``memory://name``. No threads and no clock: ``send`` delivers into the peer's mailbox.

A subclass of ``LocalNetwork`` may deliver later, or not at all, to simulate a network.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from cluster.errors import InvalidField, LinkClosed, LinkFull
from cluster.messages import Hello, Message
from cluster.transport.base import Event, Limits, LinkDown, LinkUp, Mailbox, Received
from cluster.transport.stream import refusal, same_secret, version_refusal

SCHEME = "memory://"


class MemoryLink:
    """One end. Holds what its owner's full mailbox refused; ``queue_len`` bounds that together with messages in flight."""

    def __init__(self, network: "LocalNetwork", mailbox: Mailbox, own: Hello, peer: Hello, limits: Limits) -> None:
        self.own = own
        self.peer = peer
        self._network = network
        self._mailbox = mailbox
        self.limits = limits
        self._lock = threading.Lock()
        self._arrived: deque[Event] = deque()  # refused by the full mailbox, oldest first
        self._closed: str | None = None  # the reason
        self.other: MemoryLink  # set by the network
        self.on_closed: Callable[[], None] = lambda: None

    def send(self, message: Message) -> None:
        if self._closed is not None:
            raise LinkClosed(f"the link to {self.peer.role} {self.peer.name!r} is closed: {self._closed}")
        self._network.carry(self.other, message)

    def close(self) -> None:
        with self._lock:
            was_open = self._closed is None
            self._closed = self._closed or "closed here"
            self._arrived.clear()
        self.on_closed()
        if was_open:
            self._network.carry_end(self.other, f"{self.own.role} {self.own.name!r} closed the link")

    def open(self) -> None:
        """Announces both ends. Locks the other end, so that no message reaches it before its LinkUp."""
        with self.other._lock:
            self._mailbox.put(LinkUp(self))
            self.other._mailbox.put(LinkUp(self.other))

    def check_room(self, num_in_flight: int = 0) -> None:
        """Raises LinkFull if too many messages are in flight or wait for this end's owner."""
        queue_len = self.limits.queue_len
        if num_in_flight + len(self._arrived) >= queue_len:
            raise LinkFull(f"{self.own.role} {self.own.name!r} reads too slowly: {queue_len} messages wait for it")

    def arrive(self, message: Message) -> None:
        """Raises LinkFull as ``check_room``."""
        with self._lock:
            self.check_room()
            if self._closed is None:
                self._take(Received(self, message))

    def end(self, reason: str) -> None:
        """The other end has closed: LinkDown follows the waiting messages."""
        with self._lock:
            if self._closed is not None:
                return
            self._take(LinkDown(self, reason))
            self._closed = reason
        self.on_closed()

    def _take(self, event: Event) -> None:
        if self._arrived or not self._mailbox.put(event, self._on_room):
            self._arrived.append(event)

    def _on_room(self) -> None:
        with self._lock:
            while self._arrived and self._mailbox.put(self._arrived[0], self._on_room):
                self._arrived.popleft()


class MemoryListener:
    def __init__(self, network: "LocalNetwork", address: str, mailbox: Mailbox, hello: Hello, limits: Limits) -> None:
        self._network = network
        self.address = address
        self.mailbox = mailbox
        self.hello = hello
        self.limits = limits
        self.links: dict[MemoryLink, None] = {}

    def close(self) -> None:
        self._network.forget(self)
        for link in list(self.links):
            link.close()


class LocalNetwork:
    """The listeners of a process by address. Delivers messages at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[str, MemoryListener] = {}

    def listen(self, address: str, mailbox: Mailbox, hello: Hello, limits: Limits | None = None) -> MemoryListener:
        """As ``cluster.transport.listen``."""
        _check(address)
        listener = MemoryListener(self, address, mailbox, hello, limits or Limits())
        with self._lock:
            if address in self._listeners:
                raise InvalidField("address", address, "is already in use")
            self._listeners[address] = listener
        return listener

    def connect(
        self, address: str, mailbox: Mailbox, hello: Hello, deadline_s: float = 5.0, limits: Limits | None = None
    ) -> MemoryLink:
        """As ``cluster.transport.connect``; never waits."""
        _check(address)
        with self._lock:
            listener = self._listeners.get(address)
            if listener is None:
                raise LinkClosed(f"nobody listens at {address}")
            own = listener.hello
            refused = version_refusal(own, hello) or refusal(own, hello, same_secret(own, hello))
            if refused is not None:
                raise refused.error(address)
            if len(listener.links) >= listener.limits.max_links:
                raise LinkClosed(f"{address} takes no more than {listener.limits.max_links} links")
            near = MemoryLink(self, mailbox, hello, replace(own, token=""), limits or Limits())
            far = MemoryLink(self, listener.mailbox, own, replace(hello, token=""), listener.limits)
            near.other, far.other = far, near
            listener.links[far] = None
            far.on_closed = lambda: listener.links.pop(far, None)
        near.open()
        return near

    def carry(self, to: MemoryLink, message: Message) -> None:
        to.arrive(message)

    def carry_end(self, to: MemoryLink, reason: str) -> None:
        """Tells an end, after the messages in flight, that the other has closed."""
        to.end(reason)

    def forget(self, listener: MemoryListener) -> None:
        with self._lock:
            if self._listeners.get(listener.address) is listener:
                del self._listeners[listener.address]


def _check(address: str) -> None:
    if not address.startswith(SCHEME) or address == SCHEME:
        raise InvalidField("address", address, f"must be {SCHEME}NAME")
