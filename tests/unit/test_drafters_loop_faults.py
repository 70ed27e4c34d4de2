"""No fault of the mail between a target and a drafter wedges or leaks a request."""

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from cluster.errors import LinkClosed, LinkFull
from cluster.messages import Budget, DraftRound, Extend, Open, SubmitRound
from cluster.transport.base import LinkDown, LinkUp, Received
from cluster.types import DraftTerms, Proposal
from tests.support.drafter_bench import SAMPLING, Bench, FakeLink
from tests.support.quick import first


def num_refused(bench: Bench) -> int:
    return sum(len(peer.refused) for peer in bench.loop.sessions.peers.values())


class TestFaults:
    def test_a_gap_asks_for_a_resync_until_it_is_answered(self) -> None:
        bench = Bench(resync_s=1.0)
        bench.open("a", 10)
        bench.settle()
        bench.link.take()
        bench.extend("a", 12, 12)
        bench.extend("a", 13, 13)
        bench.settle()
        assert bench.link.take_resyncs() == ["a"]
        bench.now_s = 0.9
        bench.settle()
        assert bench.link.sent == []
        assert bench.loop.next_due_s() == 1.0
        bench.now_s = 1.0
        bench.settle()
        assert bench.link.take_resyncs() == ["a"]
        bench.open("a", 14)
        bench.now_s = 1.5
        bench.settle()
        assert [p.base_len for p in bench.link.take()] == [14]
        assert bench.drafter.texts == {"0/a": list(range(14))}, "the part that was known is not told again"
        bench.now_s = 100.0
        assert bench.loop.next_due_s() is None

    def test_an_open_that_is_older_than_what_is_missing_does_not_answer_a_resync(self) -> None:
        bench = Bench(resync_s=1.0)
        bench.extend("a", 12, 12)
        bench.open("a", 10)
        bench.settle()
        assert bench.link.take_resyncs() == ["a"]
        bench.open("a", 13)
        bench.settle()
        assert [p.base_len for p in bench.link.take()] == [13]

    def test_resyncs_end_if_the_target_does_not_know_the_request(self) -> None:
        bench = Bench(resync_s=1.0, max_resyncs=3)
        bench.open("a", 10)
        bench.extend("a", 12, 12)
        for bench.now_s in range(100):
            bench.settle()
        assert bench.link.take_resyncs() == ["a"] * 3
        assert bench.drafter.texts == {}

    def test_known_tokens_change_nothing(self) -> None:
        bench = Bench()
        bench.open("a", 10)
        bench.extend("a", 10, 10, 11)
        bench.settle()
        bench.link.take()
        bench.extend("a", 10, 10, 11)
        bench.extend("a", 5, 5)
        bench.open("a", 8)
        bench.settle()
        assert bench.link.sent == []
        bench.extend("a", 11, 11, 12)  # half of it is news
        bench.settle()
        assert [p.base_len for p in bench.link.take()] == [13]
        assert bench.drafter.texts == {"0/a": list(range(13))}

    def test_a_contradiction_forgets_the_request_and_asks_for_it(self) -> None:
        bench = Bench()
        bench.open("a", 10)
        bench.extend("a", 5, 77)
        bench.settle()
        assert bench.link.take_resyncs() == ["a"]
        assert bench.drafter.texts == {}
        bench.open("a", 10)
        bench.mail(opens=(Open("a", (7, 7, 7), 3, SAMPLING),))  # an id used anew
        bench.settle()
        assert bench.drafter.texts == {"0/a": [7, 7, 7]}

    def test_releases_may_come_twice_and_for_strangers(self) -> None:
        bench = Bench()
        bench.open("a", 10)
        bench.mail(releases=("a", "a", "stranger"))
        bench.mail(releases=("a",))
        bench.settle()
        assert bench.drafter.texts == {}
        bench.extend("b", 3, 3)
        bench.mail(releases=("b",))
        bench.settle()
        assert bench.link.sent == [], "a released request is not asked for"

    def test_a_request_whose_release_was_lost_is_forgotten_in_time(self) -> None:
        bench = Bench(idle_s=10.0)
        bench.open("a", 10)
        bench.open("b", 10)
        bench.settle()
        for bench.now_s in range(1, 13):
            bench.extend("b", 9 + int(bench.now_s), 0)
            bench.settle()
        assert list(bench.drafter.texts) == ["0/b"]

    @pytest.mark.parametrize("how", ["down", "closed"])
    def test_a_lost_link_takes_its_requests_along(self, how: str) -> None:
        bench = Bench()
        other = FakeLink("other")
        bench.mailbox.put(LinkUp(other))
        bench.open("a", 10)
        bench.open("b", 10, link=other)
        bench.settle()
        if how == "down":
            bench.mailbox.put(LinkDown(bench.link, "gone"))
        else:
            bench.link.refuses = LinkClosed
            bench.extend("a", 10, 10)
        bench.settle()
        assert list(bench.drafter.texts) == ["1/b"]
        assert bench.link.closed
        bench.open("c", 10)  # was queued behind the end of its link
        bench.mailbox.put(LinkDown(bench.link, "gone"))
        bench.settle()
        assert list(bench.drafter.texts) == ["1/b"]

    def test_a_full_link_loses_the_message_and_nothing_else(self) -> None:
        bench = Bench(resync_s=1.0)
        bench.link.refuses = LinkFull
        bench.open("a", 10)
        bench.extend("b", 4, 4)
        bench.settle()
        bench.link.refuses = None
        bench.extend("a", 10, 10)
        bench.now_s = 1.0
        bench.settle()
        assert [resync for message in bench.link.sent for resync in message.resyncs] == ["b"]
        assert [p.base_len for p in bench.link.take()] == [11]

    def test_beyond_its_capacity_it_does_not_propose_until_there_is_room(self, caplog: pytest.LogCaptureFixture) -> None:
        bench = Bench(capacity=2)
        for name in "abcd":
            bench.open(name, 10)
        bench.extend("c", 10, 10)
        bench.settle()
        assert sorted(p.request_id for p in bench.link.take() if p.token_ids) == ["a", "b"]
        assert num_refused(bench) == 2
        assert [record.message for record in caplog.records] == ["drafter counting is at its capacity of 2 requests"]
        bench.mail(releases=("a",))
        bench.settle()
        assert bench.link.take_resyncs() == ["d"], "the one that was heard of longest ago"
        bench.open("d", 10)
        bench.settle()
        assert [p.request_id for p in bench.link.take()] == ["d"]

    def test_a_request_may_take_the_room_of_one_that_ends_in_the_same_message(self) -> None:
        """A drafter that is not asked for a while is told of both together."""
        bench = Bench(capacity=1)
        bench.open("a", 10)
        bench.settle()
        bench.link.take()
        bench.mail(opens=(Open("b", (1, 2), 2, SAMPLING),), releases=("a",))
        bench.settle()
        assert [(p.request_id, bool(p.token_ids)) for p in bench.link.take()] == [("b", True)]
        assert num_refused(bench) == 0
        bench.mail(opens=(Open("c", (1, 2), 2, SAMPLING),), releases=("b", "c"))
        bench.settle()
        assert bench.drafter.texts == {}

    def test_a_refused_request_is_answered_with_nothing_for_each_commit(self) -> None:
        bench = Bench(capacity=1)
        bench.open("a", 10)
        bench.settle()
        bench.link.take()
        bench.open("b", 20)
        bench.settle()
        assert bench.link.take() == [Proposal("b", 20, (), (), "counting")]
        bench.extend("b", 20, 20, 21)
        bench.extend("b", 22, 22)
        bench.extend("b", 20, 20, 21)  # doubled, and late
        bench.settle()
        assert bench.link.take() == [Proposal("b", 23, (), (), "counting")]
        assert not bench.step()
        assert bench.drafter.texts == {"0/a": list(range(10))}

    def test_a_refused_request_that_was_released_is_not_answered(self) -> None:
        bench = Bench(capacity=1)
        bench.open("a", 10)
        bench.open("b", 20)
        bench.mail(releases=("b",))
        bench.drafter.meanwhile = lambda: bench.mail(opens=(Open("c", (1, 2), 2, SAMPLING),), releases=("c",))
        bench.settle()
        assert [p.request_id for p in bench.link.take()] == ["a"]

    def test_a_refused_request_that_is_admitted_still_gets_its_empty_proposal(self) -> None:
        bench = Bench(capacity=1)
        bench.open("a", 10)
        bench.open("b", 20)
        bench.settle()
        bench.link.take()
        bench.mail(extends=(Extend("b", 20, (20,)),), releases=("a",))
        bench.settle()
        (message,) = bench.link.sent
        assert message.resyncs == ("b",)
        assert message.proposals == (Proposal("b", 21, (), (), "counting"),)

    def test_strange_messages_are_ignored(self) -> None:
        bench = Bench()
        bench.mailbox.put(Received(bench.link, SubmitRound()))
        bench.mail()
        bench.extend("a", -5, 1)
        bench.open("b", 0)
        bench.settle()
        bench.open("c", 3)
        bench.settle()
        assert [p.request_id for p in bench.link.take()] == ["c"]
        assert list(bench.drafter.texts) == ["0/c"]


