"""Tokens that a grammar forces beside a drafter's proposals: those that prove right are verified, by kind of grammar."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from cluster.messages import Hello, Message, ProposalRound, Role
from cluster.sampling_params import Grammar, GrammarKind, SamplingParams
from cluster.types import FORCED, MAX_DRAFT_LEN, Commit, DraftTerms, ModelInfo, Proposal, Request, RoutingTable
from engine.colocated import ColocatedDrafters
from engine.draft_state import DraftState
from engine.drafter_sessions import DrafterSessions
from engine.sequences import LiveSequence, Sequences
from engine.telemetry import Telemetry
from router.cost_model import TableCost

PEER = Hello(Role.DRAFTER, "d", 100, "f")
MODEL = ModelInfo("m", vocab_size=100, max_model_len=8192, eos_token_ids=(99,), tokenizer_fingerprint="f")
RIGHT, WRONG = 5, 6  # the target's token at every position, and another one


@dataclass
class Forcing:
    """In the place of a grammar's state: it allows all, and forces so many tokens, of which none or all are right."""

    kind: GrammarKind = GrammarKind.REGEX
    num: int = 12
    is_right: bool = True

    def forced(self) -> list[int]:
        return [RIGHT if self.is_right else WRONG] * self.num

    def num_valid(self, token_ids: Sequence[int]) -> int:
        return len(token_ids)

    def advance(self, token_ids: Sequence[int]) -> None: ...


@dataclass(eq=False)
class Link:
    peer: Hello = PEER
    sent: list[Message] = field(default_factory=list)

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def close(self) -> None: ...


class Rounds:
    """Rounds of one request with a drafter that proposes three right tokens, in time or not before the pass."""

    def __init__(self, grammar: Forcing) -> None:
        self.grammar: Any = grammar
        self.telemetry = Telemetry()
        self._sequences = Sequences(MODEL)
        colocated = ColocatedDrafters((), TableCost((1,), (0.02,)))
        self._drafters = DrafterSessions(self._sequences, self.telemetry, RoutingTable(0, defaults=(("d",),)), colocated)
        self._link = Link()
        self._drafters.link_up(self._link)
        self.sequence = self._new_request()

    @property
    def draft(self) -> DraftState:
        return self.sequence.draft

    def play(self, num: int, *, in_time: bool = True) -> Counter[str | None]:
        """Whose tokens are verified in each round. A late proposal comes with those of the next round."""
        found: Counter[str | None] = Counter()
        for _ in range(num):
            base_len = len(self.sequence.token_ids)
            proposal = Proposal("r", base_len, (RIGHT,) * 3, (0.6,) * 3, "d")
            if in_time or self.draft.proposal is None:  # without another proposal it is waited for
                self._drafters.receive(self._link, ProposalRound(0, (proposal,)), 0.0)
            chosen = self.draft.proposal
            assert chosen is not None
            assert len(chosen.token_ids) == len(self.draft.survival) <= MAX_DRAFT_LEN
            found[chosen.drafter] += 1
            num_right = len(chosen.token_ids) if chosen.token_ids[0] == RIGHT else 0
            self._commit(len(chosen.token_ids), num_right)
            if not in_time:
                self._drafters.receive(self._link, ProposalRound(0, (proposal,)), 0.0)
        return found

    def _commit(self, num_verified: int, num_right: int) -> None:
        committed = (RIGHT,) * (num_right + 1)
        base_len = len(self.sequence.token_ids)
        self.sequence.token_ids.extend(committed)
        self.draft.judge(committed)
        drafter = self.draft.judged and self.draft.judged[0].drafter
        self._drafters.publish([self.sequence], 0.0)
        commit = Commit("r", base_len, committed, num_verified, num_right, drafter)
        self._drafters.learn([(self.sequence, commit)], 0.0)
        self._drafters.offer_free(self.sequence)

    def _new_request(self) -> LiveSequence:
        sampling = SamplingParams(max_tokens=8000, grammar=Grammar(GrammarKind.REGEX, "5*"))
        sequence = self._sequences.add(Request("r", (1, 2), sampling, 0.0))
        self._drafters.assign(sequence)
        self._drafters.set_budgets({"r": DraftTerms(3)})
        sequence.draft.follow(self.grammar, drafts=True)
        self._drafters.offer_free(sequence)
        return sequence


def test_forced_tokens_are_proposed_until_they_prove_wrong_and_when_right_again() -> None:
    rounds = Rounds(Forcing())
    assert rounds.play(20)[FORCED] == 20
    rounds.grammar.is_right = False
    rounds.play(150)
    assert rounds.play(20) == {"d": 20}
    rounds.grammar.is_right = True
    rounds.play(300)
    assert rounds.play(20) == {FORCED: 20}


def test_a_drafter_that_answers_later_is_waited_for_where_forced_tokens_prove_wrong() -> None:
    rounds = Rounds(Forcing(is_right=False))
    rounds.play(150, in_time=False)
    assert rounds.draft.awaiting_since_s is not None
    assert rounds.play(20, in_time=False) == {"d": 20}


def test_what_is_learned_under_one_kind_of_grammar_does_not_count_under_another() -> None:
    rounds = Rounds(Forcing(is_right=False))
    rounds.play(150)
    (forced, _), known = rounds.draft.passed_over[0], rounds.telemetry.drafter(FORCED)
    assert sum(known.survival_under(GrammarKind.REGEX, forced.confidences)) < 1.0
    assert sum(known.survival_under(GrammarKind.EBNF, forced.confidences)) > 6.0
    assert not known.calibration.num_records
    assert not rounds.telemetry.drafter("d").calibration.num_records


@pytest.mark.parametrize("num", [1, MAX_DRAFT_LEN, MAX_DRAFT_LEN + 1, 300])
def test_a_text_of_any_length_is_proposed_as_far_as_a_proposal_may_go(num: int) -> None:
    rounds = Rounds(Forcing(num=num))
    proposal = rounds.draft.proposal
    assert proposal is not None
    assert len(proposal.token_ids) == len(proposal.confidences) == min(num, MAX_DRAFT_LEN)
    rounds.play(3)
