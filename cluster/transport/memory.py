"""Links within one process: ``memory://name``. No threads, no time: a message is in the peer's mailbox when send returns.

``LocalNetwork`` is what the factory uses. ``cluster.transport.simulation`` carries the same links through a virtual clock
and faults.
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
    """One end. Messages that its owner's full mailbox refused wait here, at the receiving end, as they would in a
    socket's buffer; ``queue_len`` bounds them and those under way."""

    def __init__(self, network: "LocalNetwork", mailbox: Mailbox, own: Hello, peer: Hello, limits: Limits) -> None:
        self.own = own
        self._peer = peer
        self._network = network
        self._mailbox = mailbox
        self._limits = limits
        self._lock = threading.Lock()
        self._arrived: deque[Event] = deque()  # refused by the mailbox, oldest first
        self._num_under_way = 0
        self._closed: str | None = None  # why
        self.other: MemoryLink  # set by the network before either end is seen
        self.on_closed: Callable[[], None] = lambda: None

    @property
    def peer(self) -> Hello:
        return self._peer

    def send(self, message: Message) -> None:
        # What arrives is the message itself, which nobody can change.
        if self._network.encodes:
            encode_message(message, self._limits.max_message_bytes)
        if self._closed is not None:
            raise LinkClosed(f"the link to {self._peer.role} {self._peer.name!r} is closed: {self._closed}")
        self.other.reserve()
        self._network.carry(self.other, message)

    def close(self) -> None:
        if self.shut("closed here"):
            self._network.carry_end(self.other, f"{self.own.role} {self.own.name!r} closed the link")

    # What the network does with an end.

    def open(self) -> None:
        """Tell both owners. Nothing may reach the other one before its LinkUp, however fast this one sends."""
        with self.other._lock:
            self._mailbox.put(LinkUp(self))
            self.other._mailbox.put(LinkUp(self.other))

    def reserve(self) -> None:
        """Raises LinkFull when too many messages to this end are under way or wait for its owner."""
        with self._lock:
            if self._num_under_way + len(self._arrived) >= self._limits.queue_len:
                raise LinkFull(
                    f"{self.own.role} {self.own.name!r} reads too slowly: {self._limits.queue_len} messages wait for it"
                )
            self._num_under_way += 1

    def arrive(self, message: Message) -> None:
        """A message that was reserved for has come."""
        with self._lock:
            self._num_under_way -= 1
            if self._closed is None:
                self._take(Received(self, message))

    def lose(self) -> None:
        """A message that was reserved for will never come."""
        with self._lock:
            self._num_under_way -= 1

    def end(self, reason: str) -> None:
        """The other end is gone. LinkDown comes behind the messages that wait."""
        with self._lock:
            if self._closed is not None:
                return
            self._take(LinkDown(self, reason))
            self._closed = reason
        self.on_closed()

    def shut(self, reason: str) -> bool:
        """Closed by its owner, who hears nothing more. Returns whether it was open."""
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
        self.links: dict[MemoryLink, None] = {}  # in the order of their coming

    @property
    def address(self) -> str:
        return self._address

    def close(self) -> None:
        self._network.forget(self)
        for link in list(self.links):
            link.close()


class LocalNetwork:
    """The names that are listened at, and how messages get from one end to the other: at once.

    Args:
        encodes: messages are encoded as on a real link, only so that what could not travel is refused. It takes a tenth or
            more of the time of a target and a companion between two passes; tests want it.
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
                raise InvalidField("address", address, "is already listened at")
            self._listeners[address] = listener
        return listener

    def connect(
        self, address: str, mailbox: Mailbox, hello: Hello, deadline_s: float = 5.0, limits: Limits | None = None
    ) -> MemoryLink:
        """As ``cluster.transport.factory.connect``; it never waits."""
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
        """Bring a message to an end that has reserved room for it."""
        to.arrive(message)

    def carry_end(self, to: MemoryLink, reason: str) -> None:
        """Tell an end that the other has closed, behind the messages under way."""
        to.end(reason)

    def forget(self, listener: MemoryListener) -> None:
        with self._lock:
            if self._listeners.get(listener.address) is listener:
                del self._listeners[listener.address]


def _check(address: str) -> None:
    if not address.startswith(SCHEME) or address == SCHEME:
        raise InvalidField("address", address, f"must be {SCHEME}NAME")
