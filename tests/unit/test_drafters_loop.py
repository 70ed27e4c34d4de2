"""The drafter's side of the data plane: what a step of its loop does."""

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from cluster.messages import Budget, DraftTiming, LevelReport, Open
from cluster.transport.base import LinkUp
from cluster.types import DraftTerms, Proposal
from drafters.loop import DrafterLoop
from drafters.protocol import Capabilities, Demand, Draft
from drafters.sessions import SessionLimits
from tests.support.drafter_bench import SAMPLING, Bench, Counting, FakeLink


def test_answers_an_open_and_every_commit_with_one_proposal() -> None:
    bench = Bench()
    bench.open("a", 10)
    assert bench.step()
    assert bench.link.take() == [Proposal("a", 10, (10, 11, 12, 13), (0.5,) * 4, "counting", unfinished=True)]
    assert not bench.step()
    bench.extend("a", 10, 10, 11, 99)
    bench.settle()
    assert bench.link.take() == [Proposal("a", 13, (13, 14, 15, 16), (0.5,) * 4, "counting", unfinished=True)]
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
    assert (len(bench.loop.sessions.peers), bench.loop.sessions.num_drafted) == (2, 3)


def test_the_row_price_of_a_budget_reaches_the_drafter_and_an_unsound_one_changes_nothing() -> None:
    bench = Bench(ahead_len=4)
    bench.open("a", 10)
    bench.mail(budgets=(Budget("a", DraftTerms(2, 0.25)),))
    bench.settle()
    assert {demand.terms.row_price for batch in bench.drafter.batches for demand in batch} == {0.25}
    for unsound in (DraftTerms(65, 0.5), DraftTerms(2, 1.5), DraftTerms(2, float("nan")), DraftTerms(2, -0.5)):
        bench.mail(budgets=(Budget("a", unsound),))
    bench.extend("a", 10, 10)
    bench.drafter.batches.clear()
    bench.settle()
    assert {demand.terms.row_price for batch in bench.drafter.batches for demand in batch} == {0.25}


def test_budgets_hold_until_they_change_and_nothing_is_drafted_past_the_end() -> None:
    bench = Bench()
    bench.open("a", 10, max_tokens=8)
    bench.mail(budgets=(Budget("a", DraftTerms(2)), Budget("unknown", DraftTerms(3))))
    bench.settle()
    assert [len(p.token_ids) for p in bench.link.take()] == [2]
    bench.extend("a", 10, 10)
    bench.settle()
    assert [len(p.token_ids) for p in bench.link.take()] == [2]
    bench.mail(budgets=(Budget("a", DraftTerms(64)),))
    bench.extend("a", 11, 11)
    bench.settle()
    assert [len(p.token_ids) for p in bench.link.take()] == [4]
    bench.extend("a", 12, 12, 13)
    bench.settle()
    assert [len(p.token_ids) for p in bench.link.take()] == [3]  # of 18 tokens 14 are there, the last is the target's
    bench.extend("a", 14, 14, 15, 16)
    bench.settle()
    assert bench.link.take() == [Proposal("a", 17, (), (), "counting", unfinished=True)]
    bench.mail(budgets=(Budget("a", DraftTerms(0)),))
    bench.extend("a", 17, 17)
    bench.settle()
    assert bench.link.take() == []


@pytest.mark.parametrize("ahead_len", [0, 6])
def test_a_budget_that_comes_alone_holds_from_the_next_proposal_on(ahead_len: int) -> None:
    bench = Bench(ahead_len=ahead_len)
    bench.open("a", 10)
    bench.settle()
    bench.link.take()
    bench.mail(budgets=(Budget("a", DraftTerms(2)),))
    bench.settle()
    assert bench.link.sent == [], "this commit is answered already"
    bench.extend("a", 10, 10)
    bench.settle()
    assert [p.token_ids for p in bench.link.take()] == [(11, 12)]
    bench.mail(budgets=(Budget("a", DraftTerms(0)),))
    bench.extend("a", 11, 11)
    bench.settle()
    assert bench.link.take() == []
    bench.mail(budgets=(Budget("a", DraftTerms(3)),))
    bench.settle()
    assert [p.token_ids for p in bench.link.take()] == [(12, 13, 14)], "a commit that nothing was said to"


def test_times_are_of_batches_without_a_prompt_and_beside_waits_for_hidden_states() -> None:
    bench = Bench()
    bench.loop.take_waited_s = lambda: 0.25

    def timings() -> list[DraftTiming]:
        work = bench.loop.begin(bench.now_s)
        bench.loop.finish(work, bench.now_s, bench.now_s + 1.0)
        return [timing for message in bench.link.sent for timing in message.timings]

    bench.open("a", 80)
    assert timings() == []
    bench.extend("a", 80, 80)
    bench.open("b", 10)
    assert timings() == [DraftTiming(2, 0.75, 0.25)]


def test_an_empty_draft_is_said_too() -> None:
    bench = Bench(limit=0, ahead_len=4)
    bench.open("a", 10)
    bench.settle()
    assert bench.link.take() == [Proposal("a", 10, (), (), "counting")]
    assert len(bench.drafter.batches) == 1


def test_a_draft_that_ends_early_is_marked_as_finished() -> None:
    bench = Bench(limit=2)
    bench.open("a", 10)
    bench.settle()
    assert bench.link.take() == [Proposal("a", 10, (10, 11), (0.5,) * 2, "counting", unfinished=False)]


