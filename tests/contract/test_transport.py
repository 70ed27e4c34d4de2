"""What every transport promises, over each of them: in memory, by unix sockets, by gRPC."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import grpc
import pytest

from cluster.errors import IncompatibleTokenizer, InvalidField, LinkClosed, LinkFull, OutriderError, WireError
from cluster.messages import Hello, ProposalRound, Role
from cluster.transport.base import Event, Limits, Link, LinkDown, LinkUp, Listener, Mailbox, Received
from cluster.transport.codec import decode, encode
from cluster.transport.factory import connect, listen
from cluster.transport.frames import Greeting, Refusal, Welcome
from cluster.transport.handshake import NONCE_BYTES, Side, greeting, proof
from cluster.transport.rpc import PIECE_BYTES
from cluster.transport.stream import MAX_HANDSHAKE_BYTES

ROOT = Path(__file__).parents[2]
DEADLINE_S = 20.0
TARGET = Hello(Role.TARGET, "target", 100, "tokenizer", token="secret")
DRAFTER = Hello(Role.DRAFTER, "drafter", 100, "tokenizer", token="secret")
QUICK = Limits(heartbeat_s=0.1, silence_s=0.8, handshake_s=0.5)
_NUMBERS = count()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path for sockets: pytest's own may be too long for the kernel."""
    path = Path(tempfile.mkdtemp(prefix="outrider-"))
    yield path
    shutil.rmtree(path)


def address_of(scheme: str, folder: Path) -> str:
    return {
        "memory": f"memory://{next(_NUMBERS)}",
        "unix": f"unix://{folder}/links/{next(_NUMBERS)}",
        "grpc": "grpc://127.0.0.1:0",
    }[scheme]


@pytest.fixture(params=["memory", "unix", "grpc"])
def address(request: pytest.FixtureRequest, folder: Path) -> str:
    return address_of(request.param, folder)


@pytest.fixture(params=["unix", "grpc"])
def remote_address(request: pytest.FixtureRequest, folder: Path) -> str:
    """Of the transports that leave the process."""
    return address_of(request.param, folder)


@dataclass
class Ends:
    """What a test has opened, and closes at its end."""

    listeners: list[Listener] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    children: list["subprocess.Popen[str]"] = field(default_factory=list)
    wires: list["Wire"] = field(default_factory=list)

    def listen(self, address: str, mailbox: Mailbox, hello: Hello = TARGET, limits: Limits | None = None) -> str:
        self.listeners.append(listen(address, mailbox, hello, limits))
        return self.listeners[-1].address

    def connect(self, address: str, mailbox: Mailbox, hello: Hello = DRAFTER, limits: Limits | None = None) -> Link:
        self.links.append(connect(address, mailbox, hello, DEADLINE_S, limits))
        return self.links[-1]

    def pair(
        self, address: str, far_mailbox: Mailbox, near_mailbox: Mailbox, limits: Limits | None = None
    ) -> tuple[Link, Link]:
        """The accepting and the connecting end of a link, both up."""
        near = self.connect(self.listen(address, far_mailbox, limits=limits), near_mailbox, limits=limits)
        assert near_mailbox.drain() == [LinkUp(near)]
        (up,) = collect(far_mailbox, 1)
        assert isinstance(up, LinkUp)
        return up.link, near

    def wire(self, address: str) -> "Wire":
        self.wires.append(Wire.to(address))
        return self.wires[-1]

    def child(self, mode: str, address: str) -> "subprocess.Popen[str]":
        """A process at the other end, up or listening."""
        command = [sys.executable, "-m", "tests.support.link_peer", mode, address]
        pipe = subprocess.PIPE
        self.children.append(subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
        return self.children[-1]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    for child in ends.children:
        child.kill()
        child.communicate(timeout=DEADLINE_S)
    for closable in (*ends.wires, *ends.links, *ends.listeners):
        closable.close()


def collect(mailbox: Mailbox, num_events: int) -> list[Event]:
    """The next events, so many of them at least."""
    events: list[Event] = []
    until_s = time.monotonic() + DEADLINE_S
    while len(events) < num_events and time.monotonic() < until_s:
        mailbox.wait(until_s - time.monotonic())
        events += mailbox.drain()
    assert len(events) >= num_events, f"only {len(events)} of {num_events} events came: {events}"
    return events


def numbers(events: list[Event]) -> list[int]:
    return [event.message.table_version for event in events if isinstance(event, Received)]  # type: ignore[union-attr]


def eventually(condition: Callable[[], bool]) -> bool:
    """For what no event tells: how many threads and descriptors there are."""
    until_s = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.01)
    return True


