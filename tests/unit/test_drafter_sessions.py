"""What the round makes of what its drafters say."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import pytest

from cluster.messages import Budget, DraftRound, DraftScore, Hello, LevelReport, Message, OutcomeReport, ProposalRound, Role
from cluster.sampling_params import SamplingParams
from cluster.types import Commit, DraftTerms, ModelInfo, Proposal, Request, RoutingTable
from engine.colocated import ColocatedDrafters
from engine.drafter_sessions import DrafterSessions
from engine.sequences import LiveSequence, Sequences
from engine.telemetry import Telemetry
from router import assignment
from router.assignment import Positions
from router.cost_model import TableCost
from router.plan import Span

COST = TableCost((1,), (0.02,))
MODEL = ModelInfo("m", vocab_size=100, max_model_len=64, eos_token_ids=(9,), tokenizer_fingerprint="f")
PEER = Hello(Role.DRAFTER, "d", 100, "fingerprint")


@dataclass(eq=False)
class Link:
    """The target's end of a link to a drafter that keeps still."""

    peer: Hello = PEER
    sent: list[DraftRound] = field(default_factory=list)

    def send(self, message: Message) -> None:
        assert isinstance(message, DraftRound)
        self.sent.append(message)

    def close(self) -> None: ...


def sessions(
    sequences: Sequences, telemetry: Telemetry, table: RoutingTable, proposers: Mapping[str, Collection[str]] | None = None
) -> DrafterSessions:
    return DrafterSessions(sequences, telemetry, table, ColocatedDrafters((), COST), proposers)


def test_an_empty_answer_says_nothing_of_how_long_drafting_takes() -> None:
    """A full drafter answers at once, for it does not draft."""
    sequences, telemetry = Sequences(MODEL), Telemetry()
    drafters = sessions(sequences, telemetry, RoutingTable(version=0, defaults=(("d",),)))
    link = Link()
    drafters.link_up(link)
    request = Request("r", (1, 2, 3), SamplingParams(max_tokens=20), arrival_s=0.0)
    drafters.assign(sequences.add(request))
    sequence = sequences.get("r")
    assert sequence is not None
    sequence.draft.expect(10.0, is_queried=True)
    drafters.receive(link, ProposalRound(0, (Proposal("r", 3, (), (), "d"),)), 10.001)
    assert telemetry.drafter("d").reply_s.num == 0
    drafters.receive(link, ProposalRound(0, (Proposal("r", 3, (5,), (0.5,), "d"),)), 10.02)
    assert telemetry.drafter("d").reply_s.value == pytest.approx(0.02)


@pytest.mark.parametrize(("num_right", "expected"), [(4, 4.0), (3, 3.0), (0, 0.0)])
def test_proposals_that_come_too_late_are_worth_the_wait_that_they_were_not_given(num_right: int, expected: float) -> None:
    """Else a target that once did not wait would never wait again, or always ask for wrong drafts."""
    sequences, telemetry = Sequences(MODEL), Telemetry()
    drafters = sessions(sequences, telemetry, RoutingTable(version=0, defaults=(("d",),)))
    link = Link()
    drafters.link_up(link)
    sequence = sequences.add(Request("r", (1, 2, 3), SamplingParams(max_tokens=10_000), arrival_s=0.0))
    drafters.assign(sequence)
    drafters.set_budgets({"r": DraftTerms(4)})
    for _ in range(100):
        base_len = len(sequence.token_ids)
        sequence.token_ids.extend((5, 6))  # decoded plainly, while the drafter drafts
        drafters.publish([sequence], 1.0)
        drafts = tuple(token if i < num_right else 8 for i, token in enumerate((5, 6, 5, 6)))
        drafters.receive(link, ProposalRound(0, (Proposal("r", base_len, drafts, (0.9,) * 4, "d"),)), 2.0)
        assert (sequence.draft.proposal is not None) == (num_right > 2)
        sequence.token_ids.extend((5, 6))
        sequence.draft.judge((5, 6))
        commits = [(sequence, Commit("r", base_len + 2, (5, 6), num_proposed=2 if num_right > 2 else 0))]
        drafters.publish([sequence], 3.0)
        drafters.learn(commits, 3.0)
    means = telemetry.drafter("d").accepted_per_round.value, telemetry.drafter("d").acceptance.value
    assert means == (pytest.approx(expected, abs=0.05), pytest.approx(expected / 4, abs=0.15))