@dataclass
class Truth:
    """A target as the drafter meets it: what it committed, and a network that does what it likes with the messages."""

    rng: random.Random
    link: FakeLink
    put: Callable[[DraftRound], None]
    chaos: float = 0.4
    texts: dict[str, list[int]] = field(default_factory=dict)
    under_way: list[DraftRound] = field(default_factory=list)

    def say(self, **content: object) -> None:
        self.under_way.append(DraftRound(**{"table_version": 1, **content}))

    def act(self) -> None:
        name = self.rng.choice("abcdef") + str(self.rng.randrange(3))
        text = self.texts.get(name)
        if text is None:
            self.texts[name] = [self.token(name, t) for t in range(self.rng.randint(1, 5))]
            self.say(opens=(self.opening(name),), budgets=(Budget(name, DraftTerms(self.rng.randrange(6))),))
        elif self.rng.random() < 0.15:
            del self.texts[name]
            self.say(releases=(name,))
        else:
            self.grow(name)

    def grow(self, name: str) -> None:
        text = self.texts[name]
        new = tuple(self.token(name, len(text) + i) for i in range(self.rng.randint(1, 4)))
        self.say(extends=(Extend(name, len(text), new),))
        text += new

    def opening(self, name: str) -> Open:
        return Open(name, tuple(self.texts[name]), 1, SAMPLING)

    @staticmethod
    def token(name: str, position: int) -> int:
        """The output is a function of the request, as the real one is."""
        return zlib.crc32(f"{name} {position}".encode()) % 100

    def deliver(self) -> None:
        """Some of what is under way, in any order, lost or doubled."""
        while self.under_way and self.rng.random() < 0.7:
            chaotic = self.rng.random() < self.chaos
            message = self.under_way.pop(self.rng.randrange(len(self.under_way)) if chaotic else 0)
            if chaotic and self.rng.random() < 0.4:
                continue
            if chaotic and self.rng.random() < 0.4:
                self.under_way.append(message)
            self.put(message)

    def listen(self) -> list[Proposal]:
        proposals = []
        for message in self.link.sent:
            if self.rng.random() < self.chaos / 2:
                continue
            proposals += message.proposals
            for request_id in message.resyncs:
                if request_id in self.texts:
                    self.say(opens=(self.opening(request_id),))
                elif self.rng.random() < 0.5:
                    self.say(releases=(request_id,))
        self.link.sent.clear()
        return proposals