def sized(num_bytes: int) -> ProposalRound:
    """A message that takes exactly so many bytes on the wire."""
    message = ProposalRound(1, resyncs=("x" * num_bytes,))
    return ProposalRound(1, resyncs=("x" * (2 * num_bytes - len(encode(message))),))


# Messages.


def test_each_end_knows_the_other(ends: Ends, address: str) -> None:
    far, near = ends.pair(address, Mailbox(), Mailbox())
    assert far.peer == DRAFTER
    assert near.peer == TARGET


def test_messages_arrive_in_order_in_both_directions_at_once(ends: Ends, address: str) -> None:
    far_mailbox, near_mailbox = Mailbox(), Mailbox()
    far, near = ends.pair(address, far_mailbox, near_mailbox, Limits(queue_len=400))

    def send(link: Link) -> None:
        for number in range(400):
            link.send(ProposalRound(number, resyncs=("request",) * (number % 50)))

    threads = [threading.Thread(target=send, args=(link,)) for link in (far, near)]
    for thread in threads:
        thread.start()
    for mailbox, link in ((far_mailbox, far), (near_mailbox, near)):
        events = collect(mailbox, 400)
        assert events == [Received(link, ProposalRound(n, resyncs=("request",) * (n % 50))) for n in range(400)]
    for thread in threads:
        thread.join(DEADLINE_S)


def test_a_message_may_be_as_big_as_the_limit_and_no_bigger(ends: Ends, address: str) -> None:
    mailbox = Mailbox()
    far, near = ends.pair(address, mailbox, Mailbox(), Limits(max_message_bytes=2**20))
    biggest = sized(2**20)
    near.send(biggest)
    with pytest.raises(WireError, match=r"1048577 bytes cannot be sent: the link takes at most 1048576"):
        near.send(sized(2**20 + 1))
    near.send(ProposalRound(7))
    assert collect(mailbox, 2) == [Received(far, biggest), Received(far, ProposalRound(7))]


def test_a_peer_that_sends_more_than_the_limit_is_dropped(ends: Ends, remote_address: str) -> None:
    mailbox, near_mailbox = Mailbox(), Mailbox()
    address = ends.listen(remote_address, mailbox, limits=Limits(max_message_bytes=1000))
    near = ends.connect(address, near_mailbox)
    near.send(sized(2000))
    up, down = collect(mailbox, 2)
    assert isinstance(up, LinkUp)
    assert isinstance(down, LinkDown)
    assert down.link is up.link
    assert isinstance(collect(near_mailbox, 2)[1], LinkDown)


def test_what_cannot_travel_is_refused_and_the_link_lives(ends: Ends, address: str) -> None:
    mailbox = Mailbox()
    far, near = ends.pair(address, mailbox, Mailbox())
    with pytest.raises(WireError, match="a ProposalRound cannot be sent"):
        near.send(ProposalRound(-1))
    near.send(ProposalRound(1))
    assert collect(mailbox, 1) == [Received(far, ProposalRound(1))]


def test_many_links_share_a_mailbox(ends: Ends, address: str) -> None:
    mailbox = Mailbox()
    address = ends.listen(address, mailbox)
    for index in range(12):
        ends.connect(address, Mailbox(), replace(DRAFTER, name=f"drafter-{index}"))
    for number in range(20):
        for link in ends.links:
            link.send(ProposalRound(number))
    events = collect(mailbox, 12 * 21)
    for index in range(12):
        of_link = [event for event in events if event.link.peer.name == f"drafter-{index}"]
        assert isinstance(of_link[0], LinkUp)
        assert numbers(of_link) == list(range(20))


