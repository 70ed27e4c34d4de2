"""Whether a drafter's drafts come in time: only rounds count that a draft could have been there for."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from cluster.messages import Hello, Message, ProposalRound, Role
from cluster.types import Commit, DraftTerms, ModelInfo, Proposal, RoutingTable
from engine.colocated import ColocatedDrafters
from engine.drafter_sessions import DrafterSessions
from engine.sequences import LiveSequence, Sequences
from engine.telemetry import Telemetry
from router.assignment import AssignmentPolicy, Observation, PoolMember, RequestView
from router.cost_model import TableCost
from router.estimates.acceptance import OnTimeRates
from router.estimates.decayed import DecayedMean
from router.estimates.draft_times import DraftTimes
from router.estimates.drafter_stats import DrafterStats
from router.papers.not_a_bandit import Hedge
from router.papers.specrouter import ModelChains
from router.plan import Span
from tests.support.observations import right_at
from tests.support.requests import a_request

COST = TableCost((1,), (0.02,))
MODEL = ModelInfo("m", vocab_size=100, max_model_len=64, eos_token_ids=(9,), tokenizer_fingerprint="f")
TABLE = RoutingTable(version=0, defaults=(("d",),))
RIGHT, WRONG = 5, 6


@dataclass(eq=False)
class Link:
    """The target's end of a link to a drafter whose mail the test writes."""

    peer: Hello = field(default_factory=lambda: Hello(Role.DRAFTER, "d", 100, "fingerprint"))

    def send(self, message: Message) -> None: ...

    def close(self) -> None: ...


class Target:
    """Rounds of one request after another, each token of which is RIGHT."""

    def __init__(self, colocated_names: tuple[str, ...] = ()) -> None:
        self.sequences, self.telemetry, self.link = Sequences(MODEL), Telemetry(step_s=DecayedMean(value=0.1)), Link()
        self.colocated = ColocatedDrafters(colocated_names, COST)
        self.drafters = DrafterSessions(self.sequences, self.telemetry, TABLE, self.colocated)
        self.drafters.link_up(self.link)
        self.now_s = 0.0

    def take(self, num_tokens: int, request_id: str = "r") -> LiveSequence:
        sequence = self.sequences.add(a_request(request_id, (1, 2, 3), max_tokens=num_tokens))
        self.drafters.assign(sequence)
        sequence.admit(0, self.now_s)
        return sequence

    def _allow(self, sequence: LiveSequence) -> None:
        """As a plan does: without a budget nothing is asked for."""
        self.drafters.set_budgets({sequence.request.id: DraftTerms(4)})

    def hear(self, sequence: LiveSequence, *token_ids: int) -> None:
        """A proposal for what is committed."""
        confidences = (0.5,) * len(token_ids)
        proposal = Proposal(sequence.request.id, len(sequence.token_ids), token_ids, confidences, "d")
        self.drafters.receive(self.link, ProposalRound(0, (proposal,)), self.now_s)

    def round(self, sequence: LiveSequence) -> None:
        """Verifies what is at hand, and commits."""
        self.now_s += 0.1
        request_id = sequence.request.id
        num_left = len(sequence.token_ids) - sequence.computed_len
        span = Span(request_id, num_left, 4)
        self.sequences.bind([span])
        drafts = span.drafts
        num_right = next((i for i, token in enumerate(drafts) if token != RIGHT), len(drafts))
        self._allow(sequence)
        span.chosen, span.num_accepted = (RIGHT,) * (num_right + 1), num_right
        commit = self._publish(span)
        if commit.finish is not None:
            self.sequences.remove(request_id)
            self.drafters.release(sequence)

    def fail(self, sequence: LiveSequence) -> None:
        self._publish(Span(sequence.request.id, 1, error="no number among the logits"))

    def _publish(self, span: Span) -> Commit:
        sequence = self.sequences.commit(span, self.now_s) or pytest.fail("nothing is committed")
        self.drafters.publish([sequence], self.now_s)
        commit = sequence.committed()
        self.drafters.learn([(sequence, commit)], self.now_s)
        return commit

    def seen(self) -> Observation:
        (seen,) = self.telemetry.take_observations()
        return seen


