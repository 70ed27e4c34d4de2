"""The in-memory network with a virtual clock: what each fault does, and that a seed replays."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import InvalidField, LinkClosed, LinkFull, WireError
from cluster.messages import DraftRound as Down
from cluster.messages import Extend, Hello, ProposalRound, Role
from cluster.transport.base import Event, Limits, LinkDown, LinkUp, Mailbox, Received
from cluster.transport.memory import MemoryLink
from tests.support.simulated_network import Faults, MemoryNetwork

TARGET = Hello(Role.TARGET, "target", 100, "tokenizer")
DRAFTER = Hello(Role.DRAFTER, "drafter", 100, "tokenizer")


class World:
    """A target and drafters on one network, each with its mailbox."""

    def __init__(
        self, seed: int = 0, faults: Faults | None = None, num_links: int = 1, limits: Limits | None = None
    ) -> None:
        self.network = MemoryNetwork(random.Random(seed), faults)
        self.target, self.drafters = Mailbox(), [Mailbox() for _ in range(num_links)]
        self.network.listen("memory://target", self.target, TARGET, limits)
        self.links = [self.network.connect("memory://target", mailbox, DRAFTER, limits=limits) for mailbox in self.drafters]
        for mailbox in (self.target, *self.drafters):
            assert all(isinstance(event, LinkUp) for event in mailbox.drain())

    def numbers(self) -> list[int]:
        return [
            event.message.table_version
            for event in self.target.drain()
            if isinstance(event, Received) and isinstance(event.message, ProposalRound)
        ]


def test_nothing_arrives_before_its_time_and_nothing_after() -> None:
    world = World(faults=Faults(min_delay_s=0.1, max_delay_s=0.1))
    world.links[0].send(ProposalRound(1))
    assert world.network.next_due_s == pytest.approx(0.1)
    assert world.network.deliver_until(0.09) == 0
    world.links[0].send(ProposalRound(2))
    assert world.network.deliver_until(0.1) == 1
    assert world.numbers() == [1]
    assert world.network.deliver_until(5.0) == 1
    assert world.numbers() == [2]
    assert world.network.next_due_s is None
    assert world.network.now_s == 5.0


def test_the_clock_does_not_go_back() -> None:
    world = World()
    world.network.deliver_until(5.0)
    world.network.deliver_until(1.0)
    assert world.network.now_s == 5.0


def test_delays_reorder_between_links_and_not_within_one() -> None:
    world = World(seed=1, faults=Faults(max_delay_s=1.0), num_links=4)
    for number in range(25):
        for index, link in enumerate(world.links):
            link.send(ProposalRound(100 * index + number))
    world.network.deliver_until(10.0)
    came = world.numbers()
    assert came != sorted(came, key=lambda number: number % 100)
    for index in range(4):
        assert [number for number in came if number // 100 == index] == list(range(100 * index, 100 * index + 25))


@pytest.mark.parametrize(
    ("faults", "check"),
    [
        (Faults(drop=1.0), lambda came: came == []),
        (Faults(drop=0.5), lambda came: came == sorted(set(came)) and 10 < len(came) < 50),
        (Faults(duplicate=1.0), lambda came: came == [number for number in range(60) for _ in range(2)]),
        (Faults(max_delay_s=1.0, reorder=0.5), lambda came: sorted(came) == list(range(60)) != came),
        (Faults(max_delay_s=1.0), lambda came: came == list(range(60))),
    ],
)
def test_each_fault_does_what_it_says(faults: Faults, check: Callable[[list[int]], bool]) -> None:
    world = World(faults=faults, limits=Limits(queue_len=200))
    for number in range(60):
        world.links[0].send(ProposalRound(number))
    world.network.deliver_until(10.0)
    assert check(world.numbers())


def test_a_cut_loses_what_is_under_way_and_each_end_finds_out_later() -> None:
    world = World(faults=Faults(min_delay_s=0.1, max_delay_s=0.2))
    world.links[0].send(ProposalRound(1))
    world.network.cut(world.links[0])
    world.links[0].send(ProposalRound(2))  # nobody has told this end
    world.network.cut(world.links[0])
    world.network.deliver_until(1.0)
    for mailbox in (world.target, world.drafters[0]):
        (down,) = mailbox.drain()
        assert isinstance(down, LinkDown)
        assert "was cut" in down.reason
    with pytest.raises(LinkClosed, match="was cut"):
        world.links[0].send(ProposalRound(3))
    again = world.network.connect("memory://target", world.drafters[0], DRAFTER)
    again.send(ProposalRound(4))
    world.network.deliver_until(2.0)
    assert world.numbers() == [4]


def test_links_break_by_chance() -> None:
    world = World(faults=Faults(cut=0.5))
    with pytest.raises(LinkClosed):
        send_until_closed(world)
    assert isinstance(world.target.drain()[-1], LinkDown)
    assert isinstance(world.drafters[0].drain()[-1], LinkDown)


def send_until_closed(world: World) -> None:
    for number in range(1000):
        world.links[0].send(ProposalRound(number))
        world.network.deliver_until(float(number))


def test_the_end_of_a_closed_link_comes_behind_its_messages() -> None:
    world = World(faults=Faults(max_delay_s=1.0))
    for number in range(5):
        world.links[0].send(ProposalRound(number))
    world.links[0].close()
    world.network.deliver_until(10.0)
    events = world.target.drain()
    assert [type(event) for event in events] == [Received] * 5 + [LinkDown]
    assert world.drafters[0].drain() == []


def test_what_is_under_way_counts_against_the_bound() -> None:
    world = World(faults=Faults(min_delay_s=1.0, max_delay_s=1.0, duplicate=1.0), limits=Limits(queue_len=3))
    world.links[0].send(ProposalRound(1))
    world.links[0].send(ProposalRound(2))  # there is no room for its copy
    with pytest.raises(LinkFull):
        world.links[0].send(ProposalRound(3))
    world.network.deliver_until(1.0)
    assert world.numbers() == [1, 1, 2]
    world.links[0].send(ProposalRound(4))


def test_a_fault_may_be_healed() -> None:
    world = World(faults=Faults(drop=1.0))
    world.links[0].send(ProposalRound(1))
    world.network.faults = Faults()
    world.links[0].send(ProposalRound(2))
    world.network.deliver_until(0.0)
    assert world.numbers() == [2]


def test_messages_are_those_of_the_wire() -> None:
    """A simulation must not get by with what no real link would carry."""
    world = World()
    with pytest.raises(WireError):
        world.links[0].other.send(Down(1, extends=(Extend("a", 0, (-1,)),)))
    assert world.network.next_due_s is None


@given(st.integers(0, 2**32))
def test_a_seed_replays(seed: int) -> None:
    assert history(seed) == history(seed)


def test_another_seed_is_another_run() -> None:
    assert len({tuple(history(seed)) for seed in range(20)}) == 20


def history(seed: int) -> list[str]:
    """What every mailbox saw in a run with all faults."""
    faults = Faults(min_delay_s=0.01, max_delay_s=0.3, drop=0.1, duplicate=0.1, reorder=0.2, cut=0.02)
    world = World(seed, faults, num_links=3)
    seen: list[str] = []
    for step in range(30):
        for index, link in enumerate(world.links):
            world.links[index] = talk(world, link, index, step)
        world.network.deliver_until(0.05 * step)
        for name, mailbox in (("target", world.target), *zip("abc", world.drafters, strict=True)):
            seen += [f"{step} {name} {describe(event)}" for event in mailbox.drain()]
    return seen


def talk(world: World, link: MemoryLink, index: int, step: int) -> MemoryLink:
    try:
        link.send(ProposalRound(step))
        return link
    except LinkClosed:
        return world.network.connect("memory://target", world.drafters[index], DRAFTER)


def describe(event: Event) -> str:
    return str(event.message) if isinstance(event, Received) else type(event).__name__


@pytest.mark.parametrize("wrong", [{"drop": 1.5}, {"cut": -0.1}, {"min_delay_s": 1.0}, {"min_delay_s": -1.0}])
def test_impossible_faults_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidField, match=next(iter(wrong))):
        Faults(**wrong)