def test_sixteen_threads_may_send_on_one_link(ends: Ends, address: str) -> None:
    mailbox = Mailbox()
    _, near = ends.pair(address, mailbox, Mailbox(), Limits(queue_len=16 * 50))
    barrier = threading.Barrier(16)

    def send(thread: int) -> None:
        barrier.wait(DEADLINE_S)
        for number in range(50):
            near.send(ProposalRound(100 * thread + number))

    threads = [threading.Thread(target=send, args=(thread,)) for thread in range(16)]
    for thread in threads:
        thread.start()
    came = numbers(collect(mailbox, 16 * 50))
    for index, thread in enumerate(threads):
        thread.join(DEADLINE_S)
        assert [number for number in came if number // 100 == index] == list(range(100 * index, 100 * index + 50))


# Backpressure.


def fill(link: Link) -> int:
    """Send until the link is full. Returns how many messages it took."""
    payload = ("x" * 2**16,)
    for number in range(2000):
        try:
            link.send(ProposalRound(number, resyncs=payload))
        except LinkFull as full:
            assert "reads too slowly" in str(full)  # noqa: PT017
            return number
    raise AssertionError("the link took 128 MB that nobody read")


def test_a_reader_that_stalls_fills_the_link_and_loses_nothing(ends: Ends, address: str) -> None:
    mailbox = Mailbox(capacity=4)
    _, near = ends.pair(address, mailbox, Mailbox(), replace(QUICK, queue_len=8))
    num_sent = fill(near)
    threading.Event().wait(2 * QUICK.silence_s)  # a slow owner is not a dead one

    came: list[int] = []
    until_s = time.monotonic() + DEADLINE_S
    while len(came) < num_sent and time.monotonic() < until_s:
        mailbox.wait(1.0)
        events = mailbox.drain()
        assert len(events) <= 4
        assert not [event for event in events if isinstance(event, LinkDown)]
        came += numbers(events)
    assert came == list(range(num_sent))
    near.send(ProposalRound(num_sent))
    assert numbers(collect(mailbox, 1)) == [num_sent]


def test_a_full_mailbox_still_hears_of_a_closed_link_after_its_messages(ends: Ends, address: str) -> None:
    mailbox = Mailbox(capacity=2)
    far, near = ends.pair(address, mailbox, Mailbox(), replace(QUICK, queue_len=8))
    for number in range(2):
        near.send(ProposalRound(number))
    events = collect(mailbox, 2)
    near.close()
    events += collect(mailbox, 1)
    assert numbers(events) == [0, 1]
    assert isinstance(events[2], LinkDown)
    assert events[2].link is far


def test_nothing_arrives_before_link_up(ends: Ends, address: str) -> None:
    """Both owners answer a LinkUp at once, on threads of their own, while a third connects."""
    mailboxes = Mailbox(), Mailbox()
    seen: tuple[list[Event], list[Event]] = [], []

    def own(mailbox: Mailbox, events: list[Event]) -> None:
        until_s = time.monotonic() + DEADLINE_S
        while len(events) < 2 * 20 and mailbox.wait(until_s - time.monotonic()):
            for event in mailbox.drain():
                events.append(event)
                if isinstance(event, LinkUp):
                    event.link.send(ProposalRound(1))

    owners = [threading.Thread(target=own, args=pair) for pair in zip(mailboxes, seen, strict=True)]
    for owner in owners:
        owner.start()
    address = ends.listen(address, mailboxes[0])
    for _ in range(20):
        ends.connect(address, mailboxes[1])
    for owner, events in zip(owners, seen, strict=True):
        owner.join(2 * DEADLINE_S)
        assert len(events) == 40
        for link in {event.link for event in events}:
            assert [type(event) for event in events if event.link is link] == [LinkUp, Received]


# The end of a link.


@pytest.mark.parametrize("closes", ["accepting", "connecting", "listener"])
def test_the_other_end_of_a_closed_link_sees_link_down(ends: Ends, address: str, closes: str) -> None:
    far_mailbox, near_mailbox = Mailbox(), Mailbox()
    far, near = ends.pair(address, far_mailbox, near_mailbox)
    if closes == "listener":
        ends.listeners[0].close()
    else:
        (far if closes == "accepting" else near).close()
    other, other_mailbox = (far, far_mailbox) if closes == "connecting" else (near, near_mailbox)
    (down,) = collect(other_mailbox, 1)
    assert isinstance(down, LinkDown)
    assert down.link is other
    assert down.reason
    for link in (far, near):
        with pytest.raises(LinkClosed):
            link.send(ProposalRound(1))
    own_mailbox = near_mailbox if closes == "connecting" else far_mailbox
    assert own_mailbox.drain() == []  # who closes knows


def test_close_may_be_repeated_by_anyone(ends: Ends, address: str) -> None:
    far_mailbox, near_mailbox = Mailbox(), Mailbox()
    far, near = ends.pair(address, far_mailbox, near_mailbox)
    closables = [far, near, ends.listeners[0]] * 3
    threads = [threading.Thread(target=closable.close) for closable in closables]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    for closable in closables:
        closable.close()
    downs = [event for event in far_mailbox.drain() + near_mailbox.drain() if isinstance(event, LinkDown)]
    assert len(downs) <= 2


def test_nothing_is_left_after_close(ends: Ends, address: str) -> None:
    def open_and_close() -> None:
        mailbox, near_mailbox = Mailbox(), Mailbox()
        listener = listen(address, mailbox, TARGET)
        links = [connect(listener.address, near_mailbox, DRAFTER) for _ in range(3)]
        for link in links:
            link.send(ProposalRound(1))
        collect(mailbox, 6)
        links[0].close()
        listener.close()
        collect(near_mailbox, 3 + 2)
        for link in links:
            link.close()

    open_and_close()  # gRPC keeps threads and descriptors of its own for the process's life: let it have them first
    assert eventually(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("outrider")])
    num_threads = threading.active_count()
    num_fds = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        open_and_close()
    assert eventually(lambda: threading.active_count() <= num_threads), threading.enumerate()
    assert eventually(lambda: len(os.listdir("/proc/self/fd")) <= num_fds)


