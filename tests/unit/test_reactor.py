"""The I/O thread of the unix sockets: it comes with its first user and goes with its last, or takes its links down."""

import socket
import tempfile
import threading
from pathlib import Path

import pytest

from cluster.messages import Hello, ProposalRound, Role
from cluster.transport import connect, listen, reactor
from cluster.transport.base import Limits, LinkDown, LinkUp, Mailbox

DEADLINE_S = 20.0
TARGET = Hello(Role.TARGET, "target", 100, "tokenizer")
DRAFTER = Hello(Role.DRAFTER, "drafter", 100, "tokenizer")


def io_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "outrider-io"]


@pytest.fixture
def io() -> reactor.Reactor:
    return reactor.running()


def test_calls_run_in_order_on_its_thread(io: reactor.Reactor) -> None:
    done, seen = threading.Event(), []
    for number in range(100):
        io.call(lambda number=number: seen.append((number, threading.current_thread().name)))
    io.call(done.set)
    assert done.wait(DEADLINE_S)
    assert seen == [(number, "outrider-io") for number in range(100)]


def test_timers_run_in_the_order_of_their_times(io: reactor.Reactor) -> None:
    done, seen = threading.Event(), []

    def arrange() -> None:
        io.call_later(0.02, done.set)
        io.call_later(0.01, lambda: seen.append(2))
        io.call_later(0.0, lambda: seen.append(1))

    io.call(arrange)
    assert done.wait(DEADLINE_S)
    assert seen == [1, 2]


def test_a_socket_is_watched_for_what_was_asked_and_no_longer(io: reactor.Reactor) -> None:
    class Watcher:
        def __init__(self) -> None:
            self.seen: list[int] = []
            self.told = threading.Event()

        def ready(self, events: int) -> None:
            self.seen.append(events)
            io.watch(ours, 0, self)
            self.told.set()

        def fail(self, reason: str) -> None:
            raise AssertionError(reason)

    ours, theirs = socket.socketpair()
    with ours, theirs:
        for asked in (reactor.WRITE, reactor.READ):
            watcher = Watcher()
            io.call(lambda asked=asked, watcher=watcher: io.watch(ours, asked, watcher))
            theirs.send(b"x")
            assert watcher.told.wait(DEADLINE_S)
            assert watcher.seen == [asked]


def test_users_share_one(io: reactor.Reactor) -> None:
    assert reactor.running() is io
    assert len(io_threads()) == 1


def test_time_in_which_it_did_not_run_is_no_silence_of_the_other_end(io: reactor.Reactor) -> None:
    """As after SIGSTOP of all processes of a machine: no end could send or hear anything."""
    limits = Limits(heartbeat_s=0.05, silence_s=0.5)
    mailbox, near_mailbox = Mailbox(), Mailbox()
    with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
        address = f"unix://{Path(folder)}/socket"
        listener = listen(address, mailbox, TARGET, limits)
        link = connect(address, near_mailbox, DRAFTER, DEADLINE_S, limits)
        ticked = threading.Event()
        io.call(lambda: threading.Event().wait(2.0 * limits.silence_s))
        io.call(lambda: io.call_later(limits.heartbeat_s, ticked.set))
        assert ticked.wait(DEADLINE_S)
        link.send(ProposalRound(1))
        assert [type(event) for event in (*near_mailbox.drain(),)] == [LinkUp]
        link.close()
        listener.close()


def test_links_go_down_with_it_and_new_ones_get_another(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    mailbox, near_mailbox = Mailbox(), Mailbox()
    with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
        address = f"unix://{Path(folder)}/socket"
        listener = listen(address, mailbox, TARGET)
        link = connect(address, near_mailbox, DRAFTER, DEADLINE_S)
        (thread,) = io_threads()
        reactor.running().call(lambda: 1 // 0)
        thread.join(DEADLINE_S)
        assert [failure.exc_type for failure in failures] == [ZeroDivisionError]
        for owner in (mailbox, near_mailbox):
            down = owner.drain()[-1]
            assert isinstance(down, LinkDown)
            assert "I/O thread failed: ZeroDivisionError" in down.reason
        link.close()
        listener.close()

        listener = listen(address, mailbox, TARGET)
        link = connect(address, near_mailbox, DRAFTER, DEADLINE_S)
        link.send(ProposalRound(1))
        assert mailbox.wait(DEADLINE_S)
        assert len(io_threads()) == 1
        listener.close()
        link.close()
