"""The network and the clock that the fault benchmark disturbs."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.interposed.sitecustomize import through_proxy
from benchmarks.interposer import Interposer
from benchmarks.link_proxy import LinkProxy
from cluster.messages import Hello, Role, SubmitRound
from cluster.transport import connect, listen
from cluster.transport.base import Link, LinkDown, LinkUp, Mailbox, Received
from tests.support.waiting import eventually

WAIT_S = 20.0


@pytest.fixture
def proxy() -> Iterator[LinkProxy]:
    with LinkProxy() as links:
        yield links


def connected(proxy: LinkProxy, listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection through the proxy."""
    host, _, port = through_proxy(f"127.0.0.1:{listener.getsockname()[1]}", proxy.port).partition(":")
    near = socket.create_connection((host, int(port)), WAIT_S)
    far, _ = listener.accept()
    far.settimeout(WAIT_S)
    eventually(lambda: proxy.ports() == [listener.getsockname()[1]], WAIT_S)
    return near, far


@pytest.fixture
def ends(proxy: LinkProxy) -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(WAIT_S)
        near, far = connected(proxy, listener)
        with near, far:
            yield near, far


def test_bytes_pass_in_both_directions(ends: tuple[socket.socket, socket.socket]) -> None:
    for source, sink in (ends, ends[::-1]):
        source.sendall(b"x" * 10**6)
        assert received(sink, 10**6) == 10**6


def received(sink: socket.socket, num_bytes: int) -> int:
    """How many bytes came, until ``num_bytes`` did."""
    got = 0
    while got < num_bytes:
        got += len(sink.recv(2**16))
    return got


def test_nothing_passes_a_cut_not_even_an_end(proxy: LinkProxy, ends: tuple[socket.socket, socket.socket]) -> None:
    near, far = ends
    with proxy.cut(*proxy.ports()):
        near.sendall(b"held")
        near.close()
        far.settimeout(0.3)
        with pytest.raises(TimeoutError):
            far.recv(4)
    far.settimeout(WAIT_S)
    assert far.recv(4) == b"held"
    assert far.recv(4) == b""
    eventually(lambda: proxy.num_links() == 0, WAIT_S)


def test_delayed_bytes_stay_in_order(proxy: LinkProxy, ends: tuple[socket.socket, socket.socket]) -> None:
    near, far = ends
    near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sent = bytes(range(40))
    with proxy.delayed(0.2):
        for i in range(len(sent)):
            near.sendall(sent[i : i + 1])
            time.sleep(0.002)
        assert b"".join(iter(lambda: far.recv(1), sent[-1:])) == sent[:-1]


def test_a_reset_is_an_error_at_both_ends(proxy: LinkProxy, ends: tuple[socket.socket, socket.socket]) -> None:
    proxy.reset()
    for end in ends:
        with pytest.raises(ConnectionResetError):
            end.recv(1)
    eventually(lambda: proxy.num_links() == 0, WAIT_S)


def test_a_link_through_the_proxy_survives_a_short_cut_and_misses_a_reset(proxy: LinkProxy) -> None:
    """With the messages of a real link."""
    there, here = Mailbox(), Mailbox()
    with closing(listen("grpc://127.0.0.1:0", there, Hello(Role.TARGET, "t", 10, "f", "secret"))) as listener:
        port = int(listener.address.rpartition(":")[2])
        address = "grpc://" + through_proxy(f"127.0.0.1:{port}", proxy.port)
        link: Link = connect(address, here, Hello(Role.GATEWAY, "g", 10, "f", "secret"), WAIT_S)
        assert proxy.num_links() == 1
        with proxy.cut(port):
            link.send(SubmitRound(aborts=("late",)))
        events = waited(there, 2)
        assert [type(event) for event in events] == [LinkUp, Received]
        proxy.reset()
        assert isinstance(waited(there, 1)[0], LinkDown)
        assert isinstance(waited(here, 2)[-1], LinkDown)
        link.close()


def waited(mailbox: Mailbox, num: int) -> list[object]:
    events: list[object] = []

    def came() -> bool:
        events.extend(mailbox.drain())
        return len(events) >= num

    eventually(came, WAIT_S)
    return events


def test_processes_of_the_environment_see_the_clock_jump_and_dial_the_proxy(tmp_path: Path) -> None:
    """Only links of Outrider are redirected, and the monotonic clock goes on."""
    program = """
import sys, time
before = time.time(), time.monotonic()
print(flush=True)
sys.stdin.readline()
print(round((time.time() - before[0]) / 3600), round((time.monotonic() - before[1]) / 3600), flush=True)
import grpc, grpc._channel
dialled = []
grpc._channel.Channel = lambda target, *args: dialled.append(target)
grpc.insecure_channel("127.0.0.1:258")
exec("import grpc; grpc.insecure_channel('127.0.0.1:258')", {"__name__": "cluster.transport.rpc"})
exec("import grpc; grpc.insecure_channel('10.0.0.1:258')", {"__name__": "cluster.transport.rpc"})
print(*dialled)
"""
    pipe = subprocess.PIPE
    with (
        Interposer(tmp_path) as interposer,
        subprocess.Popen(
            [sys.executable, "-c", program], env=interposer.environment, stdin=pipe, stdout=pipe, text=True
        ) as child,
    ):
        assert child.stdout is not None
        child.stdout.readline()
        interposer.clock.set(3600.0)
        out, _ = child.communicate("\n", WAIT_S)
    assert out.split("\n")[:2] == ["1 0", f"127.0.0.1:258 127.1.2.1:{interposer.links.port} 10.0.0.1:258"]