def test_a_listener_may_come_back_at_its_address(ends: Ends, address: str) -> None:
    near_mailbox = Mailbox()
    for number in range(3):
        mailbox = Mailbox()
        address = ends.listen(address, mailbox)
        with pytest.raises(InvalidField, match="address"):
            listen(address, Mailbox(), TARGET)
        near = ends.connect(address, near_mailbox)
        near.send(ProposalRound(number))
        assert numbers(collect(mailbox, 2)) == [number]
        ends.listeners[-1].close()
        collect(near_mailbox, 2)
        with pytest.raises(LinkClosed):
            connect(address, near_mailbox, DRAFTER, DEADLINE_S)
        assert near_mailbox.drain() == []


@pytest.mark.parametrize("mode", ["listen", "connect"])
def test_a_killed_process_is_link_down(ends: Ends, remote_address: str, mode: str) -> None:
    hello = replace(DRAFTER if mode == "listen" else TARGET, token="")
    mailbox = Mailbox()
    link, child = link_with_child(ends, remote_address, mode, hello, mailbox)
    link.send(ProposalRound(5))
    assert numbers(collect(mailbox, 1)) == [5]
    child.kill()
    (down,) = collect(mailbox, 1)
    assert isinstance(down, LinkDown)
    assert down.link is link
    with pytest.raises(LinkClosed):
        link.send(ProposalRound(6))


def test_a_process_killed_while_its_messages_wait_is_link_down_behind_them(ends: Ends, remote_address: str) -> None:
    mailbox = Mailbox(capacity=2)
    link, child = link_with_child(ends, remote_address, "connect", replace(TARGET, token=""), mailbox)
    for number in range(50):
        link.send(ProposalRound(number))
    assert mailbox.wait(DEADLINE_S)  # echoes come, and soon find no room
    child.kill()
    child.wait(DEADLINE_S)
    events: list[Event] = []
    while not (events and isinstance(events[-1], LinkDown)):
        events += collect(mailbox, 1)
    came = numbers(events)
    assert came == list(range(len(came)))
    assert len(events) == len(came) + 1
    assert len(came) >= 1


@pytest.mark.parametrize("mode", ["listen", "connect"])
def test_a_process_that_hangs_is_link_down(ends: Ends, remote_address: str, mode: str) -> None:
    """Its socket stays open: only its silence tells."""
    hello = replace(DRAFTER if mode == "listen" else TARGET, token="")
    mailbox = Mailbox()
    link, child = link_with_child(ends, remote_address, mode, hello, mailbox, replace(QUICK, silence_s=1.5))
    child.send_signal(signal.SIGSTOP)
    (down,) = collect(mailbox, 1)
    assert isinstance(down, LinkDown)
    assert down.link is link
    child.send_signal(signal.SIGCONT)


def test_an_idle_link_stays_up(ends: Ends, remote_address: str) -> None:
    far_mailbox, near_mailbox = Mailbox(), Mailbox()
    _, near = ends.pair(remote_address, far_mailbox, near_mailbox, QUICK)
    assert not near_mailbox.wait(3 * QUICK.silence_s)
    assert far_mailbox.drain() == []
    near.send(ProposalRound(1))
    assert numbers(collect(far_mailbox, 1)) == [1]


def test_a_process_may_end_with_a_link_up(ends: Ends, remote_address: str) -> None:
    mailbox = Mailbox()
    address = ends.listen(remote_address, mailbox, replace(TARGET, token=""))
    child = ends.child("exit", address)
    (up,) = collect(mailbox, 1)
    up.link.send(ProposalRound(1))
    child.wait(DEADLINE_S)  # its stdin is still open
    stdout, stderr = child.communicate(timeout=DEADLINE_S)
    assert (child.returncode, stdout, stderr) == (0, "up\n", "")
    assert isinstance(collect(mailbox, 1)[-1], LinkDown)


def link_with_child(
    ends: Ends, address: str, mode: str, hello: Hello, mailbox: Mailbox, limits: Limits | None = None
) -> tuple[Link, "subprocess.Popen[str]"]:
    if mode == "listen":
        child = ends.child(mode, address)
        assert child.stdout is not None
        link = ends.connect(child.stdout.readline().strip(), mailbox, hello, limits)
        assert mailbox.drain() == [LinkUp(link)]
    else:
        child = ends.child(mode, ends.listen(address, mailbox, hello, limits))
        (up,) = collect(mailbox, 1)
        assert isinstance(up, LinkUp)
        link = up.link
    return link, child


