"""Links that come, go, and go before they were taken up."""

from collections.abc import Iterator

import pytest

from actors.dialer import FIRST_PAUSE_S, MAX_PAUSE_S, Dialer
from cluster.messages import Hello, Role
from cluster.transport.base import Link, LinkDown, LinkUp, Mailbox
from cluster.transport.factory import listen

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
                self.dialer.lost(event.link, self.now_s)
        self.dialer.tick(self.now_s)

    def until_linked(self, count: int) -> None:
        for _ in range(100):
            self.turn()
            if len(self.links) >= count:
                self.turn()
                return
            self.mailbox.wait(1.0)
            self.now_s += MAX_PAUSE_S
        raise AssertionError(f"{len(self.links)} links, not {count}")


@pytest.fixture
def caller() -> Iterator[Caller]:
    one = Caller()
    one.dialer.want([ADDRESS])
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
    caller.dialer.lost(events[1].link, caller.now_s)
    listener = listen(ADDRESS, Mailbox(), TARGET)
    caller.until_linked(1)
    listener.close()


def test_a_peer_that_drops_every_link_is_dialled_ever_more_rarely(caller: Caller) -> None:
    pauses = []
    for count in range(1, 6):
        listener = listen(ADDRESS, Mailbox(), TARGET)
        while len(caller.links) < count:
            caller.mailbox.wait(1.0)
            caller.turn()
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
    caller.dialer.want([])
    assert any(isinstance(event, LinkDown) for event in mailbox.drain())
    assert any(isinstance(event, LinkDown) for event in caller.mailbox.drain()), "its own owner must hear of it, too"
    assert caller.dialer.tick(caller.now_s) is None
    listener.close()
