"""Two ends of a link for contract tests, what they send, and a raw connection to one end."""

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import grpc

from cluster.config import TlsConfig
from cluster.errors import LinkFull
from cluster.messages import Hello, ProposalRound, Role
from cluster.transport import connect, listen
from cluster.transport.base import Event, Limits, Link, LinkUp, Listener, Mailbox, Received
from cluster.transport.codec import Greeting, Refusal, decode, encode

ROOT = Path(__file__).parents[2]
DEADLINE_S = 20.0
TARGET = Hello(Role.TARGET, "target", 100, "tokenizer", token="secret")
DRAFTER = Hello(Role.DRAFTER, "drafter", 100, "tokenizer", token="secret")
QUICK = Limits(heartbeat_s=0.1, silence_s=0.8, handshake_s=0.5)
_NUMBERS = count()


def address_of(scheme: str, folder: Path) -> str:
    return {
        "memory": f"memory://{next(_NUMBERS)}",
        "unix": f"unix://{folder}/links/{next(_NUMBERS)}",
        "grpc": "grpc://127.0.0.1:0",
    }[scheme]


@dataclass
class Ends:
    """What a test has opened; closed at its end."""

    listeners: list[Listener] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    children: list["subprocess.Popen[str]"] = field(default_factory=list)
    wires: list["Wire"] = field(default_factory=list)

    def listen(
        self,
        address: str,
        mailbox: Mailbox,
        hello: Hello = TARGET,
        limits: Limits | None = None,
        tls: TlsConfig | None = None,
    ) -> str:
        self.listeners.append(listen(address, mailbox, hello, limits, tls))
        return self.listeners[-1].address

    def connect(
        self,
        address: str,
        mailbox: Mailbox,
        hello: Hello = DRAFTER,
        limits: Limits | None = None,
        tls: TlsConfig | None = None,
    ) -> Link:
        self.links.append(connect(address, mailbox, hello, DEADLINE_S, limits, tls))
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
        """A peer process, connected or listening."""
        command = [sys.executable, "-m", "tests.support.link_peer", mode, address]
        pipe = subprocess.PIPE
        self.children.append(subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
        return self.children[-1]


def collect(mailbox: Mailbox, num_events: int) -> list[Event]:
    """The next events, at least ``num_events``."""
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
    """Polls for changes without events, such as numbers of threads and descriptors."""
    until_s = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.01)
    return True


def sized(num_bytes: int) -> ProposalRound:
    """A message of exactly ``num_bytes`` on the wire."""
    message = ProposalRound(1, resyncs=("x" * num_bytes,))
    return ProposalRound(1, resyncs=("x" * (2 * num_bytes - len(encode(message))),))


def fill(link: Link) -> int:
    """Sends until the link is full. Returns how many messages it took."""
    payload = ("x" * 2**16,)
    for number in range(2000):
        try:
            link.send(ProposalRound(number, resyncs=payload))
        except LinkFull as full:
            assert "reads too slowly" in str(full)  # noqa: PT017
            return number
    raise AssertionError("the link took 128 MB that nobody read")


def grpc_answers(address: str, said: Iterator[bytes]) -> list[bytes]:
    """What a listener sends until it ends the stream."""
    heard: list[bytes] = []
    with grpc.insecure_channel(address.removeprefix("grpc://")) as channel:
        try:
            heard.extend(channel.stream_stream("/outrider.Link/Frames")(said, timeout=DEADLINE_S))
        except grpc.RpcError as error:  # whether it ends by cancelling is a matter of who comes first
            assert error.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.RESOURCE_EXHAUSTED)  # noqa: PT017
    return heard


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


class Wiretap:
    """Accepts one connection at a unix socket for a test to control."""

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
    """A unix connection, read and written by frame."""

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
    """The reason of a refusal, after which the connection must be closed."""
    data = wire.read()
    assert data is not None
    frame = decode(data)
    assert isinstance(frame, Refusal)
    assert wire.read() is None
    return frame.reason