def share(target: Target) -> float:
    in_time = OnTimeRates(memory=1000.0)
    in_time.observe(target.telemetry.take_observations())
    return float(in_time.shares(["d"]).item())


@pytest.mark.parametrize("drafts", [(), (WRONG,), (RIGHT, WRONG), (RIGHT, RIGHT, RIGHT, RIGHT)])
@pytest.mark.parametrize("num_tokens", [2, 3, 8])
def test_a_punctual_drafter_of_short_requests_is_in_time(num_tokens: int, drafts: tuple[int, ...]) -> None:
    target = Target()
    for number in range(40):
        sequence = target.take(num_tokens, f"r{number}")
        target.round(sequence)
        while sequence.finish is None:
            if sequence.max_new_tokens > 1:  # for one token nobody asks for a draft
                target.hear(sequence, *drafts)
            target.round(sequence)
    assert share(target) == 1.0


def test_a_late_drafter_of_short_requests_is_not() -> None:
    target = Target()
    for number in range(40):
        sequence = target.take(8, f"r{number}")
        while sequence.finish is None:
            target.round(sequence)
    assert share(target) < 0.05


def test_of_each_round_it_is_known_whether_a_draft_was_waited_for() -> None:
    target = Target()
    sequence = target.take(20)
    target.round(sequence)  # of its first token: nothing was asked for yet
    target.round(sequence)
    target.hear(sequence, RIGHT, RIGHT, RIGHT)
    target.round(sequence)
    assert sequence.finish is None
    assert (seen := target.seen()).num_rounds == 3
    assert (seen.num_missed, seen.num_in_time, seen.num_awaited) == (1, 1, 2)


def test_nothing_is_waited_for_from_a_drafter_that_has_been_told_nothing() -> None:
    """One that the request has come to, and one that was down."""
    target = Target()
    sequence = target.take(20)
    target.round(sequence)
    target.drafters.follow(RoutingTable(1, {"r": ()}))
    target.round(sequence)
    target.drafters.follow(RoutingTable(2, {"r": ("d",)}))
    target.round(sequence)  # the first with it again
    target.drafters.link_down(target.link, "it was killed")
    target.round(sequence)
    target.link = Link()
    target.drafters.link_up(target.link)
    target.round(sequence)  # the first with the new one
    assert (seen := target.seen()).num_rounds == 3  # the two without a drafter are nobody's
    assert seen.num_awaited == 0


