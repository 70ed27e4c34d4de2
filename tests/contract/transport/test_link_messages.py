"""Every transport delivers messages in order, at most once, and with backpressure; and how links end."""

import os
import signal
import threading
import time
from dataclasses import replace

import pytest

from cluster.errors import InvalidField, LinkClosed, WireError
from cluster.messages import ProposalRound
from cluster.transport import connect, listen
from cluster.transport.base import Event, Limits, Link, LinkDown, LinkUp, Mailbox, Received
from tests.support.links import (
    DEADLINE_S,
    DRAFTER,
    QUICK,
    TARGET,
    Ends,
    collect,
    eventually,
    fill,
    link_with_child,
    numbers,
    sized,
)


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


# ---- how links end: closed, killed, hung, idle


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
