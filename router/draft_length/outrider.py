"""The default: a request is drafted for while that pays, and each draft goes on while its next token does.

The target sets prices; the drafter, which knows its confidences, decides at each step (`router/draft_stopping.py`).
A request for which nothing pays gets a budget of 0 tokens and is decoded plainly, until prices fall or a trial is due. Where
a drafter pays for no request, one request at a time tries it, or its reply time would never be measured again.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

from cluster.types import StopRule
from router.draft_length.base import BatchState, DraftLengths, PassFeedback
from router.draft_length.prices import QuotedPrice
from router.estimates.decayed import DecayedMean
from router.estimates.exploration import Pause
from router.plan import NO_DRAFTS, UNKNOWN_DRAFTER, DraftBudget, DrafterView, SequenceView

_SHARE = 0.25  # quoted prices of time stay while the true ones are so near
_LEAST_PER_S = 0.5  # tokens per second
_LEAST_WAIT = 1 / 64  # tokens
_MEMORY = 64.0  # draft tokens of a request that count
_PRIOR_TOKENS = 8.0  # draft tokens that the acceptance of its drafter counts for
_FIRST_DRAFTS = 4  # judged drafts of a request at any price that could pay
_TRIAL_DRAFTS = 4
_TRIAL_TOKENS = 16.0  # what was learned of a request before a trial counts for no more draft tokens than that
_TRIAL_ROUNDS = 8  # in which one request tries a drafter that pays for none
_RESUME = 1.1  # a request resumes where its acceptance exceeds the break-even so far
_STEPS = 20  # of bisection
_SLACK = 256  # requests that may be remembered beyond twice the live ones


@dataclass(slots=True)
class _Request:
    """What is known of a request with its drafter."""

    drafter: str
    acceptance: DecayedMean = field(default_factory=DecayedMean)  # of its draft tokens
    num_drafts_left: int = _FIRST_DRAFTS  # before it may be paused
    pause: Pause = field(default_factory=Pause)

    def begin_trial(self) -> None:
        self.acceptance.fade(_TRIAL_TOKENS)
        self.num_drafts_left = _TRIAL_DRAFTS


class _Terms:
    """What one drafter is told, and the acceptance from which on it pays."""

    def __init__(self) -> None:
        self.usual = UNKNOWN_DRAFTER.acceptance
        self.least_acceptance = 0.0
        self.drafting = self.plain = NO_DRAFTS
        self._second_price = QuotedPrice(_SHARE, _LEAST_PER_S)
        self._wait = QuotedPrice(_SHARE, _LEAST_WAIT)
        self._row_price = 0.0
        self._pause = Pause()
        self._num_trial_rounds_left = 0

    @property
    def pays(self) -> bool:
        """For a request whose draft tokens are all accepted."""
        return self.least_acceptance <= 1.0

    def tries(self) -> bool:
        """Whether one request tries a drafter that does not pay. Once a round."""
        if self._num_trial_rounds_left:
            self._num_trial_rounds_left -= 1
            return True
        if self._pause.count_round():
            self._num_trial_rounds_left = _TRIAL_ROUNDS - 1
            return True
        return False

    def follow(self, view: DrafterView, row_price: float, per_second: float, max_len: int) -> bool:
        """``per_second``: tokens that one request is decoded in a second. Returns whether the break-even may have moved."""
        self.usual = view.acceptance
        second_changed = self._second_price.follow(view.exposure * per_second)
        wait_changed = self._wait.follow(view.exposure * view.reply_s * per_second)
        changed = wait_changed or row_price != self._row_price or self.drafting is NO_DRAFTS
        if changed:
            self._row_price = row_price
            self.least_acceptance = break_even_acceptance(row_price, self._wait.value, max_len)
            if self.pays:
                self._pause.reset()
                self._num_trial_rounds_left = 0
        if changed or second_changed:
            stop = StopRule(second_price=self._second_price.value)
            self.drafting, self.plain = DraftBudget(max_len, row_price, stop), DraftBudget(0, row_price, stop)
        return changed


class Outrider(DraftLengths):
    """``max_lens`` as of the base."""

    def __init__(self, max_lens: Mapping[str, int] | None = None) -> None:
        super().__init__(max_lens)
        self._requests: dict[str, _Request] = {}
        self._paused: set[str] = set()
        self._terms: dict[str, _Terms] = {}
        self._moved: set[str] = set()  # drafters whose break-even moved in this round
        self._tried: set[str] = set()  # drafters that one request tries in this round
        self._per_second = 0.0  # tokens that one request is decoded

    def budgets(self, sequences: Iterable[SequenceView], batch: BatchState) -> dict[str, DraftBudget]:
        sequences = list(sequences)
        num_decoding = len([None for s in sequences if s.running])
        self._per_second = (batch.tokens_per_s or 0.0) / max(1, num_decoding)
        self._moved.clear()
        self._tried.clear()
        budgets = super().budgets(sequences, batch)
        if self._moved:
            for request_id, known in self._requests.items():
                if known.drafter in self._moved:
                    self._reconsider(request_id, known, self._terms[known.drafter])
        if len(self._requests) > 2 * len(sequences) + _SLACK:  # some were aborted
            live = {sequence.request_id for sequence in sequences}
            self._requests = {key: one for key, one in self._requests.items() if key in live}
            self._paused &= live
        for sequence in sequences if self._paused else ():
            if sequence.request_id in self._paused and sequence.drafter is not None:
                self._decide_paused(sequence.request_id, sequence.drafter, budgets)
        for sequence in sequences if self._tried else ():
            if sequence.drafter in self._tried and sequence.running and sequence.max_new_tokens > 1:
                self._tried.discard(sequence.drafter)
                budgets[sequence.request_id] = self._terms[sequence.drafter].drafting
        return budgets

    def budget_of(self, drafter: str, batch: BatchState) -> DraftBudget:
        terms = self._terms.setdefault(drafter, _Terms())
        view = batch.drafters.get(drafter, UNKNOWN_DRAFTER)
        if terms.follow(view, self.row_price, self._per_second, self.max_len(drafter)):
            self._moved.add(drafter)
        if terms.pays:
            return terms.drafting
        if terms.tries():
            self._tried.add(drafter)
        return terms.plain

    def learn(self, feedback: PassFeedback) -> None:
        all_terms, requests = self._terms, self._requests
        for request_id, judgement in feedback.judgements.items():
            drafter, num_right, num_judged = judgement.drafter, judgement.num_right, len(judgement.confidences)
            terms = all_terms.get(drafter)
            if terms is None or not num_judged:
                continue
            known = requests.get(request_id)
            if known is None or known.drafter != drafter:
                known = requests[request_id] = _Request(drafter)
                self._paused.discard(request_id)
            acceptance = known.acceptance
            acceptance.add_all(num_right, num_right + (num_right < num_judged), _MEMORY)
            num_left = known.num_drafts_left
            if num_left:
                known.num_drafts_left = num_left - 1
            # Its shrunk acceptance lies between its own and its drafter's.
            least = terms.least_acceptance
            if num_left == 1 or (not num_left and (acceptance.value < least or terms.usual < least)):
                self._reconsider(request_id, known, terms)
        for commit in feedback.commits:
            if commit.finish is not None:
                self._requests.pop(commit.request_id, None)
                self._paused.discard(commit.request_id)

    def _reconsider(self, request_id: str, known: _Request, terms: _Terms) -> None:
        """Pauses or resumes a request by what is known of it."""
        acceptance = known.acceptance.shrunk(terms.usual, _PRIOR_TOKENS)
        if request_id in self._paused:
            if acceptance > _RESUME * terms.least_acceptance:
                self._paused.discard(request_id)
                known.pause.reset()
        elif not known.num_drafts_left:
            if acceptance < terms.least_acceptance:
                self._paused.add(request_id)
            else:
                known.pause.reset()

    def _decide_paused(self, request_id: str, drafter: str, budgets: dict[str, DraftBudget]) -> None:
        known, terms = self._requests[request_id], self._terms[drafter]
        if known.drafter != drafter:  # it was handed over: nothing is known of it there
            del self._requests[request_id]
            self._paused.discard(request_id)
        elif known.pause.count_round():
            known.begin_trial()
            self._paused.discard(request_id)
        else:
            budgets[request_id] = terms.plain


def break_even_acceptance(row_price: float, wait: float, max_len: int) -> float:
    """The acceptance a of a draft token above which drafting gains: sum over k = 1 .. ``max_len`` of max(0, a^k - row price)
    exceeds ``wait``, the tokens that the request could be decoded while it waits for drafts. Above 1: none does."""

    def gain(acceptance: float) -> float:
        survival, total = 1.0, 0.0
        for _ in range(max_len):
            survival *= acceptance
            if survival <= row_price:
                break
            total += survival - row_price
        return total

    if gain(1.0) <= wait:
        return inf
    low, high = 0.0, 1.0
    for _ in range(_STEPS if row_price or wait else 0):
        middle = (low + high) / 2
        low, high = (low, middle) if gain(middle) > wait else (middle, high)
    return low
