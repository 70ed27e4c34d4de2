"""The drafter's side of the data plane: what a step does, and that no fault of the mail wedges or leaks a request."""

import random
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from cluster.errors import LinkClosed, LinkFull
from cluster.messages import Budget, DraftRound, Extend, Hello, LevelReport, Message, Open, ProposalRound, Role, SubmitRound
from cluster.transport.base import LinkDown, LinkUp, Mailbox, Received
from cluster.types import Proposal, SamplingParams
from drafters.loop import DrafterLoop
from drafters.protocol import Demand, Draft
from drafters.roster import RosterLimits

SAMPLING = SamplingParams(max_tokens=1000)


@dataclass(eq=False)
class FakeLink:
    """The drafter's end of a link; what is sent stays here."""

    name: str = "target"
    sent: list[ProposalRound] = field(default_factory=list)
    refuses: type[Exception] | None = None
    closed: bool = False

    @property
    def peer(self) -> Hello:
        return Hello(Role.TARGET, self.name, 100, "fingerprint")

    def send(self, message: Message) -> None:
        if self.refuses is not None:
            raise self.refuses("refused")
        assert isinstance(message, ProposalRound)
        self.sent.append(message)

    def close(self) -> None:
        self.closed = True

    def take(self) -> list[Proposal]:
        """The proposals since the last call."""
        proposals = [proposal for message in self.sent for proposal in message.proposals]
        self.sent.clear()
        return proposals

    def take_resyncs(self) -> list[str]:
        resyncs = [request_id for message in self.sent for request_id in message.resyncs]
        self.sent.clear()
        return resyncs


@dataclass
class Counting:
    """A drafter that counts on: the token at position t is t, up to ``limit`` tokens a draft."""

    limit: int = 1000
    texts: dict[str, list[int]] = field(default_factory=dict)
    batches: list[list[Demand]] = field(default_factory=list)
    meanwhile: Callable[[], None] = lambda: None  # happens during the next batch

    def open(self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams) -> None:
        self.texts[request_id] = list(token_ids)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self.texts[request_id].extend(token_ids)

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        self.batches.append(list(demands))
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        drafts = []
        for demand in demands:
            start = len(self.texts[demand.request_id]) + len(demand.ahead)
            num_tokens = min(demand.num_tokens, self.limit)
            drafts.append(Draft(demand.request_id, tuple(range(start, start + num_tokens)), (0.5,) * num_tokens))
        return drafts

    def release(self, request_id: str) -> None:
        del self.texts[request_id]  # the loop releases what it opened, once

    def check_integrity(self) -> None:
        pass


class Bench:
    """A loop, its drafter and one link, and a clock that only the test moves."""

    def __init__(self, *, ahead_len: int = 0, limit: int = 1000, **limits: float) -> None:
        self.mailbox = Mailbox()
        self.drafter = Counting(limit)
        self.loop = DrafterLoop(
            "counting",
            self.drafter,
            self.mailbox,
            RosterLimits(**{"max_draft_len": 4, **limits}),
            ahead_len=ahead_len,
        )
        self.link = FakeLink()
        self.now_s = 0.0
        self.mailbox.put(LinkUp(self.link))

    def mail(self, link: FakeLink | None = None, **content: object) -> None:
        self.mailbox.put(Received(link or self.link, DraftRound(**{"table_version": 1, **content})))

    def open(self, request_id: str, length: int, max_tokens: int = 1000, link: FakeLink | None = None) -> None:
        sampling = SamplingParams(max_tokens=max_tokens)
        self.mail(link, opens=(Open(request_id, tuple(range(length)), length, sampling),))

    def extend(self, request_id: str, base_len: int, *token_ids: int) -> None:
        self.mail(extends=(Extend(request_id, base_len, token_ids),))

    def step(self) -> bool:
        done = self.loop.step(self.now_s)
        self.loop.check_integrity()
        return done

    def settle(self) -> None:
        for _ in range(1000):
            if not self.step():
                return
        raise AssertionError("the loop never comes to rest")


