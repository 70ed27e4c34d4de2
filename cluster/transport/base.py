"""The protocols of a link, and the mailbox that every owner reads."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cluster.messages import Hello, Message
from cluster.records import record


@dataclass(frozen=True, slots=True)
class Limits:
    """What one link may use, and one listener. Both ends of a link should have the same.

    ``silence_s`` must leave room for several heartbeats: a process that holds the GIL for long sends none.
    """

    max_message_bytes: int = 16 * 2**20
    queue_len: int = 64  # messages that wait to be sent
    handshake_s: float = 5.0  # a peer that has not said its Hello by then is dropped
    heartbeat_s: float = 1.0  # an idle link says this often that it is there
    silence_s: float = 6.0  # a connected peer that says nothing for this long is down
    max_links: int = 256  # of one listener


class Link(Protocol):
    """One end of a stream. Thread-safe.

    ``peer`` is what the other end said of itself, already checked. Messages arrive in the order sent, at most once;
    a link that breaks loses what was under way, and the protocol above resyncs.
    """

    @property
    def peer(self) -> Hello: ...

    def send(self, message: Message) -> None:
        """Queue a message without waiting.

        Raises:
            LinkClosed: the other end is gone, or this one was closed.
            LinkFull: its bounded queue is full; the message was dropped.
            WireError: the message cannot travel: a value outside its range, or too many bytes. Links within a process, which
                encode nothing, take it.
        """

    def close(self) -> None:
        """Stop; idempotent. The other end sees LinkDown, this one nothing more. What is still queued may be lost."""


class Listener(Protocol):
    """Accepts links at an address until closed."""

    @property
    def address(self) -> str: ...

    def close(self) -> None:
        """Stop accepting and close the links that were accepted; idempotent."""


@dataclass(frozen=True, slots=True)
class LinkUp:
    link: Link


@dataclass(frozen=True, slots=True)
class LinkDown:
    link: Link
    reason: str


@record
class Received:
    link: Link
    message: Message


Event = LinkUp | LinkDown | Received


class Mailbox:
    """A bounded, thread-safe inbox: events from any number of links, and whatever else the owner must hear of.

    ``put`` of a message refuses when full, so that a slow owner pushes back to the sender; ``LinkUp`` and ``LinkDown``
    always fit, there is one of each per link.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self._events: deque[Event] = deque()
        self._awaiting_room: list[Callable[[], None]] = []
        self._capacity = capacity
        self._woken = False
        self._ready = threading.Condition()

    def put(self, event: Event, on_room: Callable[[], None] | None = None) -> bool:
        """Returns False when the mailbox is full and the event is a message: it was not taken. Then ``on_room`` is called
        once, after the next drain and by the thread that drains: it must be quick and may put again."""
        with self._ready:
            if isinstance(event, Received) and len(self._events) >= self._capacity:
                if on_room is not None:
                    self._awaiting_room.append(on_room)
                return False
            self._events.append(event)
            self._ready.notify_all()
            return True

    def drain(self) -> list[Event]:
        """All that has come, oldest first, without waiting."""
        with self._ready:
            events = list(self._events)
            self._events.clear()
            on_room, self._awaiting_room = self._awaiting_room, []
        for callback in on_room:
            callback()
        return events

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is something to drain, or a wake, at most timeout_s. Returns whether there is something."""
        with self._ready:
            self._ready.wait_for(lambda: self._events or self._woken, timeout_s)
            self._woken = False
            return bool(self._events)

    def wake(self) -> None:
        """End this wait, or the next, early."""
        with self._ready:
            self._woken = True
            self._ready.notify_all()
