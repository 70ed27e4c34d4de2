"""The default: a request is drafted for while that pays, and each draft goes on while its next token does.

The target sets prices; the drafter, which knows its confidences, decides at each step (`router/drafting/stopping.py`).

- A batch of drafts costs the wait of all requests for it. A drafter whose drafts gain less, at the best length, gets budgets
  of 0 tokens: its requests are decoded plainly. One at a time tries it, or its reply time would never be measured again.
- A request that joins a batch which is drafted anyway costs its rows, and what it adds to the time of the batch. One whose
  acceptance is not worth that gets a budget of 0 tokens, until prices fall or a trial is due. Where it adds no time none
  does: rows that are not worth their price are neither proposed nor verified.
- Objectives weigh row prices, and bound the drafts that a pass waits for (`router/drafting/length_objectives.py`).
- Whether drafters on the target's device pay is decided by their gate (`break_even.py`) and, in a cascade, for
  each expensive member, not here. Their drafts are as long as gains most, by the profiled time of a batch of drafts.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf

from cluster.types import NO_DRAFTS, PRICE_SHARE, DraftTerms
from router.assignment import drafter_of
from router.cost_model import TableCost
from router.drafting.length import BatchState, DraftLengths, PassFeedback, decoding
from router.drafting.length_objectives import longest_draft, weighted
from router.drafting.overlap_gains import expected_tokens
from router.drafting.prices import QuotedPrice
from router.estimates.decayed import DecayedMean
from router.estimates.trial import Pause
from router.plan import UNKNOWN_DRAFTER, DrafterView, SequenceView
from router.planning.slo import NO_LIMITS

_SHARE = 0.1  # quoted prices of time stay while the true ones are so near
_LEAST_PER_S = 0.5  # tokens per second
_LEAST_JOIN = 1 / 64  # tokens
_PRIOR_TOKENS = 8.0  # draft tokens that the acceptance of its drafter counts for
_FIRST_DRAFTS = 4  # judged drafts of a request at any price that could pay
_TRIAL_DRAFTS = 4
_TRIAL_TOKENS = 16.0  # what was learned of a request before a trial counts for no more draft tokens than that
_TRIAL_ROUNDS = 8  # in which one request tries a drafter that pays for none
_RESUME = 1.1  # a request resumes where its acceptance exceeds the break-even so far
_RETAIN = 0.9  # share of its price that a drafter in use must gain
_PRECISION = 1e-6  # of a break-even acceptance
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
    """What one drafter is told, whether it pays, and the acceptance from which on a request joins its batch."""

    def __init__(self) -> None:
        self.usual = UNKNOWN_DRAFTER.acceptance
        self.least_acceptance = 0.0
        self.pays = True
        self.drafting = self.plain = NO_DRAFTS
        self._second_price = QuotedPrice(_SHARE, _LEAST_PER_S)
        self._join = QuotedPrice(_SHARE, _LEAST_JOIN)
        self._row_price = 0.0
        self._pause = Pause()
        self._num_trial_rounds_left = 0

    def tries(self) -> bool:
        """Whether one request tries a drafter that does not pay. Once a round."""
        if self._num_trial_rounds_left:
            self._num_trial_rounds_left -= 1
            return True
        if self._pause.count_round():
            self._num_trial_rounds_left = _TRIAL_ROUNDS - 1
            return True
        return False

    def follow(self, times: "_DraftTimes", row_price: float, tokens_per_s: float) -> bool:
        """``tokens_per_s``: decoded while drafts are waited for. Returns whether the break-even may have moved."""
        self.usual = times.view.acceptance
        self._row_price, former = row_price, self._row_price
        second_changed = self._second_price.follow(tokens_per_s / times.num_requests)
        changed = self._join.follow(times.request_s * tokens_per_s) or row_price != former or self.drafting is NO_DRAFTS
        if changed:
            join = self._join.value
            self.least_acceptance = break_even_acceptance(row_price, join, times.max_len) if join else 0.0
        second_price = tokens_per_s / times.num_requests
        self.pays = not tokens_per_s or times.pay(self.usual, second_price * (_RETAIN if self.pays else 1.0))
        if self.pays:
            self._pause.reset()
            self._num_trial_rounds_left = 0
        if changed or second_changed:
            prices = row_price, self._second_price.value
            self.drafting, self.plain = DraftTerms(times.max_len, *prices), DraftTerms(0, *prices)
        if times.view.shares_device:
            longest = times.best_len(self.usual, row_price)
            if longest != self.drafting.num_tokens:
                self.drafting = replace(self.drafting, num_tokens=longest)
        return changed


class _DraftTimes:
    """Times of a drafter's batches of drafts for ``num_requests``: profiled, else as measured.

    Args:
        table: of a pass over one micro-batch of the requests.
    """

    def __init__(
        self,
        drafter: str,
        view: DrafterView,
        num_requests: int,
        table: TableCost,
        max_len: int,
        batch: BatchState,
    ) -> None:
        self.view = view
        self.num_requests = num_requests
        self.max_len = max_len
        self._name, self._cost = drafter_of(drafter), batch.cost
        self._usual_len = view.draft_len or max_len
        self._table = table
        self._num_passes = batch.num_micro_batches
        self._tokens_per_s = batch.tokens_per_s or 0.0

    def batch_s(self, length: int) -> float:
        """Drafts of so many tokens each. Without a profile proportional to the length, as in TurboSpec."""
        profiled_s = self._cost.draft_s(self._name, self.num_requests, length)
        if profiled_s is not None:
            return profiled_s
        return (self.view.drafts_s(self.num_requests) or self.view.reply_s) * length / self._usual_len

    def pay(self, acceptance: float, second_price: float) -> bool:
        """Whether drafts of any length, for all requests, gain more than the wait for them costs.

        A pass verifies as many of the draft tokens as gains most: the sum over the likeliest k of a^i, less the tokens that
        could be decoded in the time that k rows add. At the price of a row they might gain nothing: at a knee of the cost,
        where rows are scarce, those before it are worth more than they cost.
        """
        num, table = -(-self.num_requests // self._num_passes), self._table
        start, plain_s = num, table.at(num)
        survivals, best = 0.0, 0.0
        for length in range(1, self.max_len + 1):
            survival, end = acceptance**length, start + num
            # The gain is linear between the table's points, so that the most is at one of them or at an end.
            for rows in (*table.rows[bisect_right(table.rows, start) : bisect_left(table.rows, end)], end):
                lost = self._tokens_per_s * (table.at(rows) - plain_s)
                best = max(best, survivals + survival * (rows - start) - lost)
            if best > num * second_price * self.batch_s(length):
                return True
            survivals, start = survivals + survival * num, end
        return False

    def best_len(self, acceptance: float, row_price: float) -> int:
        """The length at which drafts for all requests gain most, all of whom wait for the longest; at least 1. Without a
        profile the longest: what one token more takes is not known.

        Profiled times count by the share of them that was measured: a cascade is profiled as its most expensive member,
        which it may query seldom.
        """
        usual_s = self._cost.draft_s(self._name, self.num_requests, max(1, round(self._usual_len)))
        if not usual_s:
            return self.max_len
        share = min(1.0, (self.view.drafts_s(self.num_requests) or usual_s) / usual_s)
        tokens_per_s = share * self._tokens_per_s
        gains = accumulate(max(0.0, acceptance**k - PRICE_SHARE * row_price) for k in range(1, self.max_len + 1))
        nets = [self.num_requests * gain - tokens_per_s * self.batch_s(k) for k, gain in enumerate(gains, 1)]
        return 1 + nets.index(max(nets))

    @property
    def request_s(self) -> float:
        """What one request more adds."""
        length = max(1, round(self._usual_len))
        more_s = self._cost.draft_s(self._name, self.num_requests + 1, length)
        return self.view.request_s if more_s is None else max(0.0, more_s - self.batch_s(length))


class Outrider(DraftLengths):
    """``max_lens`` as of the base."""

    def __init__(self, max_lens: Mapping[str, int] | None = None) -> None:
        super().__init__(max_lens)
        self._requests: dict[str, _Request] = {}
        self._paused: set[str] = set()
        self._terms: dict[str, _Terms] = {}
        self._moved: set[str] = set()  # drafters whose break-even moved in this round
        self._tried: set[str] = set()  # drafters that one request tries in this round
        self._tokens_per_s, self._num_decoding, self._num_context = 0.0, 1, 0
        self._table: TableCost | None = None  # of this round

    def budgets(self, sequences: Iterable[SequenceView], batch: BatchState) -> dict[str, DraftTerms]:
        sequences = list(sequences)
        ready = decoding(sequences)
        self._num_decoding, self._num_context = max(1, len(ready)), sum([one.committed_len for one in ready])
        self._tokens_per_s, self._table = batch.tokens_per_s or 0.0, None
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
        return budgets if batch.limits is NO_LIMITS else self._by_objectives(ready, batch, budgets)

    def _by_objectives(
        self, ready: Sequence[SequenceView], batch: BatchState, budgets: dict[str, DraftTerms]
    ) -> dict[str, DraftTerms]:
        names = {sequence.request_id: sequence.drafter for sequence in ready if sequence.drafter is not None}

        def acceptance_of(request_id: str) -> float:
            return self._acceptance(request_id, names[request_id]) if request_id in names else 0.0

        longest = {}
        for drafter in set(names.values()) if batch.limits.streams and batch.num_micro_batches == 1 else ():
            view = batch.drafters.get(drafter, UNKNOWN_DRAFTER)
            times = self._times(drafter, view, batch)

            def round_s(length: int, times: _DraftTimes = times) -> float:
                num_accepted = len(names) * (expected_tokens(times.view.acceptance, length) - 1.0)
                pass_s = batch.cost.step_s(len(ready) + round(num_accepted), self._num_context)
                return pass_s + times.batch_s(length) if length else pass_s

            longest[drafter] = longest_draft(batch.limits.streams, acceptance_of, round_s, times.max_len)
        drafted = [sequence for sequence in ready if sequence.request_id in names]
        return weighted(budgets, drafted, batch.limits.weights, longest)

    def _acceptance(self, request_id: str, drafter: str) -> float:
        """Of its draft tokens, as far as it is known."""
        usual, known = self._terms[drafter].usual, self._requests.get(request_id)
        return usual if known is None or known.drafter != drafter else known.acceptance.shrunk(usual, _PRIOR_TOKENS)

    def budget_of(self, drafter: str, batch: BatchState) -> DraftTerms:
        terms = self._terms.setdefault(drafter, _Terms())
        view = batch.drafters.get(drafter, UNKNOWN_DRAFTER)
        times = self._times(drafter, view, batch)
        exposure = 0.0 if view.shares_device else view.exposure if batch.num_micro_batches > 1 else 1.0
        if terms.follow(times, self.row_price, exposure * self._tokens_per_s):
            self._moved.add(drafter)
        if terms.pays:
            return terms.drafting
        if terms.tries():
            self._tried.add(drafter)
        return terms.plain

    def _times(self, drafter: str, view: DrafterView, batch: BatchState) -> _DraftTimes:
        if self._table is None:
            self._table = batch.cost.table(self._num_context // batch.num_micro_batches)
        return _DraftTimes(drafter, view, self._num_decoding, self._table, self.max_len(drafter), batch)

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
            acceptance.add_all(num_right, num_right + (num_right < num_judged))
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

    def _decide_paused(self, request_id: str, drafter: str, budgets: dict[str, DraftTerms]) -> None:
        known, terms = self._requests[request_id], self._terms[drafter]
        if known.drafter != drafter:  # it was handed over: nothing is known of it there
            del self._requests[request_id]
            self._paused.discard(request_id)
        elif known.pause.count_round():
            known.begin_trial()
            self._paused.discard(request_id)
        else:
            budgets[request_id] = terms.plain


def break_even_acceptance(row_price: float, price: float, max_len: int) -> float:
    """The acceptance a of a draft token above which drafting gains: sum over k = 1 .. ``max_len`` of max(0, a^k - row price)
    exceeds ``price``, in tokens. Above 1: none does."""
    if max_len * (1.0 - row_price) <= price:
        return inf
    if price <= _PRECISION:
        return row_price
    # The sum is convex and rises with a, so that Newton's method descends to the root from above.
    acceptance = 1.0
    while True:
        survival, gain, slope = 1.0, 0.0, 0.0
        for k in range(1, max_len + 1):
            slope_k, survival = k * survival, survival * acceptance
            if survival <= row_price:
                break
            gain += survival - row_price
            slope += slope_k
        step = (gain - price) / slope
        acceptance -= step
        if step < _PRECISION:
            return acceptance