def test_answers_an_open_and_every_commit_with_one_proposal() -> None:
    bench = Bench()
    bench.open("a", 10)
    assert bench.step()
    assert bench.link.take() == [Proposal("a", 10, (10, 11, 12, 13), (0.5,) * 4, "counting")]
    assert not bench.step()
    bench.extend("a", 10, 10, 11, 99)
    bench.settle()
    assert bench.link.take() == [Proposal("a", 13, (13, 14, 15, 16), (0.5,) * 4, "counting")]
    assert bench.drafter.texts == {"0/a": [*range(10), 10, 11, 99]}


def test_drafts_all_requests_of_all_links_as_one_batch_and_sends_one_message_to_each() -> None:
    bench = Bench()
    other = FakeLink("other")
    bench.mailbox.put(LinkUp(other))
    bench.open("a", 10)
    bench.open("b", 20)
    bench.open("a", 30, link=other)
    assert bench.step()
    assert [demand.request_id for demand in bench.drafter.batches[0]] == ["0/a", "0/b", "1/a"]
    assert len(bench.drafter.batches) == len(bench.link.sent) == len(other.sent) == 1
    assert [proposal.base_len for proposal in bench.link.take()] == [10, 20]
    assert [proposal.base_len for proposal in other.take()] == [30]
    telemetry = bench.loop.telemetry()
    assert (telemetry.num_links, telemetry.num_requests, telemetry.num_batches, telemetry.mean_batch) == (2, 3, 1, 3.0)
    assert (telemetry.num_proposals, telemetry.num_tokens) == (3, 12)


def test_budgets_hold_until_they_change_and_nothing_is_drafted_past_the_end() -> None:
    bench = Bench()
    bench.open("a", 10, max_tokens=8)
    bench.mail(budgets=(Budget("a", 2), Budget("unknown", 3)))
    bench.settle()
    assert [len(p.token_ids) for p in bench.link.take()] == [2]
    bench.extend("a", 10, 10)
    bench.settle()
    assert [len(p.token_ids) for p in bench.link.take()] == [2]
    bench.mail(budgets=(Budget("a", 10**9),))
    bench.extend("a", 11, 11)
    bench.settle()
    assert [len(p.token_ids) for p in bench.link.take()] == [4]
    bench.extend("a", 12, 12, 13)
    bench.settle()
    assert [len(p.token_ids) for p in bench.link.take()] == [3]  # of 18 tokens 14 are there, the last is the target's
    bench.extend("a", 14, 14, 15, 16)
    bench.settle()
    assert bench.link.take() == [Proposal("a", 17, (), (), "counting")]
    bench.mail(budgets=(Budget("a", 0),))
    bench.extend("a", 17, 17)
    bench.settle()
    assert bench.link.take() == []


@pytest.mark.parametrize("ahead_len", [0, 6])
def test_a_budget_that_comes_alone_holds_from_the_next_proposal_on(ahead_len: int) -> None:
    bench = Bench(ahead_len=ahead_len)
    bench.open("a", 10)
    bench.settle()
    bench.link.take()
    bench.mail(budgets=(Budget("a", 2),))
    bench.settle()
    assert bench.link.sent == [], "this commit is answered already"
    bench.extend("a", 10, 10)
    bench.settle()
    assert [p.token_ids for p in bench.link.take()] == [(11, 12)]
    bench.mail(budgets=(Budget("a", 0),))
    bench.extend("a", 11, 11)
    bench.settle()
    assert bench.link.take() == []
    bench.mail(budgets=(Budget("a", 3),))
    bench.settle()
    assert [p.token_ids for p in bench.link.take()] == [(12, 13, 14)], "a commit that nothing was said to"


def test_an_empty_draft_is_said_too() -> None:
    bench = Bench(limit=0, ahead_len=4)
    bench.open("a", 10)
    bench.settle()
    assert bench.link.take() == [Proposal("a", 10, (), (), "counting")]
    assert len(bench.drafter.batches) == 1