def test_a_chain_runs_at_its_last_drafter_and_a_proposal_outlives_a_change_below() -> None:
    sequences, telemetry = Sequences(MODEL), Telemetry()
    drafters = sessions(sequences, telemetry, RoutingTable(version=0, defaults=(("a", "d"),)))
    link = Link()
    drafters.link_up(link)
    sequence = sequences.add(Request("r", (1, 2, 3), SamplingParams(max_tokens=20), arrival_s=0.0))
    drafters.assign(sequence)
    drafters.flush()
    assert [(opened.request_id, opened.proposers) for opened in link.sent.pop().opens] == [("r", ("a",))]
    assert (sequence.draft.chain, sequence.draft.drafter) == (("a", "d"), "d")
    level = LevelReport("d", 1, 5, 0.0, 0)
    drafters.receive(link, ProposalRound(0, (Proposal("r", 3, (5,), (0.5,), "d"),), levels=(level,)), 10.02)
    assert telemetry.take_levels() == (level,)
    assert telemetry.take_levels() == ()
    drafters.follow(RoutingTable(version=1, chains={"r": ("a", "b/1", "d")}))
    assert sequence.draft.proposal is not None
    drafters.flush()
    assert [(opened.token_ids, opened.proposers) for opened in link.sent[-1].opens] == [((1, 2, 3), ("a", "b"))]
    assert not link.sent[-1].releases
    drafters.follow(RoutingTable(version=2, chains={"r": ("d", "a")}))
    assert sequence.draft.proposal is None
    drafters.flush()
    assert link.sent[-1].releases == ("r",)


def hello(name: str) -> Hello:
    return Hello(Role.DRAFTER, name, 100, "fingerprint")


def sent_to(link: Link) -> DraftRound:
    return link.sent.pop() if link.sent else DraftRound(0)


def test_scorers_keep_in_step_and_take_over_without_being_told_all_again() -> None:
    sequences, telemetry = Sequences(MODEL), Telemetry()
    drafters = sessions(sequences, telemetry, RoutingTable(0, defaults=(("a",),), scorers=("a", "b", "c/1")))
    links = {name: Link(hello(name)) for name in ("a", "b", "c", "c/1", "d")}
    for link in links.values():
        drafters.link_up(link)
    sequence = sequences.add(Request("r", (1, 2, 3), SamplingParams(max_tokens=20), arrival_s=0.0))
    drafters.assign(sequence)
    drafters.set_budgets({"r": DraftTerms(4)})
    drafters.flush()
    rounds = {name: sent_to(link) for name, link in links.items()}
    assert {name: [b.terms.num_tokens for b in one.budgets] for name, one in rounds.items()} == {
        "a": [4], "b": [0], "c": [], "c/1": [0], "d": []
    }  # fmt: skip
    assert dict(drafters.num_followed()) == {"a": 1, "b": 0, "c": 0, "c/1": 0, "d": 0}
    sequence.token_ids.extend((5, 6))
    drafters.publish([sequence], 1.0)
    drafters.flush()
    assert [len(sent_to(links[name]).extends) for name in ("a", "b", "c/1", "d")] == [1, 1, 1, 0]
    drafters.receive(links["b"], ProposalRound(0, scores=(DraftScore("r", 3, 2, 3), DraftScore("r", 5, 0, 1))), 1.0)
    assert telemetry.take_scores() == (assignment.ScoreCounts("r", "b", Positions((2, 1, 1), (1, 1, 0))),)
    assert telemetry.take_scores() == ()
    drafters.receive(links["b"], ProposalRound(0, (Proposal("r", 3, (5,), (0.5,), "b"),), resyncs=("r",)), 1.0)
    assert sequence.draft.proposal is None  # it is not its turn
    assert drafters.receive(links["b"], ProposalRound(0, (Proposal("r", 5, (5,), (0.5,), "a"),)), 1.0) == (
        "a proposal in the name of 'a'",
    )
    assert sequence.draft.proposal is None
    drafters.flush()
    again = sent_to(links["b"])
    assert ([len(o.token_ids) for o in again.opens], [b.terms.num_tokens for b in again.budgets]) == ([5], [0])
    drafters.follow(RoutingTable(1, {"r": ("b",)}, scorers=("a", "b")))
    drafters.set_budgets({"r": DraftTerms(4, 0.25)})
    drafters.flush()
    assert sent_to(links["a"]).budgets == (Budget("r", DraftTerms(0)),)  # it stays in step
    assert (taken := sent_to(links["b"])).budgets == (Budget("r", DraftTerms(4, 0.25)),)
    assert not taken.opens
    assert sent_to(links["c/1"]).releases == ("r",)
    drafters.follow(RoutingTable(2, {"r": ("b",)}))
    drafters.set_budgets({"r": DraftTerms(6, 0.5)})
    drafters.flush()
    assert sent_to(links["a"]).releases == ("r",)
    assert sent_to(links["b"]).budgets == (Budget("r", DraftTerms(6, 0.5)),)
    drafters.release(sequence)
    drafters.flush()
    assert sent_to(links["b"]).releases == ("r",)
    assert not sent_to(links["d"]).releases


