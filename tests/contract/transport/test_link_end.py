"""How links end: closed, killed, hung, idle."""

import os
import signal
import threading
from dataclasses import replace

import pytest

from cluster.errors import InvalidField, LinkClosed
from cluster.messages import ProposalRound
from cluster.transport import connect, listen
from cluster.transport.base import Event, LinkDown, Mailbox
from tests.support.links import (
    DEADLINE_S,
    DRAFTER,
    QUICK,
    TARGET,
    Ends,
    collect,
    eventually,
    link_with_child,
    numbers,
)


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

    open_and_close()  # gRPC and the reactor keep threads and descriptors for the process's life: let them have them first
    assert eventually(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("outrider-link")])
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