# The handshake.


@pytest.mark.parametrize(
    ("hello", "error", "reason"),
    [
        (replace(DRAFTER, token="guess"), LinkClosed, "cluster token"),
        (replace(DRAFTER, token=""), LinkClosed, "cluster token"),
        (replace(DRAFTER, protocol_version=99), LinkClosed, "protocol version 99"),
        (replace(DRAFTER, role=Role.TARGET), LinkClosed, "cannot link with a target"),
        (replace(DRAFTER, vocab_size=101), IncompatibleTokenizer, "(vocabulary|one) of 101"),
        (replace(DRAFTER, tokenizer_fingerprint="other"), IncompatibleTokenizer, "other"),
        (replace(DRAFTER, role=Role.GATEWAY, token="guess"), LinkClosed, "cluster token"),
    ],
)
def test_a_mismatch_is_refused_with_its_reason(
    ends: Ends, address: str, hello: Hello, error: type[OutriderError], reason: str
) -> None:
    mailbox, near_mailbox = Mailbox(), Mailbox()
    address = ends.listen(address, mailbox)
    with pytest.raises(error, match=reason) as refused:
        connect(address, near_mailbox, hello, DEADLINE_S)
    assert "secret" not in str(refused.value)
    assert "guess" not in str(refused.value)
    near = ends.connect(address, near_mailbox)  # the listener minds nothing
    assert near_mailbox.drain() == [LinkUp(near)]
    (up,) = collect(mailbox, 1)
    assert isinstance(up, LinkUp)
    assert up.link.peer == DRAFTER


def test_a_gateway_has_no_tokenizer_to_compare(ends: Ends, address: str) -> None:
    gateway = Hello(Role.GATEWAY, "gateway", 0, "", token="secret")
    near = ends.connect(ends.listen(address, Mailbox()), Mailbox(), gateway)
    assert near.peer == TARGET


def test_only_a_target_and_another_may_link(ends: Ends, address: str) -> None:
    address = ends.listen(address, Mailbox(), DRAFTER)
    with pytest.raises(LinkClosed, match="one must be a target"):
        connect(address, Mailbox(), replace(DRAFTER, role=Role.GATEWAY), DEADLINE_S)
    assert ends.connect(address, Mailbox(), TARGET).peer == DRAFTER


def test_a_unix_peer_that_says_nothing_is_dropped(ends: Ends, folder: Path) -> None:
    mailbox = Mailbox()
    ends.listen(f"unix://{folder}/a/s", mailbox, limits=QUICK)
    with socket.socket(socket.AF_UNIX) as mute:
        mute.settimeout(DEADLINE_S)
        mute.connect(f"{folder}/a/s")
        assert mute.recv(1) == b""
    assert mailbox.drain() == []


@pytest.mark.parametrize(
    "said",
    [
        b"\xff\xff\xff\xff",  # announces four gigabytes
        b"\x00\x00\x00\x03abc",
        b"\x00\x00\x00\x00",
        len(encode(ProposalRound(1))).to_bytes(4, "big") + encode(ProposalRound(1)),  # no Hello before it
    ],
)
def test_a_unix_peer_that_talks_nonsense_is_dropped(ends: Ends, folder: Path, said: bytes) -> None:
    mailbox = Mailbox()
    ends.listen(f"unix://{folder}/a/s", mailbox)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(DEADLINE_S)
        peer.connect(f"{folder}/a/s")
        peer.sendall(said)
        assert peer.recv(1) == b""
    assert mailbox.drain() == []


def heard_of_grpc(address: str, said: Iterator[bytes]) -> list[bytes]:
    """What a listener answers until it ends the stream."""
    heard: list[bytes] = []
    with grpc.insecure_channel(address.removeprefix("grpc://")) as channel:
        try:
            heard.extend(channel.stream_stream("/outrider.Link/Frames")(said, timeout=DEADLINE_S))
        except grpc.RpcError as error:  # whether it ends by cancelling is a matter of who comes first
            assert error.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.RESOURCE_EXHAUSTED)  # noqa: PT017
    return heard