class TestMailDuringABatch:
    """What comes while a batch is drafted is heard before its drafts leave."""

    def test_of_what_was_committed_meanwhile_only_the_rest_is_sent(self) -> None:
        bench = Bench()
        bench.drafter.meanwhile = lambda: bench.extend("a", 10, 10, 11)
        bench.open("a", 10)
        bench.settle()
        assert [(p.base_len, p.token_ids) for p in bench.link.take()] == [(12, (12, 13))]

    def test_a_contradicted_draft_is_not_sent_but_drafted_anew(self) -> None:
        bench = Bench()
        bench.drafter.meanwhile = lambda: bench.extend("a", 10, 99)
        bench.open("a", 10)
        bench.open("b", 10)
        bench.settle()
        assert [(p.request_id, p.base_len) for p in bench.link.take()] == [("b", 10), ("a", 11)]

    def test_what_was_released_meanwhile_is_not_answered(self) -> None:
        bench = Bench()

        def end_and_begin_anew() -> None:
            bench.mail(releases=("a", "b"))
            bench.open("b", 5)

        bench.drafter.meanwhile = end_and_begin_anew
        bench.open("a", 10)
        bench.open("b", 10)
        bench.settle()
        assert [(p.request_id, p.base_len, len(p.token_ids)) for p in bench.link.take()] == [("b", 5, 4)]


class TestAhead:
    def test_drafts_on_while_the_verdict_is_awaited_and_answers_at_once_when_it_confirms(self) -> None:
        bench = Bench(ahead_len=8)
        bench.open("a", 10)
        bench.settle()
        assert [p.token_ids for p in bench.link.take()] == [(10, 11, 12, 13)]
        assert [len(batch) for batch in bench.drafter.batches] == [1, 1, 1, 1, 1]
        assert bench.drafter.batches[-1] == [Demand("0/a", 2, tuple(range(10, 20)))]
        bench.extend("a", 10, 10, 11, 12, 13, 14)
        assert bench.step()
        assert len(bench.drafter.batches) == 5, "nothing was drafted for this answer"
        assert bench.link.take() == [Proposal("a", 15, (15, 16, 17, 18), (0.5,) * 4, "counting")]

    def test_a_short_rest_is_sent_at_once_too(self) -> None:
        bench = Bench(ahead_len=6)
        bench.open("a", 10)
        for _ in range(3):
            bench.step()
        bench.extend("a", 10, 10, 11, 12, 13, 14)
        bench.step()
        assert [p.token_ids for p in bench.link.take()] == [(10, 11, 12, 13), (15,)]

    def test_starts_over_from_the_corrected_prefix(self) -> None:
        bench = Bench(ahead_len=6)
        bench.open("a", 10)
        bench.settle()
        bench.link.take()
        bench.extend("a", 10, 10, 11, 99)
        bench.step()
        assert bench.drafter.batches[-1] == [Demand("0/a", 4)]
        assert [(p.base_len, p.token_ids) for p in bench.link.take()] == [(13, (13, 14, 15, 16))]

    def test_mail_waits_for_one_batch_at_most(self) -> None:
        bench = Bench(ahead_len=50)
        bench.open("a", 10)
        for _ in range(5):
            bench.step()
        bench.open("b", 20)
        bench.step()
        assert [p.request_id for p in bench.link.take()] == ["a", "b"]

    def test_never_past_the_window_the_end_or_a_short_draft(self) -> None:
        bench = Bench(ahead_len=6)
        bench.open("a", 10)
        bench.open("b", 10, max_tokens=7)
        bench.settle()
        assert sum(d.num_tokens for batch in bench.drafter.batches for d in batch if d.request_id == "0/a") == 4 + 6
        assert sum(d.num_tokens for batch in bench.drafter.batches for d in batch if d.request_id == "0/b") == 6
        short = Bench(ahead_len=6, limit=3)
        short.open("a", 10)
        short.settle()
        assert len(short.drafter.batches) == 1


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

    def test_a_target_that_does_not_know_the_request_is_not_asked_for_ever(self) -> None:
        bench = Bench(resync_s=1.0, max_resyncs=3)
        bench.open("a", 10)
        bench.extend("a", 12, 12)
        for bench.now_s in range(100):
            bench.settle()
        assert bench.link.take_resyncs() == ["a"] * 3
        assert bench.drafter.texts == {}
        assert bench.loop.telemetry().num_resyncs == 3

    def test_what_is_known_is_not_news(self) -> None:
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
        assert bench.loop.telemetry().num_refused == 2
        assert [record.message for record in caplog.records] == ["drafter counting follows 2 requests, no room for more"]
        bench.mail(releases=("a",))
        bench.settle()
        assert bench.link.take_resyncs() == ["d"], "the one that was heard of longest ago"
        bench.open("d", 10)
        bench.settle()
        assert [p.request_id for p in bench.link.take()] == ["d"]

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

    def test_a_refused_request_that_finds_room_is_still_told_that_nothing_comes_for_this_commit(self) -> None:
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
            self.say(opens=(self.opening(name),), budgets=(Budget(name, self.rng.randrange(6)),))
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


