"""Addresses and listeners of each transport."""

import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from cluster.errors import InvalidField, LinkClosed
from cluster.transport import connect, listen
from cluster.transport.base import Limits, Mailbox
from tests.support.links import DEADLINE_S, DRAFTER, QUICK, TARGET, Ends, eventually


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
        call.cancel()
        done.set()
    assert ends.connect(address, Mailbox()).peer == TARGET