class TestMailDuringABatch:
    """What comes while a batch is drafted is heard before its drafts leave."""

    def test_of_what_was_committed_meanwhile_only_the_rest_is_sent(self) -> None:
        bench = Bench()
        bench.drafter.meanwhile = lambda: bench.extend("a", 10, 10, 11)
        bench.open("a", 10)
        bench.settle()
        assert [(p.base_len, p.token_ids, p.unfinished) for p in bench.link.take()] == [(12, (12, 13), True)]

    @pytest.mark.parametrize("ahead_len", [0, 6])
    def test_the_rest_of_a_draft_that_ended_of_its_own_accord_is_still_its_end(self, ahead_len: int) -> None:
        bench = Bench(limit=3, max_draft_len=6, ahead_len=ahead_len)
        bench.drafter.meanwhile = lambda: bench.extend("a", 10, 10)
        bench.open("a", 10)
        bench.settle()
        assert [(p.base_len, p.token_ids, p.unfinished) for p in bench.link.take()] == [(11, (11, 12), False)]
        assert len(bench.drafter.batches) == 1, "nor is it asked for more"
        bench.extend("a", 11, 11, 12)
        bench.settle()
        assert bench.link.take()[0].token_ids[:1] == (13,), "it is, when that is used up"

    def test_a_draft_of_which_more_is_at_hand_than_is_sent_is_unfinished(self) -> None:
        bench = Bench(limit=3, max_draft_len=6)
        bench.drafter.meanwhile = lambda: bench.mail(budgets=(Budget("a", DraftTerms(2)),))
        bench.open("a", 10)
        bench.settle()
        assert [(p.token_ids, p.unfinished) for p in bench.link.take()] == [((10, 11), True)]

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
        assert bench.drafter.batches[-1] == [Demand("0/a", 2, tuple(range(10, 20)), DraftTerms(4), survival=0.5**6)]
        bench.extend("a", 10, 10, 11, 12, 13, 14)
        assert bench.step()
        assert len(bench.drafter.batches) == 5, "nothing was drafted for this answer"
        assert bench.link.take() == [Proposal("a", 15, (15, 16, 17, 18), (0.5,) * 4, "counting", unfinished=True)]

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
        assert bench.drafter.batches[-1] == [Demand("0/a", 4, terms=DraftTerms(4))]
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


def test_runs_until_it_is_stopped() -> None:
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


def test_a_failing_drafter_is_its_owners_affair() -> None:
    class Failing(Counting):
        def propose(self, demands: Sequence[Demand]) -> list[Draft]:
            raise RuntimeError("out of memory")

    bench = Bench()
    bench.loop = DrafterLoop("failing", Failing(), bench.mailbox)
    bench.open("a", 10)
    with pytest.raises(RuntimeError, match="out of memory"):
        bench.loop.run(threading.Event(), lambda: 0.0)


class Verifier(Counting):
    """Takes any proposers except "nobody"."""

    def __init__(self) -> None:
        super().__init__()
        self.capabilities = Capabilities(chain=self)
        self.proposers: dict[str, tuple[str, ...]] = {}

    def set_proposers(self, request_id: str, proposers: Sequence[str]) -> bool:
        assert request_id in self.texts
        self.proposers[request_id] = tuple(proposers)
        return "nobody" not in proposers

    def take_levels(self, name: str) -> list[LevelReport]:
        return [LevelReport(name, 1, 2, 0.5, 0)]


def test_a_chain_that_another_drafter_replaces_is_no_chain_when_it_drafts_again() -> None:
    bench, drafter = Bench(), Verifier()
    bench.loop = DrafterLoop("counting", drafter, bench.mailbox, SessionLimits(max_draft_len=4))
    bench.mail(opens=(Open("r", (0, 1, 2), 3, SAMPLING, ("a",)),))
    bench.settle()
    (key,) = drafter.proposers
    assert drafter.proposers[key] == ("a",)
    for num_tokens in (0, 4):  # in step with another, then drafting, as the target says it of a drafter in step
        bench.mail(budgets=(Budget("r", DraftTerms(num_tokens)),))
        bench.settle()
        assert drafter.proposers[key] == ()


def test_the_target_names_the_proposers_of_a_chain_and_gets_reports_of_its_levels(caplog: pytest.LogCaptureFixture) -> None:
    bench, drafter = Bench(), Verifier()
    bench.loop = DrafterLoop("counting/1", drafter, bench.mailbox, SessionLimits(max_draft_len=4))
    bench.now_s = 1.0
    opening = Open("r", (0, 1, 2), 3, SAMPLING, ("a", "b"))
    bench.mail(opens=(opening,))
    bench.settle()
    (key,) = drafter.proposers
    assert drafter.proposers[key] == ("a", "b")
    assert [message.levels for message in bench.link.sent] == [(LevelReport("counting", 1, 2, 0.5, 0),)]
    bench.mail(opens=(replace(opening, token_ids=(0, 1, 2, 3), proposers=("nobody",)),))
    bench.settle()
    assert drafter.proposers[key] == ("nobody",)
    assert bench.link.sent[-1].proposals[0].token_ids == (4, 5, 6, 7)  # alone, to the same tokens
    assert not bench.link.sent[-1].levels  # told a moment ago
    assert "it has no proposers nobody" in caplog.text


def test_a_drafter_without_proposers_drafts_alone(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.mail(opens=(Open("r", (0, 1, 2), 3, SAMPLING, ("a",)),))
    bench.settle()
    assert [proposal.token_ids for proposal in bench.link.take()] == [(3, 4, 5, 6)]
    assert "it has no proposers a" in caplog.text