@pytest.mark.parametrize("said", [None, b"nonsense", encode(ProposalRound(1))])
def test_a_grpc_peer_that_says_nothing_or_nonsense_is_dropped(ends: Ends, said: bytes | None) -> None:
    mailbox = Mailbox()
    address = ends.listen("grpc://127.0.0.1:0", mailbox, limits=QUICK)
    done = threading.Event()

    def frames() -> Iterator[bytes]:
        if said is not None:
            yield said
        done.wait(DEADLINE_S)

    assert heard_of_grpc(address, frames()) == []
    done.set()
    assert mailbox.drain() == []


@pytest.mark.parametrize("scheme", ["unix", "grpc"])
def test_a_listener_that_says_nothing_is_given_up_at_the_deadline(folder: Path, scheme: str) -> None:
    mailbox = Mailbox()
    with socket.socket(socket.AF_UNIX if scheme == "unix" else socket.AF_INET) as mute:
        mute.bind(f"{folder}/s" if scheme == "unix" else ("127.0.0.1", 0))
        mute.listen()
        address = f"unix://{folder}/s" if scheme == "unix" else f"grpc://127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(LinkClosed, match=r"no Hello within 0\.3 s"):
            connect(address, mailbox, DRAFTER, 0.3)
    assert mailbox.drain() == []


# The secret: proved by both ends, sent by none.


class Wiretap:
    """Accepts one connection at a unix socket, and does to it what a test wants."""

    def __init__(self, folder: Path) -> None:
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.settimeout(DEADLINE_S)
        self._sock.bind(f"{folder}/tap")
        self._sock.listen()
        self.address = f"unix://{folder}/tap"

    def accept(self) -> "Wire":
        sock, _ = self._sock.accept()
        return Wire(sock)

    def close(self) -> None:
        self._sock.close()


