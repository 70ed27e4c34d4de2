"""The mailbox: bounded for messages, always open for the coming and going of links, and waking whoever waits."""

import threading

import pytest

from cluster.messages import Hello, Message, ProposalRound, Role
from cluster.transport.base import Limits, LinkDown, LinkUp, Mailbox, Received
from cluster.transport.memory import LocalNetwork, MemoryLink

TARGET = Hello(Role.TARGET, "target", 100, "tokenizer")
DRAFTER = Hello(Role.DRAFTER, "drafter", 100, "tokenizer")
DEADLINE_S = 20.0


@pytest.fixture
def link() -> MemoryLink:
    network = LocalNetwork()
    network.listen("memory://a", Mailbox(), TARGET)
    return network.connect("memory://a", Mailbox(), DRAFTER)


def received(link: MemoryLink, number: int) -> Received:
    return Received(link, ProposalRound(number))


def test_a_full_mailbox_refuses_messages_but_not_the_going_of_links(link: MemoryLink) -> None:
    mailbox = Mailbox(capacity=2)
    assert [mailbox.put(received(link, n)) for n in range(3)] == [True, True, False]
    assert mailbox.put(LinkDown(link, "gone"))
    assert mailbox.put(LinkUp(link))
    assert mailbox.drain() == [received(link, 0), received(link, 1), LinkDown(link, "gone"), LinkUp(link)]
    assert mailbox.put(received(link, 4))


def test_mail_is_checked_once_where_it_arrives(link: MemoryLink) -> None:
    """On the thread that receives it; a full mailbox is offered the same event again."""
    mailbox, threads = Mailbox(capacity=1), list[str]()

    def check(message: Message) -> tuple[Message, list[str]]:
        threads.append(threading.current_thread().name)
        return ProposalRound(7), ["a fault"]

    mailbox.check = check
    mailbox.put(received(link, 0))
    assert mailbox.drain() == [received(link, 7)]
    mailbox.put(received(link, 0))
    late = received(link, 0)
    assert not mailbox.put(late)
    mailbox.drain()
    thread = threading.Thread(target=lambda: mailbox.put(late), name="receiver")
    thread.start()
    thread.join(DEADLINE_S)
    (event,) = mailbox.drain()
    assert isinstance(event, Received)
    assert (event.faults, len(threads)) == (["a fault"], 3)


def test_who_was_refused_hears_once_of_room_and_may_put_again(link: MemoryLink) -> None:
    mailbox = Mailbox(capacity=1)
    told: list[int] = []

    def put(number: int) -> None:
        told.append(number)
        mailbox.put(received(link, number), lambda: put(number))

    for number in range(3):
        put(number)
    assert told == [0, 1, 2]
    assert mailbox.drain() == [received(link, 0)]
    assert told == [0, 1, 2, 1, 2]  # 1 found room, 2 was refused again
    assert mailbox.drain() == [received(link, 1)]
    assert mailbox.drain() == [received(link, 2)]
    assert mailbox.drain() == []
    assert told == [0, 1, 2, 1, 2, 2]


def test_within_a_process_the_message_itself_arrives_whatever_its_size() -> None:
    message = ProposalRound(0, resyncs=("x" * 1000,))
    network, mailbox = LocalNetwork(), Mailbox()
    network.listen("memory://a", mailbox, TARGET)
    near = network.connect("memory://a", Mailbox(), DRAFTER, limits=Limits(max_message_bytes=100))
    mailbox.drain()
    near.send(message)
    (event,) = mailbox.drain()
    assert isinstance(event, Received)
    assert event.message is message


def test_room_is_shared_in_turn_between_links() -> None:
    """No link that floods the mailbox keeps another out."""
    network, mailbox = LocalNetwork(), Mailbox(capacity=4)
    network.listen("memory://a", mailbox, TARGET)
    links = [network.connect("memory://a", Mailbox(), DRAFTER) for _ in range(3)]
    mailbox.drain()
    for number in range(20):
        for link in links:
            link.send(ProposalRound(number))
    seen: dict[object, list[int]] = {}
    num_drains = 0
    while events := mailbox.drain():
        num_drains += 1
        for event in events:
            assert isinstance(event, Received)
            assert isinstance(event.message, ProposalRound)
            seen.setdefault(event.link, []).append(event.message.table_version)
        if num_drains == 4:
            assert len(seen) == 3
    assert list(seen.values()) == [list(range(20))] * 3


def test_waiting_ends_with_an_event_a_wake_or_the_deadline(link: MemoryLink) -> None:
    mailbox = Mailbox()
    assert not mailbox.wait(0.0)
    mailbox.wake()
    assert not mailbox.wait(DEADLINE_S)  # the wake is spent
    results: list[bool] = []
    waiting = threading.Thread(target=lambda: results.append(mailbox.wait(DEADLINE_S)))
    waiting.start()
    mailbox.put(received(link, 0))
    waiting.join(DEADLINE_S)
    assert results == [True]
    assert mailbox.wait(DEADLINE_S)  # until it is drained
    mailbox.drain()
    assert not mailbox.wait(0.0)
