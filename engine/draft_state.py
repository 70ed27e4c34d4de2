"""The drafting state of one request: its chain, the awaited proposal, the present one, and the last judgement."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from cluster.sampling_params import GrammarKind
from cluster.types import FORCED, FREE_DRAFTERS, MAX_DRAFT_LEN, NO_DRAFTS, PREDICTION, DraftTerms, Proposal
from engine.acceptance import common_prefix_len, judge
from engine.predicted_output import PredictedOutput
from router.assignment import Chain
from router.estimates.drafter_stats import Judgement
from router.estimates.survival import SurvivalRows

if TYPE_CHECKING:
    from engine.grammar.state import GrammarState

# Commits whose time is kept. The reply to an older one does not count in its drafter's reply time.
MAX_AWAITED = 8

# Of a forced token, until it is calibrated: its text is certain, how the model splits it is not.
FORCED_CONFIDENCE = 0.95
LAST_CONFIDENCE = 0.7  # the model may write the next text in one token with it

Candidate = tuple[Proposal, tuple[float, ...]]  # a proposal and its calibrated survival


@dataclass(slots=True, eq=False)
class DraftState:
    """All writes go through the methods; the fields may be read. ``token_ids``: the committed tokens, shared with the
    sequence, which extends them."""

    token_ids: list[int]
    prompt_len: int
    chain: Chain = ()  # of pool members, nearest to the target last
    drafter: str | None = None  # the last of the chain, which follows the request
    budget: DraftTerms = NO_DRAFTS  # by the last plan
    awaiting_since_s: float | None = None  # when the drafter was sent the newest commit; None: no proposal is awaited
    committed_s: float = 0.0  # when the drafter was last sent a commit, queried or not
    is_displaced: bool = False  # a free draft is verified in place of the drafter's, which is asked for none meanwhile
    expects_draft: bool = False  # a drafter followed the request at its last commit, queried or not
    held_since_s: float | None = None  # for its proposal, by the last plan; None: it is not held
    held_until_s: float = 0.0  # at most, by that plan
    proposal: Proposal | None = None  # extends the committed tokens
    # Other proposals at hand, with their survival: those that are expected to bring less. They are judged, too.
    passed_over: list[Candidate] = field(default_factory=list)
    prediction: PredictedOutput | None = None  # of the output, by the caller
    grammar: "GrammarState | None" = None  # of the committed output
    # Of the last pass: whom the request's drafts came from, what they were asked for, and whether a draft was expected;
    # arguments of `acceptance.judge`; and the verdicts on proposals that were passed over.
    asked: tuple[str | None, DraftTerms, bool] = (None, NO_DRAFTS, False)
    judged: tuple[Proposal, tuple[int, ...], int] | None = None
    passed_judgements: tuple[Judgement, ...] = ()
    _drafts: bool = True  # whether forced tokens are proposed
    _num_overtaken: int = 0  # tokens of the present proposal that were committed before it came
    # Calibrated survival of the prefixes of the proposal as it was when this was predicted: () if it is not known, or a row
    # of what was predicted of many proposals together. Of its tokens ``num_behind`` have been committed since.
    _survival: tuple[float, ...] = ()
    survival_rows: SurvivalRows | None = None
    survival_row: int = 0
    num_behind: int = 0
    # Committed lengths, and when the drafter was sent each.
    _sent_s: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=MAX_AWAITED))

    # ---- who drafts, and how far

    def switch(self, chain: Chain) -> bool:
        """Sets a new chain. Returns whether the last drafter changed. The proposal is dropped only then: it does not depend
        on the drafters before the last."""
        drafter = chain[-1] if chain else None
        moved = drafter != self.drafter
        self.chain, self.drafter = chain, drafter
        if moved:
            self.budget, self.is_displaced = NO_DRAFTS, False
            self.proposal = None
            self.passed_over.clear()
            self.expect_nothing()
        return moved

    def set_budget(self, budget: DraftTerms) -> bool:
        """Returns whether it changed."""
        if budget is self.budget or budget == self.budget:
            return False
        self.budget = budget
        if self.is_plain:
            self.expect_nothing()
        return True

    def displace(self, is_displaced: bool) -> bool:
        """Returns whether this changes."""
        changed = is_displaced is not self.is_displaced
        self.is_displaced = is_displaced
        return changed

    @property
    def asked_budget(self) -> DraftTerms:
        """What the drafter is told."""
        return NO_DRAFTS if self.is_displaced else self.budget

    @property
    def is_plain(self) -> bool:
        """Decoded plainly by the last plan: nothing is drafted or awaited, and the drafter keeps in step."""
        return not self.budget.num_tokens

    # ---- waiting

    def expect(self, now_s: float, is_queried: bool) -> None:
        """Called when a drafter follows the newest commit. If it is queried, its proposal is awaited."""
        self.expects_draft = True
        self.committed_s = now_s
        if not is_queried:
            self.awaiting_since_s = None
            return
        self.awaiting_since_s = now_s
        self._sent_s.append((len(self.token_ids), now_s))

    def expect_nothing(self) -> None:
        """The drafter is disconnected, or was not sent the newest commit."""
        self.awaiting_since_s = None
        self.expects_draft = False

    def sent_s(self, base_len: int) -> float | None:
        """When the drafter was sent the commit that ends at ``base_len``; None: unknown."""
        return dict(self._sent_s).get(base_len)

    @property
    def is_held(self) -> bool:
        return self.held_since_s is not None

    def hold(self, now_s: float, until_s: float) -> None:
        """The request is left out of a pass until its proposal comes, or ``until_s``."""
        if self.held_since_s is None:
            self.held_since_s = now_s
        self.held_until_s = until_s

    def end_hold(self, now_s: float) -> float | None:
        """The request is in a pass again. Returns its waiting time if the hold ran out before the proposal came: as planned,
        since a machine that was suspended waited for longer."""
        was_held, self.held_since_s = self.is_held, None
        if not was_held or self.awaiting_since_s is None or self.drafter is None:
            return None
        return min(now_s, self.held_until_s) - self.awaiting_since_s

    def preempt(self) -> None:
        self.held_since_s = None
        self.awaiting_since_s = None

    # ---- proposals

    @property
    def survival(self) -> tuple[float, ...]:
        """Calibrated, of the prefixes of the proposal; (): not known."""
        survival: Sequence[float] = self._survival
        num = self.num_behind
        if self.survival_rows is not None and self.proposal is not None:
            survival = self.survival_rows.lists[self.survival_row][: num + len(self.proposal.token_ids)]
        return tuple([s / max(survival[num - 1], 1e-9) for s in survival[num:]] if num else survival)

    def _know(self, survival: tuple[float, ...]) -> None:
        self._survival, self.survival_rows, self.num_behind = survival, None, 0

    def offer(self, proposal: Proposal) -> bool:
        """Takes a sound proposal (`cluster.message_checks`) of the request's drafter. Returns whether it was taken. A late
        proposal is cut to its uncommitted part if the tokens committed meanwhile agree with it, else refused."""
        if proposal.drafter != self.drafter:
            return False
        lag = len(self.token_ids) - proposal.base_len
        if lag < 0 or proposal.base_len < self.prompt_len:
            return False
        if lag > 0:
            agrees = proposal.token_ids[:lag] == tuple(self.token_ids[proposal.base_len :])
            if self._has_own or not agrees or lag >= len(proposal.token_ids):
                return False
            proposal = _behind(proposal, lag)
        if self.grammar is not None:
            proposal = _up_to(proposal, self.grammar.num_valid(proposal.token_ids))
        if self.passed_over or self.proposal is not None:
            self.passed_over = [one for one in self._candidates if one[0].drafter in FREE_DRAFTERS]
        self.proposal = proposal
        self._num_overtaken = lag
        self._know(())
        self.awaiting_since_s = None
        return True

    def num_right_of(self, proposal: Proposal) -> int | None:
        """Of a late proposal all of which the tokens committed meanwhile have decided: how many of its tokens are right.
        None: some are still ahead, or it is not late."""
        lag = len(self.token_ids) - proposal.base_len
        if lag <= 0 or proposal.base_len < self.prompt_len:
            return None
        num_right = common_prefix_len(proposal.token_ids, self.token_ids[proposal.base_len :])
        return num_right if num_right < lag or num_right == len(proposal.token_ids) else None

    def set_survival(self, survival: tuple[float, ...]) -> None:
        """Sets the calibrated survival of the proposal just taken. A free draft stays where more is expected of it."""
        self._know(survival)
        if self.passed_over:
            self._choose(0.0)

    def set_survival_row(self, rows: SurvivalRows, row: int) -> None:
        """As ``set_survival``, where no other draft is at hand."""
        self.survival_rows, self.survival_row = rows, row  # of a proposal that was taken just now

    # ---- free drafts: what the grammar forces, and what the caller predicted

    def follow(self, grammar: "GrammarState", drafts: bool) -> None:
        """Proposals are cut to what the grammar allows, and what it forces may be proposed, if ``drafts``."""
        self.grammar, self._drafts = grammar, drafts

    @property
    def has_free_drafts(self) -> bool:
        """Whether there may be some."""
        return self.grammar is not None or self.prediction is not None

    @property
    def grammar_kind(self) -> GrammarKind | None:
        return None if self.grammar is None else self.grammar.kind

    def free_drafts(self, request_id: str) -> list[Proposal]:
        """Those that are not empty, as far as one proposal may go."""
        base_len, found = len(self.token_ids), []
        if self.grammar is not None and self._drafts and (forced := tuple(self.grammar.forced()[:MAX_DRAFT_LEN])):
            confidences = (*[FORCED_CONFIDENCE] * (len(forced) - 1), LAST_CONFIDENCE)
            found.append(Proposal(request_id, base_len, forced, confidences, FORCED))
        if self.prediction is not None:
            predicted, confidences = self.prediction.draft()
            num = len(predicted) if self.grammar is None else self.grammar.num_valid(predicted)
            if num:
                found.append(Proposal(request_id, base_len, predicted[:num], confidences[:num], PREDICTION))
        return found

    def offer_free(self, drafts: Sequence[Candidate], awaited_len: float) -> None:
        """Proposes one of these free drafts, which replace former ones, unless more is expected of the drafter's proposal.
        ``awaited_len``: tokens that are expected of the drafter's, while it is awaited."""
        own = [one for one in self._candidates if one[0].drafter not in FREE_DRAFTERS]
        self.proposal, survival = own[0] if own else (None, ())
        self._know(survival)
        self.passed_over = [*drafts]
        self._choose(awaited_len if self.proposal is None and self.awaiting_since_s is not None else 0.0)
        if self.proposal is not None and self.proposal.drafter in FREE_DRAFTERS:
            self.awaiting_since_s = None

    @property
    def _has_own(self) -> bool:
        """Whether a proposal of the drafter is at hand."""
        return any(one.drafter not in FREE_DRAFTERS for one, _ in self._candidates)

    @property
    def _candidates(self) -> list[Candidate]:
        """All proposals at hand."""
        return ([] if self.proposal is None else [(self.proposal, self.survival)]) + self.passed_over

    def _choose(self, least_len: float) -> None:
        """Proposes what most tokens are expected of, if those are at least ``least_len``."""
        candidates = self._candidates
        best = max(candidates, key=lambda one: sum(one[1]), default=None)
        if best is None or best[0] is self.proposal or sum(best[1]) < least_len:
            return
        self.proposal = best[0]
        self._know(best[1])
        self.passed_over = [one for one in candidates if one is not best]
        self._num_overtaken = 0

    def judge(self, committed: tuple[int, ...]) -> None:
        """Compares the present proposal with the tokens committed by a pass, none if that failed, and keeps its uncommitted
        part."""
        self.asked = self.drafter, self.budget, self.expects_draft
        if self.passed_over or self.passed_judgements or self.grammar is not None or self.prediction is not None:
            self._judge_others(committed)
        proposal = self.proposal
        if proposal is None or not committed:
            self.proposal = self.judged = None
            return
        self.judged = proposal, committed, self._num_overtaken
        self._num_overtaken = 0
        num, token_ids = len(committed), proposal.token_ids
        # Most drafts end with a token that differs: the last committed one.
        if num < len(token_ids) and token_ids[num - 1] == committed[-1] and token_ids[:num] == committed:
            self.proposal = _behind(proposal, num)
            self.num_behind += num
        else:
            self.proposal = None

    def _judge_others(self, committed: tuple[int, ...]) -> None:
        """As ``judge``, of free drafts and of proposals that were passed over."""
        if self.grammar is not None:
            self.grammar.advance(committed)
        if self.prediction is not None:
            self.prediction.advance(committed)
        passed, self.passed_over = self.passed_over, []
        self.passed_judgements = tuple([judge(one, committed) for one, _ in passed]) if committed else ()

    def forget_judged(self) -> None:
        self.judged = None

    @property
    def judgement(self) -> Judgement | None:
        """Of the proposal that was at hand in the last pass. Computed when it is asked for."""
        return None if self.judged is None else judge(*self.judged)


def _up_to(proposal: Proposal, num_tokens: int) -> Proposal:
    if num_tokens == len(proposal.token_ids):
        return proposal
    return replace(
        proposal, token_ids=proposal.token_ids[:num_tokens], confidences=proposal.confidences[:num_tokens], unfinished=False
    )


def _behind(proposal: Proposal, num_tokens: int) -> Proposal:
    return Proposal(
        proposal.request_id,
        proposal.base_len + num_tokens,
        proposal.token_ids[num_tokens:],
        proposal.confidences[num_tokens:],
        proposal.drafter,
        proposal.unfinished,
    )
