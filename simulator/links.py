"""Mailboxes and links of one thread, in virtual time."""

from collections.abc import Callable

from cluster.messages import Hello, Message
from cluster.transport.base import Event, LinkUp, Mailbox, Received
from simulator.events import MAIL, Events


class VirtualMailbox(Mailbox):
    """Unbounded. ``on_mail`` is called after each event and each wake."""

    def __init__(self, on_mail: Callable[[], None]) -> None:
        super().__init__()
        self._on_mail = on_mail
        self._unread: list[Event] = []

    @property
    def has_mail(self) -> bool:
        return bool(self._unread)

    def put(self, event: Event, on_room: Callable[[], None] | None = None) -> bool:
        if isinstance(event, Received):
            event.arrived_s = self.clock()
        self._unread.append(event)
        self._on_mail()
        return True

    def drain(self) -> list[Event]:
        events, self._unread = self._unread, []
        return events

    def wake(self) -> None:
        self._on_mail()


class VirtualLink:
    """One end of a link. Messages come to the mailbox of the other end after ``latency_s``, as they are: nothing is encoded,
    lost or drawn at random. Without a latency they are there at once.
    """

    def __init__(self, events: Events, peer: Hello, latency_s: float | None) -> None:
        self.peer = peer
        self._events = events
        self._latency_s = latency_s
        self._deliver: Callable[[Message], None] = _refuse

    def connect(self, deliver: Callable[[Message], None]) -> None:
        """``deliver`` takes the messages at the other end."""
        self._deliver = deliver

    def send(self, message: Message) -> None:
        if self._latency_s is None:
            self._deliver(message)
        else:
            deliver = self._deliver
            self._events.at(self._events.now_s + self._latency_s, MAIL, lambda now_s: deliver(message))

    def close(self) -> None:
        raise AssertionError(f"the link to {self.peer.name} was closed, and no simulated peer sends what closes links")


def _refuse(message: Message) -> None:
    raise AssertionError("a link was used before it was connected")


def link(
    events: Events, left: Mailbox, left_hello: Hello, right: Mailbox, right_hello: Hello, latency_s: float | None
) -> None:
    """Links two mailboxes, whose owners are told so at once."""
    at_left, at_right = VirtualLink(events, right_hello, latency_s), VirtualLink(events, left_hello, latency_s)
    at_left.connect(lambda message: _put(right, at_right, message))
    at_right.connect(lambda message: _put(left, at_left, message))
    left.put(LinkUp(at_left))
    right.put(LinkUp(at_right))


def _put(mailbox: Mailbox, own_end: VirtualLink, message: Message) -> None:
    mailbox.put(Received(own_end, message))