def test_rounds_that_a_companion_is_not_asked_in_are_rounds_without_its_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it there; but they are short for want of its drafts, and what they take counts, too."""
    target = Target(colocated_names=("d",))
    sequence = target.take(20)
    target.round(sequence)
    target.hear(sequence, RIGHT)
    monkeypatch.setattr(target.colocated, "is_queried", lambda name: False)
    target.round(sequence)  # it had been asked before this one
    for _ in range(5):
        assert sequence.draft.awaiting_since_s is None
        target.round(sequence)
    assert (seen := target.seen()).num_rounds == 7
    assert (seen.num_missed, seen.num_in_time, seen.num_awaited) == (5, 1, 6)
    target.drafters.link_down(target.link, "it was killed")
    target.link = Link()
    target.drafters.link_up(target.link)
    target.round(sequence)  # the new one has been told nothing before this
    assert target.seen().num_awaited == 0


def test_a_draft_that_did_not_come_while_its_request_was_computed_anew_is_missed() -> None:
    target = Target()
    sequence = target.take(20)
    target.round(sequence)
    sequence.preempt()  # it was preempted: nothing is held for it any more
    target.round(sequence)
    assert (seen := target.seen()).num_rounds == 2
    assert (seen.num_missed, seen.num_in_time) == (1, 0)


def test_a_late_draft_that_is_still_ahead_is_in_time_for_the_round_it_reaches() -> None:
    target = Target()
    sequence = target.take(20)
    target.round(sequence)
    target.round(sequence)
    proposal = Proposal("r", len(sequence.token_ids) - 1, (RIGHT, RIGHT, RIGHT), (0.5,) * 3, "d")
    target.drafters.receive(target.link, ProposalRound(0, (proposal,)), target.now_s)
    target.round(sequence)
    assert ((seen := target.seen()).num_missed, seen.num_in_time) == (1, 1)


@pytest.mark.parametrize("is_late", [True, False])
def test_a_pass_that_failed_says_nothing_of_a_drafter(is_late: bool) -> None:
    target = Target()
    sequence = target.take(20)
    target.round(sequence)
    target.hear(sequence, RIGHT, WRONG)
    target.round(sequence)
    if not is_late:
        target.hear(sequence, RIGHT)
    target.fail(sequence)
    assert sequence.draft.judgement is None
    assert (seen := target.seen()).num_rounds == 2
    assert (seen.num_missed, seen.num_in_time) == (0, 1)


# ---- what policies make of it


@pytest.mark.parametrize("make", [partial(Hedge, learning_rate=1000.0), ModelChains], ids=["hedge", "chain"])
def test_a_companion_that_is_mostly_not_asked_is_worth_what_its_few_drafts_bring(
    make: Callable[[], AssignmentPolicy],
) -> None:
    """Its drafts are long, and the rounds without them short: 130 tokens a second, where the other drafter makes 190."""
    policy = make()
    for number in range(200):
        policy.observe(
            [
                Observation(f"a{number}", "cascade", 20, 14, 6, 26, 0.2, right_at(2, 6), num_missed=18),
                Observation(f"b{number}", "lookup", 20, 140, 20, 40, 0.21, right_at(20, 20)),
            ]
        )
    drafters = [PoolMember("cascade", 64, 0.0), PoolMember("lookup", 64, 0.0)]
    assert policy.assign([RequestView("new", 5, 5, ())], drafters) == {"new": ("lookup",)}


# ---- what outlives the policy

MAKERS = [partial(Hedge, learning_rate=1000.0), ModelChains]
POOL = [PoolMember("late", 8, 0.05), PoolMember("punctual", 8, 0.05)]


def learned(make: Callable[[], AssignmentPolicy]) -> AssignmentPolicy:
    """The one is right, and late for all but a few rounds; the other is right less often."""
    policy = make()
    for number in range(60):
        policy.observe(
            [
                Observation(f"a{number}", "late", 20, 14, 14, 24, 1.0, right_at(2, 14), num_missed=18),
                Observation(f"b{number}", "punctual", 20, 140, 40, 60, 1.0, right_at(20, 40)),
            ]
        )
    return policy


def chosen(policy: AssignmentPolicy) -> str:
    """The last drafter of a chain for a new request."""
    return policy.assign([RequestView("new", 5, 5, ())], POOL)["new"][-1]


def kept(policy: AssignmentPolicy) -> dict[str, Any]:
    """As the store gives it back."""
    found = json.loads(json.dumps(policy.snapshot()))
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("make", MAKERS, ids=["hedge", "chain"])
def test_who_is_late_is_known_to_a_router_that_is_restarted(make: Callable[[], AssignmentPolicy]) -> None:
    before, fresh = learned(make), make()
    fresh.restore(kept(before))
    assert chosen(fresh) == chosen(before) == "punctual"
    assert kept(fresh) == kept(before)


@pytest.mark.parametrize("make", MAKERS, ids=["hedge", "chain"])
def test_drafters_of_which_nothing_but_their_lateness_is_known_are_known_for_it(
    make: Callable[[], AssignmentPolicy],
) -> None:
    before, fresh = make(), make()
    assert before.snapshot() is None
    for number in range(60):
        before.observe([Observation(f"a{number}", "late", 20, 0, 0, 20, 1.0, num_missed=20)])
    fresh.restore(kept(before))
    assert kept(fresh) == kept(before)
    assert kept(fresh)["acceptance"] == {}
    for policy in (before, fresh):
        assert chosen(policy) == "punctual"  # which nobody has tried
    in_slot = [
        Observation("c", "late", 20, 60, 60, 80, 1.0, right_at(20, 60)),
        Observation("d", "punctual", 20, 60, 40, 60, 1.0, right_at(20, 40)),
    ]
    for policy in (before, fresh):
        policy.observe(in_slot)
    assert kept(fresh) == kept(before)


@pytest.mark.parametrize("make", MAKERS, ids=["hedge", "chain"])
def test_of_a_drafter_that_could_have_drafted_for_no_round_no_lateness_is_kept(make: Callable[[], AssignmentPolicy]) -> None:
    policy = make()
    policy.observe([Observation("a", "new", 1, 0, 0, 1, 1.0)])  # a first token
    if make is ModelChains:
        assert policy.snapshot() is None
    else:
        assert kept(policy)["rounds"] == {"new": [1, 1.0]}
        assert kept(policy)["in_time"] == {}
        make().restore(kept(policy))


@pytest.mark.parametrize("make", MAKERS, ids=["hedge", "chain"])
@pytest.mark.parametrize("damage", [None, [], {"late": 1}, {"late": [1]}, {"late": [-1, -1]}, {"late": [1, 2]}])
def test_what_cannot_be_is_refused_and_changes_nothing(make: Callable[[], AssignmentPolicy], damage: Any) -> None:
    policy = learned(make)
    before = kept(policy)
    with pytest.raises(ValueError, match="in_time"):
        policy.restore({**before, "in_time": damage})
    assert kept(policy) == before


# ---- draft times by batch, and reply times, as a target learns them of its drafters


def test_what_one_request_more_takes_is_remembered_once_batches_are_alike() -> None:
    times = DraftTimes()
    for _ in range(20):
        times.add(4, 0.070)
        times.add(8, 0.074)
    for _ in range(1000):
        times.add(8, 0.074)
    assert times.at(8) == pytest.approx(0.074, rel=0.01)
    assert times.at(4) == pytest.approx(0.070, rel=0.05)


def test_a_first_time_of_nothing_hides_no_later_one() -> None:
    times = DraftTimes()
    times.add(8, 0.0)
    for _ in range(50):
        times.add(8, 0.08)
    assert times.at(8) > 0.07


def test_batches_that_are_alike_are_proportional() -> None:
    times = DraftTimes()
    for _ in range(50):
        times.add(8, 0.08)
    assert times.at(4) == pytest.approx(0.04)
    assert times.at(16) == pytest.approx(0.16)


def test_batches_that_are_alike_take_a_share_more_for_a_request_more_if_that_is_thought() -> None:
    times = DraftTimes(0.25)
    for _ in range(50):
        times.add(2, 0.008)
    assert times.at(16) == pytest.approx(0.008 + 14 * 0.25 * 0.004)
    for _ in range(50):
        times.add(16, 0.05)
    assert times.at(9) == pytest.approx(0.029, rel=0.02)


def test_a_wait_for_other_drafts_is_no_part_of_the_transit() -> None:
    """Where one half of a batch is drafted for while the other is verified, each waits for the other's drafts."""
    stats = DrafterStats()
    for reply_s in (0.072, 0.074, *[0.096] * 200):
        stats.drafted(4, 0.070, [8, 8, 8, 8])
        stats.replied(reply_s)
    assert stats.view.reply_s == pytest.approx(0.096, abs=0.001)
    assert stats.view.overhead_s < 0.007
    stats.restarted()
    stats.drafted(4, 0.070, [8])
    stats.replied(0.080)
    assert stats.view.overhead_s == pytest.approx(0.010)