@pytest.mark.parametrize("seed", range(200))
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
    if len(truth.texts) <= 4 or bench.loop.telemetry().num_refused == 0:
        assert followed == truth.texts
    else:
        assert bench.loop.telemetry().num_requests == 4  # those of budget 0 are beside them
        assert all(truth.texts[name] == text for name, text in followed.items())
    truth.say(releases=tuple(truth.texts))
    while truth.under_way:
        truth.deliver()
    bench.settle()
    bench.now_s += 20.0
    bench.settle()
    assert bench.drafter.texts == {}
    assert bench.loop.telemetry().num_refused == 0


def test_runs_until_it_is_stopped_and_times_its_drafts() -> None:
    bench = Bench()
    bench.open("a", 10)
    stop = threading.Event()
    ticks = iter(range(1000))

    def clock() -> float:
        now_s = next(ticks)
        if now_s > 5:
            stop.set()
            bench.mailbox.wake()
        return float(now_s)

    bench.loop.run(stop, clock)
    assert [p.base_len for p in bench.link.take()] == [10]
    assert bench.loop.telemetry().mean_draft_s == 1.0


def test_a_failing_drafter_is_its_owners_affair() -> None:
    class Failing(Counting):
        def propose(self, demands: Sequence[Demand]) -> list[Draft]:
            raise RuntimeError("out of memory")

    bench = Bench()
    bench.loop = DrafterLoop("failing", Failing(), bench.mailbox)
    bench.open("a", 10)
    with pytest.raises(RuntimeError, match="out of memory"):
        bench.loop.run(threading.Event(), lambda: 0.0)


class Led(Counting):
    """One that others may ride ahead of, but for "nobody"."""

    def __init__(self) -> None:
        super().__init__()
        self.led: dict[str, tuple[str, ...]] = {}

    def lead(self, request_id: str, proposers: Sequence[str]) -> bool:
        assert request_id in self.texts
        self.led[request_id] = tuple(proposers)
        return "nobody" not in proposers

    def take_levels(self, name: str) -> list[LevelReport]:
        return [LevelReport(name, 1, 2, 0.5, 0)]


def test_a_drafter_is_led_as_the_target_says_and_tells_how_that_goes(caplog: pytest.LogCaptureFixture) -> None:
    bench, drafter = Bench(), Led()
    bench.loop = DrafterLoop("counting/1", drafter, bench.mailbox, RosterLimits(max_draft_len=4))
    bench.now_s = 1.0
    opening = Open("r", (0, 1, 2), 3, SAMPLING, ("a", "b"))
    bench.mail(opens=(opening,))
    bench.settle()
    (key,) = drafter.led
    assert drafter.led[key] == ("a", "b")
    assert [message.levels for message in bench.link.sent] == [(LevelReport("counting", 1, 2, 0.5, 0),)]
    bench.mail(opens=(replace(opening, token_ids=(0, 1, 2, 3), proposers=("nobody",)),))
    bench.settle()
    assert drafter.led[key] == ("nobody",)
    assert bench.link.sent[-1].proposals[0].token_ids == (4, 5, 6, 7)  # alone, to the same tokens
    assert not bench.link.sent[-1].levels  # told a moment ago
    assert "nobody cannot ride ahead of it here" in caplog.text


def test_a_drafter_that_nobody_can_lead_drafts_alone(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.mail(opens=(Open("r", (0, 1, 2), 3, SAMPLING, ("a",)),))
    bench.settle()
    assert [proposal.token_ids for proposal in bench.link.take()] == [(3, 4, 5, 6)]
    assert "a cannot ride ahead of it here" in caplog.text
