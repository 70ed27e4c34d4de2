"""Virtual time: what is to happen, in order, and the mailboxes and links of one thread."""

from collections.abc import Callable
from heapq import heappop, heappush

from cluster.messages import Hello, Message
from cluster.transport.base import Event, LinkUp, Mailbox, Received

Action = Callable[[float], None]

MAIL, STEP = 0, 1  # of what happens at one time mail comes first, so that whoever steps then has read it


class Events:
    """A queue of actions. Of those of one time and kind the first put is the first done: a run follows from its input."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Action]] = []
        self._num = 0
        self.now_s = 0.0

    def at(self, time_s: float, kind: int, action: Action) -> None:
        self._num += 1
        heappush(self._heap, (time_s if time_s > self.now_s else self.now_s, kind, self._num, action))

    def run(self, until_s: float) -> None:
        """Does all that is due by then, and what comes of it; ends early when nothing is left."""
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            self.now_s, _, _, action = heappop(heap)
            action(self.now_s)


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