class Wire:
    """The frames of a unix connection, as they are on the wire."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sock.settimeout(DEADLINE_S)

    @classmethod
    def to(cls, address: str) -> "Wire":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address.removeprefix("unix://"))
        return cls(sock)

    def read(self) -> bytes | None:
        """The bytes of the next frame; None at the end."""
        head = self._sock.recv(4, socket.MSG_WAITALL)
        return self._sock.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL) if head else None

    def write(self, frame: bytes) -> None:
        self._sock.sendall(len(frame).to_bytes(4, "big") + frame)

    def close(self) -> None:
        self._sock.close()


def greeted(wire: Wire) -> Greeting:
    data = wire.read()
    assert data is not None
    frame = decode(data)
    assert isinstance(frame, Greeting)
    return frame


def refused(wire: Wire) -> str:
    """The reason; the connection is closed behind it."""
    data = wire.read()
    assert data is not None
    frame = decode(data)
    assert isinstance(frame, Refusal)
    assert wire.read() is None
    return frame.reason


@pytest.fixture
def tap(folder: Path) -> Iterator[Wiretap]:
    tap = Wiretap(folder)
    yield tap
    tap.close()


def test_a_listener_that_does_not_know_the_secret_never_sees_it(tap: Wiretap) -> None:
    """Whoever gets hold of an address hears what the connecting end says."""
    failed: list[OutriderError] = []

    def dial() -> None:
        try:
            connect(tap.address, Mailbox(), DRAFTER, DEADLINE_S)
        except OutriderError as error:
            failed.append(error)

    dialling = threading.Thread(target=dial)
    dialling.start()
    wire = tap.accept()
    heard = wire.read()
    assert heard is not None
    assert b"secret" not in heard
    said = decode(heard)
    assert isinstance(said, Greeting)
    mine = greeting(replace(TARGET, token=""))
    wire.write(encode(replace(mine, proof=proof("a guess", Side.ACCEPTING, connecting=said, accepting=mine))))
    assert "cluster token" in refused(wire)  # it proved nothing, so it is told nothing
    dialling.join(DEADLINE_S)
    assert isinstance(failed[0], LinkClosed)
    wire.close()


def test_both_ends_use_new_nonces_for_every_link(tap: Wiretap, ends: Ends, folder: Path) -> None:
    address = ends.listen(f"unix://{folder}/new/socket", Mailbox())
    mine = greeting(DRAFTER)
    heard = []
    for _ in range(2):
        wire = ends.wire(address)
        wire.write(encode(mine))
        heard.append(greeted(wire))
        wire.close()
    assert heard[0].nonce != heard[1].nonce
    assert heard[0].proof != heard[1].proof
    assert greeting(DRAFTER).nonce != mine.nonce
    assert all(len(one.nonce) == NONCE_BYTES for one in (mine, *heard))


def test_a_proof_that_was_recorded_opens_no_other_link(ends: Ends, folder: Path) -> None:
    mailbox = Mailbox()
    address = ends.listen(f"unix://{folder}/new/socket", mailbox)
    mine = greeting(DRAFTER)
    first = ends.wire(address)
    first.write(encode(mine))
    welcome = encode(Welcome(proof("secret", Side.CONNECTING, connecting=mine, accepting=greeted(first))))
    first.write(welcome)
    assert isinstance(collect(mailbox, 1)[0], LinkUp)  # it is the right proof, for this link
    second = ends.wire(address)
    second.write(encode(mine))
    greeted(second)
    second.write(welcome)
    assert "cluster token" in refused(second)
    first.close()
    assert [type(event) for event in collect(mailbox, 1)] == [LinkDown]


def test_a_proof_cannot_be_sent_back_to_its_maker(ends: Ends, folder: Path) -> None:
    mailbox = Mailbox()
    wire = ends.wire(ends.listen(f"unix://{folder}/new/socket", mailbox))
    wire.write(encode(greeting(DRAFTER)))
    wire.write(encode(Welcome(greeted(wire).proof)))
    assert "cluster token" in refused(wire)
    assert mailbox.drain() == []


@pytest.mark.parametrize(
    "forged",
    [b"", b"short", bytes(32), proof("secret", Side.CONNECTING, greeting(DRAFTER), greeting(TARGET))],
    ids=["empty", "short", "zeros", "of-another-link"],  # a proof is another one in every process
)
def test_no_link_without_a_proof(ends: Ends, folder: Path, forged: bytes) -> None:
    mailbox = Mailbox()
    wire = ends.wire(ends.listen(f"unix://{folder}/new/socket", mailbox))
    wire.write(encode(greeting(DRAFTER)))
    greeted(wire)
    wire.write(encode(Welcome(forged)))
    assert "cluster token" in refused(wire)
    assert mailbox.drain() == []


def test_a_hello_that_was_changed_on_its_way_is_refused(ends: Ends, folder: Path) -> None:
    """The proofs cover what both ends say of themselves."""
    mailbox = Mailbox()
    wire = ends.wire(ends.listen(f"unix://{folder}/new/socket", mailbox))
    mine = greeting(DRAFTER)
    wire.write(encode(replace(mine, hello=replace(mine.hello, name="another"))))
    wire.write(encode(Welcome(proof("secret", Side.CONNECTING, connecting=mine, accepting=greeted(wire)))))
    assert "cluster token" in refused(wire)
    assert mailbox.drain() == []


@pytest.mark.parametrize("version", [1, 99])
def test_an_end_of_another_protocol_version_is_told_so(ends: Ends, folder: Path, version: int) -> None:
    """Version 1 had no nonces, and sent the secret."""
    wire = ends.wire(ends.listen(f"unix://{folder}/new/socket", Mailbox()))
    wire.write(encode(Greeting(replace(DRAFTER, token="", protocol_version=version), b"")))
    assert f"protocol version {version}" in refused(wire)


@pytest.mark.parametrize("scheme", ["unix", "grpc"])
def test_nobody_unknown_makes_a_listener_hold_a_large_frame(ends: Ends, folder: Path, scheme: str) -> None:
    mailbox = Mailbox()
    address = ends.listen(address_of(scheme, folder), mailbox)
    huge = encode(Greeting(replace(DRAFTER, name="x" * MAX_HANDSHAKE_BYTES), bytes(NONCE_BYTES)))
    if scheme == "unix":
        wire = ends.wire(address)
        wire.write(huge)
        assert wire.read() is None
    else:
        num_asked_for = 0

        def pieces() -> Iterator[bytes]:
            """As long as the other end takes them, up to 64 MB."""
            nonlocal num_asked_for
            for _ in range(1024):
                num_asked_for += 1
                yield b"\0" + bytes(PIECE_BYTES)

        assert heard_of_grpc(address, pieces()) == []
        assert num_asked_for < 64  # what gRPC's flow control lets be under way
    assert mailbox.drain() == []


@pytest.mark.parametrize("piece", [b"", b"\2abc", b"\0", b"\1" + bytes(PIECE_BYTES + 1)])
def test_a_grpc_peer_that_sends_no_pieces_of_frames_is_dropped(ends: Ends, piece: bytes) -> None:
    mailbox = Mailbox()
    address = ends.listen("grpc://127.0.0.1:0", mailbox)
    assert heard_of_grpc(address, iter([piece])) == []
    assert mailbox.drain() == []


# Addresses.


@pytest.mark.parametrize(
    "address",
    [
        "",
        "target",
        "http://127.0.0.1:80",
        "memory://",
        "unix://relative/path",
        "unix:///folder/",
        "unix:///" + "x" * 200,
        "grpc://127.0.0.1",
        "grpc://:50051",
        "grpc://127.0.0.1:port",
        "grpc://127.0.0.1:99999",
        "grpc://127.0.0.1:50051/path",
    ],
)
def test_an_address_of_no_known_form_is_refused(address: str) -> None:
    with pytest.raises(InvalidField, match="address"):
        listen(address, Mailbox(), TARGET)
    with pytest.raises(InvalidField, match="address"):
        connect(address, Mailbox(), DRAFTER, 1.0)


def test_an_address_that_nobody_listens_at_is_refused_at_once(address: str) -> None:
    address = address.replace(":0", ":1")
    with pytest.raises(LinkClosed, match=address):
        connect(address, Mailbox(), DRAFTER, DEADLINE_S)


def test_a_path_longer_than_the_kernel_takes_says_so(folder: Path) -> None:
    path = f"{folder}/{'x' * 150}"
    with pytest.raises(InvalidField, match=rf"the path has {len(path)} bytes, at most 107 fit: choose a shorter folder"):
        listen(f"unix://{path}", Mailbox(), TARGET)


def test_a_unix_socket_is_its_owners_alone_and_goes_with_the_listener(ends: Ends, folder: Path) -> None:
    path = folder / "new" / "socket"
    ends.listen(f"unix://{path}", Mailbox())
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600
    ends.listeners[0].close()
    assert list(path.parent.iterdir()) == []


def test_a_folder_that_others_may_enter_is_refused(folder: Path) -> None:
    folder.chmod(0o755)
    with pytest.raises(InvalidField, match="admit no other"):
        listen(f"unix://{folder}/socket", Mailbox(), TARGET)


def test_a_socket_left_by_a_killed_process_is_replaced(ends: Ends, folder: Path) -> None:
    address = f"unix://{folder}/socket"
    child = ends.child("listen", address)
    assert child.stdout is not None
    assert child.stdout.readline().strip() == address
    child.kill()
    child.wait(DEADLINE_S)
    assert (folder / "socket").is_socket()
    near = ends.connect(ends.listen(address, Mailbox()), Mailbox())
    assert near.peer == TARGET


def test_a_file_that_is_no_socket_is_not_replaced(folder: Path) -> None:
    (folder / "notes").write_text("mine")
    with pytest.raises(InvalidField, match="no socket"):
        listen(f"unix://{folder}/notes", Mailbox(), TARGET)
    assert (folder / "notes").read_text() == "mine"


def test_a_listener_leaves_the_socket_of_its_successor(ends: Ends, folder: Path) -> None:
    path = folder / "socket"
    ends.listen(f"unix://{path}", Mailbox())
    path.unlink()
    address = ends.listen(f"unix://{path}", Mailbox())
    ends.listeners[0].close()
    assert ends.connect(address, Mailbox()).peer == TARGET


def test_grpc_picks_a_port_and_tells_it(ends: Ends) -> None:
    address = ends.listen("grpc://127.0.0.1:0", Mailbox())
    assert int(address.rpartition(":")[2]) > 0


def test_a_listener_takes_so_many_links_and_no_more(ends: Ends, address: str) -> None:
    address = ends.listen(address, Mailbox(), limits=Limits(max_links=2))
    mailbox = Mailbox()
    for _ in range(2):
        ends.connect(address, mailbox)
    mailbox.drain()
    with pytest.raises(LinkClosed):
        connect(address, mailbox, DRAFTER, DEADLINE_S)
    assert mailbox.drain() == []


@pytest.mark.parametrize("thread", ["outrider-link-writer", "outrider-link"])
def test_a_grpc_listener_outlives_a_thread_that_does_not_start(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, thread: str, caplog: pytest.LogCaptureFixture
) -> None:
    address = ends.listen("grpc://127.0.0.1:0", Mailbox(), limits=QUICK)
    start, failed = threading.Thread.start, threading.Event()

    def start_or_fail(self: threading.Thread) -> None:
        if self.name == thread and not failed.is_set():
            failed.set()
            raise RuntimeError("can't start new thread")
        start(self)

    done = threading.Event()

    def silent() -> Iterator[bytes]:
        done.wait(DEADLINE_S)
        yield from ()

    with grpc.insecure_channel(address.removeprefix("grpc://")) as channel:
        monkeypatch.setattr(threading.Thread, "start", start_or_fail)
        call = channel.stream_stream("/outrider.Link/Frames")(silent(), timeout=DEADLINE_S)
        assert failed.wait(DEADLINE_S)
        assert eventually(lambda: "can't start new thread" in caplog.text)
        listener = ends.listeners[0]
        assert eventually(lambda: not listener._links)  # type: ignore[attr-defined]
        call.cancel()
        done.set()
    assert ends.connect(address, Mailbox()).peer == TARGET