def test_whoever_chose_its_chain_is_scored_by_nobody() -> None:
    sequences, telemetry = Sequences(MODEL), Telemetry()
    drafters = sessions(sequences, telemetry, RoutingTable(0, defaults=(("a",),), scorers=("b",)))
    link = Link(hello("b"))
    drafters.link_up(link)
    drafters.assign(sequences.add(Request("r", (1, 2), SamplingParams(max_tokens=20), arrival_s=0.0, chain=("a",))))
    drafters.assign(sequences.add(Request("s", (1, 2), SamplingParams(max_tokens=20), arrival_s=0.0)))
    drafters.flush()
    assert [opened.request_id for opened in sent_to(link).opens] == ["s"]


@pytest.mark.parametrize("says_something", [True, False])
def test_a_request_whose_tokens_the_caller_dictates_says_nothing_of_drafters(says_something: bool) -> None:
    sequences, telemetry = Sequences(MODEL), Telemetry()
    drafters = sessions(sequences, telemetry, RoutingTable(0, defaults=(("a",),), scorers=("b",)))
    links = {name: Link(hello(name)) for name in ("a", "b")}
    for link in links.values():
        drafters.link_up(link)
    bias = ((5, 1.0 if says_something else 100.0),)
    sequence = sequences.add(Request("r", (1, 2), SamplingParams(max_tokens=20, logit_bias=bias), arrival_s=0.0))
    drafters.assign(sequence)
    drafters.set_budgets({"r": DraftTerms(4)})
    sequence.admit(0, 0.0)
    sequences.commit(Span("r", 2, chosen=(5, 5)), 1.0)
    drafters.publish([sequence], 1.0)
    drafters.flush()
    drafters.learn([(sequence, sequence.committed())], 1.0)
    assert [opened.request_id for opened in sent_to(links["a"]).opens] == ["r"]  # it is drafted for all the same
    assert bool(telemetry.take_observations()) == says_something
    assert bool(links["b"].sent) == says_something  # and scored by nobody


def test_whoever_wants_the_target_alone_teaches_nothing() -> None:
    sampling = SamplingParams(max_tokens=20)
    assert not Request("r", (1, 2), sampling, arrival_s=0.0, chain=()).teaches
    assert Request("r", (1, 2), sampling, arrival_s=0.0, chain=("a",)).teaches


