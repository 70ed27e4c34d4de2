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
from cluster.transport.codec import encode_message
from cluster.transport.handshake import first_refusal, greeting, refusal, same_secret, wrong_secret

SCHEME = "memory://"


class MemoryLink:
    """One end. Holds the messages that its owner's full mailbox refused, as a socket's buffer would. ``queue_len`` bounds
    them together with those in flight."""

    def __init__(self, network: "LocalNetwork", mailbox: Mailbox, own: Hello, peer: Hello, limits: Limits) -> None:
        self.own = own
        self._peer = peer
        self._network = network
        self._mailbox = mailbox
        self._limits = limits
        self._lock = threading.Lock()
        self._arrived: deque[Event] = deque()  # refused by the full mailbox, oldest first
        self._num_under_way = 0
        self._closed: str | None = None  # the reason
        self.other: MemoryLink  # set by the network
        self.on_closed: Callable[[], None] = lambda: None

    @property
    def peer(self) -> Hello:
        return self._peer

    def send(self, message: Message) -> None:
        if self._network.encodes:
            encode_message(message, self._limits.max_message_bytes)
        if self._closed is not None:
            raise LinkClosed(f"the link to {self._peer.role} {self._peer.name!r} is closed: {self._closed}")
        self.other.reserve()
        self._network.carry(self.other, message)

    def close(self) -> None:
        if self.shut("closed here"):
            self._network.carry_end(self.other, f"{self.own.role} {self.own.name!r} closed the link")

    def open(self) -> None:
        """Announces both ends. Locks the other end, so that no message reaches it before its LinkUp."""
        with self.other._lock:
            self._mailbox.put(LinkUp(self))
            self.other._mailbox.put(LinkUp(self.other))

    def reserve(self) -> None:
        """Raises LinkFull if too many messages to this end are in flight or wait for its owner."""
        with self._lock:
            if self._num_under_way + len(self._arrived) >= self._limits.queue_len:
                raise LinkFull(
                    f"{self.own.role} {self.own.name!r} reads too slowly: {self._limits.queue_len} messages wait for it"
                )
            self._num_under_way += 1

    def arrive(self, message: Message) -> None:
        """Delivers a message whose place was reserved."""
        with self._lock:
            self._num_under_way -= 1
            if self._closed is None:
                self._take(Received(self, message))

    def lose(self) -> None:
        """Frees the place of a message that was lost."""
        with self._lock:
            self._num_under_way -= 1

    def end(self, reason: str) -> None:
        """The other end has closed: LinkDown follows the waiting messages."""
        with self._lock:
            if self._closed is not None:
                return
            self._take(LinkDown(self, reason))
            self._closed = reason
        self.on_closed()

    def shut(self, reason: str) -> bool:
        """Closed by its owner, which gets no further event. Returns whether it was open."""
        with self._lock:
            was_open = self._closed is None
            self._closed = self._closed or reason
            self._arrived.clear()
        self.on_closed()
        return was_open

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
        self._address = address
        self.mailbox = mailbox
        self.hello = hello
        self.limits = limits
        self.links: dict[MemoryLink, None] = {}

    @property
    def address(self) -> str:
        return self._address

    def close(self) -> None:
        self._network.forget(self)
        for link in list(self.links):
            link.close()


class LocalNetwork:
    """The listeners of a process by address. Delivers messages at once.

    Args:
        encodes: encode messages as a real link does, only to refuse what it would refuse. For tests: it costs a tenth or
            more of a target's time between two passes.
    """

    def __init__(self, encodes: bool = False) -> None:
        self.encodes = encodes
        self._lock = threading.Lock()
        self._listeners: dict[str, MemoryListener] = {}

    def listen(self, address: str, mailbox: Mailbox, hello: Hello, limits: Limits | None = None) -> MemoryListener:
        """As ``cluster.transport.factory.listen``."""
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
        """As ``cluster.transport.factory.connect``; never waits."""
        _check(address)
        with self._lock:
            listener = self._listeners.get(address)
            if listener is None:
                raise LinkClosed(f"nobody listens at {address}")
            if not same_secret(listener.hello, hello):
                raise wrong_secret(listener.hello, hello).error(address)
            refused = first_refusal(listener.hello, greeting(hello)) or refusal(listener.hello, hello)
            if refused is not None:
                raise refused.error(address)
            if len(listener.links) >= listener.limits.max_links:
                raise LinkClosed(f"{address} takes no more than {listener.limits.max_links} links")
            near = MemoryLink(self, mailbox, hello, replace(listener.hello, token=""), limits or Limits())
            far = MemoryLink(self, listener.mailbox, listener.hello, replace(hello, token=""), listener.limits)
            near.other, far.other = far, near
            listener.links[far] = None
            far.on_closed = lambda: listener.links.pop(far, None)
        near.open()
        return near

    def carry(self, to: MemoryLink, message: Message) -> None:
        """Delivers a message to an end that has reserved its place."""
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
