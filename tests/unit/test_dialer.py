"""Links that come, go, and go before they were taken up."""

import resource
import tempfile
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import cast
from unittest.mock import patch

import pytest

from cluster import transport
from cluster.errors import LinkClosed
from cluster.messages import Hello, Role
from cluster.transport import listen
from cluster.transport.base import Link, LinkDown, LinkUp, Mailbox
from cluster.transport.dialer import FIRST_PAUSE_S, MAX_PAUSE_S, Dialer

ADDRESS = "memory://dialled"
TARGET = Hello(Role.TARGET, "t", 8, "f")
DRAFTER = Hello(Role.DRAFTER, "d", 8, "f")


class Caller:
    """Reads its mail as a loop would, on a clock of its own."""

    def __init__(self) -> None:
        self.mailbox = Mailbox()
        self.dialer = Dialer(self.mailbox, DRAFTER)
        self.now_s = 0.0
        self.links: list[Link] = []

    def turn(self) -> None:
        for event in self.mailbox.drain():
            if isinstance(event, LinkUp):
                self.links.append(event.link)
            elif isinstance(event, LinkDown):
                self.dialer.link_lost(event.link, self.now_s)
        self.dialer.tick(self.now_s)

    def until_linked(self, count: int) -> None:
        for _ in range(100):
            self.turn()
            if len(self.links) >= count:
                self.turn()
                return
            self.mailbox.wait(0.1)  # a dial that fails leaves no mail
            self.now_s += MAX_PAUSE_S
        raise AssertionError(f"{len(self.links)} links, not {count}")


@pytest.fixture
def caller() -> Iterator[Caller]:
    one = Caller()
    one.dialer.set_addresses([ADDRESS])
    yield one
    one.dialer.close()


def test_it_dials_until_somebody_listens_and_again_when_the_link_is_lost(caller: Caller) -> None:
    caller.turn()
    listener = listen(ADDRESS, Mailbox(), TARGET)
    caller.until_linked(1)
    listener.close()
    listener = listen(ADDRESS, Mailbox(), TARGET)
    caller.until_linked(2)
    listener.close()


def test_a_link_that_is_lost_before_it_was_taken_up_is_dialled_again(caller: Caller) -> None:
    listener = listen(ADDRESS, Mailbox(), TARGET)
    caller.turn()
    assert caller.mailbox.wait(5.0)
    listener.close()  # LinkUp and LinkDown are both in the mail, and the dialler has not looked yet
    events = caller.mailbox.drain()
    assert [type(event) for event in events] == [LinkUp, LinkDown]
    caller.dialer.link_lost(events[1].link, caller.now_s)
    listener = listen(ADDRESS, Mailbox(), TARGET)
    caller.until_linked(1)
    listener.close()


def test_a_peer_that_drops_every_link_is_dialled_ever_more_rarely(caller: Caller) -> None:
    pauses = []
    for count in range(1, 6):
        listener = listen(ADDRESS, Mailbox(), TARGET)
        while len(caller.links) < count:
            caller.turn()
            caller.mailbox.wait(0.1)
            caller.now_s += 0.01
        caller.turn()
        listener.close()
        caller.turn()
        due_s = caller.dialer.tick(caller.now_s)
        assert due_s is not None
        pauses.append(due_s - caller.now_s)
        caller.now_s = due_s
    assert pauses == sorted(pauses)
    assert pauses[-1] > 4 * FIRST_PAUSE_S


def test_unwanted_links_are_closed(caller: Caller) -> None:
    mailbox = Mailbox()
    listener = listen(ADDRESS, mailbox, TARGET)
    caller.until_linked(1)
    caller.dialer.set_addresses([])
    assert any(isinstance(event, LinkDown) for event in mailbox.drain())
    assert any(isinstance(event, LinkDown) for event in caller.mailbox.drain()), "its own owner must hear of it, too"
    assert caller.dialer.tick(caller.now_s) is None
    listener.close()