@pytest.mark.parametrize("seed", first(40, range(200)))
def test_whatever_befalls_the_mail_the_loop_ends_up_in_step(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(ahead_len=rng.choice([0, 5]), resync_s=0.2, max_resyncs=4, idle_s=5.0, capacity=rng.choice([4, 50]))
    link = bench.link
    truth = Truth(rng, link, lambda message: bench.mailbox.put(Received(link, message)))
    for _ in range(150):
        truth.act()
        truth.deliver()
        bench.now_s += rng.random() * 0.1
        bench.step()
        for proposal in truth.listen():
            assert proposal.base_len > 0
            assert len(proposal.token_ids) == len(proposal.confidences) <= 6
        for key, text in bench.drafter.texts.items():
            name = key.removeprefix("0/")
            assert text == [truth.token(name, t) for t in range(len(text))], "committed tokens were misplaced"

    # The network recovers. Whoever is live goes on; the rest falls silent.
    truth.chaos = 0.0
    for _ in range(50):
        for name in truth.texts:
            if rng.random() < 0.5:
                truth.grow(name)
        while truth.under_way:
            truth.deliver()
        bench.now_s += 0.4
        bench.settle()
        truth.listen()
    for name in truth.texts:
        truth.grow(name)
    while truth.under_way:
        truth.deliver()
    bench.settle()
    followed = {key.removeprefix("0/"): text for key, text in bench.drafter.texts.items()}
    if len(truth.texts) <= 4 or num_refused(bench) == 0:
        assert followed == truth.texts
    else:
        assert bench.loop.sessions.num_drafted == 4  # those of budget 0 are beside them
        assert all(truth.texts[name] == text for name, text in followed.items())
    truth.say(releases=tuple(truth.texts))
    while truth.under_way:
        truth.deliver()
    bench.settle()
    bench.now_s += 20.0
    bench.settle()
    assert bench.drafter.texts == {}
    assert num_refused(bench) == 0
