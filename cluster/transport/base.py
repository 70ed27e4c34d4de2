"""The protocols of links and listeners, and the mailbox that receives their events."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cluster.messages import Hello, Message


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a link and of a listener, alike at both ends."""

    max_message_bytes: int = 16 * 2**20
    queue_len: int = 64  # messages waiting to be sent
    handshake_s: float = 5.0  # deadline for the peer's Hello
    heartbeat_s: float = 1.0  # period of pings on an idle link
    silence_s: float = 6.0  # after which a peer is down; several heartbeats, since a process that holds the GIL sends none
    max_links: int = 256  # per listener


class Link(Protocol):
    """One end of a stream. Thread-safe.

    Messages arrive in order and at most once. A link that breaks loses those in flight; the protocol above resyncs.
    """

    @property
    def peer(self) -> Hello:
        """The verified Hello of the other end."""

    def send(self, message: Message) -> None:
        """Queues a message without waiting.

        Raises LinkClosed; LinkFull, and drops the message; or WireError if a value is outside its range, or the message too
        large (not within a process).
        """

    def close(self) -> None:
        """Closes the link; idempotent. The peer gets LinkDown, this end nothing. Queued messages may be lost."""


class Listener(Protocol):
    """Accepts links at an address."""

    @property
    def address(self) -> str: ...

    def close(self) -> None:
        """Stops accepting and closes the accepted links; idempotent."""


@dataclass(frozen=True, slots=True)
class LinkUp:
    link: Link


@dataclass(frozen=True, slots=True)
class LinkDown:
    link: Link
    reason: str


@dataclass(slots=True)
class Received:
    link: Link
    message: Message
    arrived_s: float = field(default=0.0, compare=False)  # by the clock of the mailbox, which sets it
    faults: Sequence[str] = field(default=(), compare=False)  # of the parts that its ``check`` took from the message


Event = LinkUp | LinkDown | Received


class Mailbox:
    """A bounded, thread-safe inbox for the events of any number of links.

    A full one refuses messages, which pushes back to the sender, but no ``LinkUp`` or ``LinkDown``. ``clock`` stamps
    messages: set it to the clock with whose times the stamps are compared. ``check`` removes the invalid parts of a message
    on the thread that receives it, so that the reader's thread need not.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self.clock: Callable[[], float] = time.monotonic
        self.check: Callable[[Message], tuple[Message, Sequence[str]]] | None = None
        self._events: deque[Event] = deque()
        self._awaiting_room: list[Callable[[], None]] = []
        self._capacity = capacity
        self._woken = False
        self._ready = threading.Condition()

    def put(self, event: Event, on_room: Callable[[], None] | None = None) -> bool:
        """Whether it took the event. Else ``on_room`` is called once after the next drain, on the draining thread."""
        if isinstance(event, Received) and self.check is not None and not event.faults:  # else it came before, to a full one
            event.message, event.faults = self.check(event.message)
        with self._ready:
            if isinstance(event, Received):
                if len(self._events) >= self._capacity:
                    if on_room is not None:
                        self._awaiting_room.append(on_room)
                    return False
                event.arrived_s = self.clock()
            self._events.append(event)
            self._ready.notify_all()
            return True

    def drain(self) -> list[Event]:
        """Returns all waiting events, oldest first, without blocking."""
        with self._ready:
            events = list(self._events)
            self._events.clear()
            on_room, self._awaiting_room = self._awaiting_room, []
        for callback in on_room:
            callback()
        return events

    def wait(self, timeout_s: float) -> bool:
        """Waits at most ``timeout_s`` for an event or a wake. Returns whether there is an event."""
        with self._ready:
            self._ready.wait_for(lambda: self._events or self._woken, timeout_s)
            self._woken = False
            return bool(self._events)

    def wake(self) -> None:
        """Ends the current wait, or the next one, early."""
        with self._ready:
            self._woken = True
            self._ready.notify_all()