class _Stranger:
    """A link of an address that was removed."""


def test_lost_links_of_removed_addresses_are_not_kept(caller: Caller) -> None:
    caller.turn()
    stranger = _Stranger()
    kept = weakref.ref(stranger)
    caller.dialer.link_lost(cast("Link", stranger), caller.now_s)  # while another address is dialled
    del stranger
    for _ in range(100):
        if caller.dialer.tick(caller.now_s) is not None:
            break  # the dial has failed
        caller.mailbox.wait(1.0)
    assert kept() is None


@pytest.mark.parametrize(
    "error", [OSError(24, "Too many open files"), RuntimeError("can't start new thread"), ValueError("?")]
)
def test_whatever_fails_while_dialling_is_a_failed_dial(
    caller: Caller, monkeypatch: pytest.MonkeyPatch, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    failing = [error, error]

    def connect(*args: object) -> Link:
        if failing:
            raise failing.pop()
        return transport.connect(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("cluster.transport.dialer.connect", connect)
    listener = listen(ADDRESS, Mailbox(), TARGET)
    caller.until_linked(1)
    assert failing == []
    assert str(error) in caplog.text
    listener.close()


def test_a_thread_that_cannot_be_started_is_a_failed_dial(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(*args: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as without_threads:
        without_threads.setattr(ThreadPoolExecutor, "submit", submit)
        assert caller.dialer.tick(0.0) == FIRST_PAUSE_S
    listener = listen(ADDRESS, Mailbox(), TARGET)
    caller.now_s = MAX_PAUSE_S
    caller.until_linked(1)
    listener.close()


@pytest.mark.parametrize("scheme", ["unix", "grpc"])
def test_without_descriptors_no_link_comes_up_and_later_one_does(scheme: str) -> None:
    """A real shortage: the process may open nothing more for a while."""
    with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
        listener = listen(f"unix://{folder}/links/s" if scheme == "unix" else "grpc://127.0.0.1:0", Mailbox(), TARGET)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            with pytest.raises(LinkClosed):
                transport.connect(listener.address, Mailbox(), DRAFTER, 2.0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        transport.connect(listener.address, Mailbox(), DRAFTER, 5.0).close()
        listener.close()


def test_a_dial_whose_thread_did_not_start_makes_no_link_later(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor has queued it by then."""
    start, failures = threading.Thread.start, [RuntimeError("can't start new thread")]

    def start_or_fail(self: threading.Thread) -> None:
        if self.name.startswith("dialer") and failures:
            raise failures.pop()
        start(self)

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)
    listener = listen(ADDRESS, Mailbox(), TARGET)
    assert caller.dialer.tick(caller.now_s) == FIRST_PAUSE_S
    assert not failures
    caller.now_s = MAX_PAUSE_S
    caller.until_linked(1)
    caller.mailbox.wait(0.2)
    caller.turn()
    assert len(caller.links) == 1
    listener.close()


def test_dials_that_wait_behind_one_that_fails_are_dialled_again(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four dials run; a fifth waits in the queue, and is cancelled with it."""
    release, dialled = threading.Event(), []

    def connect(address: str, *args: object) -> Link:
        dialled.append(address)
        assert release.wait(20.0)
        return transport.connect(address, *args)  # type: ignore[arg-type]

    monkeypatch.setattr("cluster.transport.dialer.connect", connect)
    addresses = [f"memory://dialled-{i}" for i in range(5)]
    listeners = [listen(address, Mailbox(), TARGET) for address in addresses]
    caller.dialer.set_addresses(addresses)
    caller.turn()
    with patch.object(ThreadPoolExecutor, "submit", side_effect=RuntimeError("can't start new thread")):
        caller.dialer.set_addresses([*addresses, "memory://nobody"])
        caller.turn()
    release.set()
    caller.until_linked(5)
    assert sorted(dialled[:5]) == addresses
    for listener in listeners:
        listener.close()