def test_a_reply_counts_from_the_commit_to_its_arrival() -> None:
    """It came 4 ms after the commit and lay unread until a pass of 40 ms ended."""
    sequences, telemetry = Sequences(MODEL), Telemetry()
    drafters = sessions(sequences, telemetry, RoutingTable(0, defaults=(("a",),)))
    link = Link(hello("a"))
    drafters.link_up(link)
    sequence = sequences.add(Request("r", (1, 2), SamplingParams(max_tokens=20), arrival_s=0.0), 0.0)
    drafters.assign(sequence)
    sequence.draft.set_budget(DraftTerms(1))
    sequence.draft.expect(1.0, is_queried=True)
    drafters.receive(link, ProposalRound(0, (Proposal("r", 2, (5,), (0.9,), "a"),)), 1.004, after_pass=True)
    assert telemetry.drafter("a").view.reply_s == pytest.approx(0.004)


def test_a_drafter_reports_on_the_models_of_its_own_process_alone() -> None:
    table, proposers = RoutingTable(0, defaults=(("few", "d"),)), {"d": ("few",), "other": ("few", "d")}
    telemetry = Telemetry()
    drafters = sessions(Sequences(MODEL), telemetry, table, proposers=proposers)
    link = Link(hello("d/1"))
    drafters.link_up(link)
    levels = tuple(LevelReport(name, 1, 5, 0.1, 0) for name in ("d", "few", "other"))
    faults = drafters.receive(link, ProposalRound(0, levels=levels), 1.0)
    assert faults == ("a report of the passes of 'other', which does not run there",)
    assert [level.drafter for level in telemetry.take_levels()] == ["d", "few"]


def test_reports_of_outcomes_are_summed_for_metrics() -> None:
    telemetry = Telemetry()
    drafters = sessions(Sequences(MODEL), telemetry, RoutingTable(0, defaults=(("d",),)))
    link = Link()
    drafters.link_up(link)
    for report in (OutcomeReport(10, 4, 3, 20), OutcomeReport(2, 1, 0, 5)):
        drafters.receive(link, ProposalRound(0, outcomes=(report,)), 1.0)
    assert telemetry.drafter("d").counts().outcomes == OutcomeReport(12, 5, 3, 25)


def test_a_companion_that_is_not_queried_is_told_of_ends_alone() -> None:
    """What else it must know waits until it is queried; sessions of ended requests would stay in its memory."""
    sequences, companions = Sequences(MODEL), ColocatedDrafters(("d",), COST)
    drafters = DrafterSessions(sequences, Telemetry(), RoutingTable(0, defaults=(("d",),)), companions)
    link = Link()
    drafters.link_up(link)

    def add(name: str, chain: tuple[str, ...] | None = None) -> LiveSequence:
        request = Request(name, (1, 2, 3), SamplingParams(max_tokens=20), arrival_s=0.0, chain=chain)
        sequence = sequences.add(request)
        drafters.assign(sequence)
        return sequence

    def end(sequence: LiveSequence) -> None:
        sequences.remove(sequence.request.id)
        drafters.release(sequence)

    first, second = add("first"), add("second")
    add("of the target alone", ())
    drafters.flush()
    assert len(link.sent.pop().opens) == 2
    # None of the requests of the pass has it.
    companions.choose(1, 3, (), prompts_wait=False, num_missed=drafters.num_unsent)
    unsent = add("unsent")
    second.token_ids.append(5)
    drafters.publish([second], 1.0)
    assert drafters.num_unsent("d") == 4
    end(first)
    end(unsent)
    drafters.flush()
    drafters.flush()
    assert drafters.num_unsent("d") == 1
    (message,) = link.sent
    assert set(message.releases) == {"first", "unsent"}
    assert replace(message, releases=()) == DraftRound(0)
    companions.choose(1, 3, ("d",), prompts_wait=False, num_missed=drafters.num_unsent)
    drafters.flush()
    assert [(one.request_id, one.base_len, one.token_ids) for one in link.sent[-1].extends] == [("second", 3, (5,))]
    assert not link.sent[-1].opens
    assert not link.sent[-1].releases
