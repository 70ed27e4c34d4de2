"""The default: a request is drafted for while that pays, and each draft goes on while its next token does.

The target sets prices; the drafter, which knows its confidences, decides at each step (`router/drafting/stopping.py`).

- A batch of drafts costs the wait of all requests for it. A drafter whose drafts gain less, at the best length, gets budgets
  of 0 tokens: its requests are decoded plainly. One at a time tries it, or its reply time would never be measured again.
- A request that joins a batch which is drafted anyway costs its rows, and what it adds to the time of the batch. One whose
  acceptance is not worth that gets a budget of 0 tokens, until prices fall or a trial is due. Where it adds no time none
  does: rows that are not worth their price are neither proposed nor verified.
- A row of a request that falls behind its objective costs it less, by its weight, and costs the others more: rows cost what
  they did on average. No draft makes a round that awaits it longer than every stream can bear for the tokens it commits.
- Whether drafters on the target's device pay is decided by their gate (`break_even.py`) and, in a cascade, for
  each expensive member, not here. Their drafts are as long as gains most, by the profiled time of a batch of drafts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

from cluster.types import NO_DRAFTS, DraftTerms
from router.drafting.length import DraftLengths, PassFeedback, decoding
from router.drafting.value import DraftingValue, QuotedPrice, break_even_acceptance, expected_tokens
from router.estimates.decayed import DecayedMean
from router.estimates.trial import Exploration
from router.plan import UNKNOWN_DRAFTER, SequenceView
from router.planning.slo import NO_LIMITS, Stream

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
_WEIGHT_STEPS = 4  # in each unit of a weight: a row price that changes is a message
_SLACK = 256  # requests that may be remembered beyond twice the live ones


@dataclass(slots=True)
class _Request:
    """What is known of a request with its drafter."""

    drafter: str
    acceptance: DecayedMean = field(default_factory=DecayedMean)  # of its draft tokens
    num_drafts_left: int = _FIRST_DRAFTS  # before it may be paused
    exploration: Exploration = field(default_factory=Exploration)

    def begin_trial(self) -> None:
        self.acceptance.fade(_TRIAL_TOKENS)
        self.num_drafts_left = _TRIAL_DRAFTS


class _Drafter:
    """What one drafter is told, whether it pays, and the acceptance from which on a request joins its batch."""

    def __init__(self) -> None:
        self.usual = UNKNOWN_DRAFTER.acceptance
        self.least_acceptance = 0.0
        self.pays = True
        self.drafting = self.plain = NO_DRAFTS
        self._second_price = QuotedPrice(_SHARE, _LEAST_PER_S)
        self._join = QuotedPrice(_SHARE, _LEAST_JOIN)
        self._exploration = Exploration(num_rounds=_TRIAL_ROUNDS)
        self._loss = 0.0  # rounds that a trial of this drafter loses
        self.request_loss = 0.0  # and one of a request that does not join

    def follow(self, name: str, value: DraftingValue, num_requests: int, num_context: int, most: DraftTerms) -> bool:
        """``most``: the longest draft, and the row price as quoted. Returns whether the break-even may have moved."""
        rate, row_price, max_len = value.waiting_rate(name), most.row_price, most.num_tokens
        self.usual = value.view(name).acceptance
        second_changed = self._second_price.follow(rate / num_requests)
        join = value.request_s(name, num_requests) * rate if rate else 0.0
        changed = self._join.follow(join) or row_price != self.plain.row_price or self.drafting is NO_DRAFTS
        if changed:
            join = self._join.value
            self.least_acceptance = break_even_acceptance(row_price, join, max_len) if join else 0.0
            self.request_loss = _TRIAL_DRAFTS * join
        if changed or second_changed:
            self.drafting = replace(most, second_price=self._second_price.value)
            self.plain = replace(self.drafting, num_tokens=0)
        self.pays = value.pays(name, num_requests, num_context, max_len, _RETAIN if self.pays else 1.0)
        if self.pays:
            self._exploration.reset()
        else:
            self._loss = _TRIAL_ROUNDS * rate * value.draft_s(name, 1, max_len) / num_requests
        if value.view(name).shares_device:
            longest = value.best_len(name, num_requests, max_len, row_price)
            if longest != self.drafting.num_tokens:
                self.drafting = replace(self.drafting, num_tokens=longest)
        return changed

    def tries(self) -> bool:
        """Whether one request tries a drafter that does not pay. Once a round."""
        return self._exploration.tries(self._loss)


class Outrider(DraftLengths):
    """``max_lens`` as of the base."""

    def __init__(self, max_lens: Mapping[str, int] | None = None) -> None:
        super().__init__(max_lens)
        self._requests: dict[str, _Request] = {}
        self._paused: set[str] = set()
        self._drafters: dict[str, _Drafter] = {}
        self._moved: set[str] = set()  # drafters whose break-even moved in this round
        self._tried: set[str] = set()  # drafters that one request tries in this round
        self._num_decoding, self._num_context = 1, 0

    def budgets(self, sequences: Iterable[SequenceView], value: DraftingValue) -> dict[str, DraftTerms]:
        sequences = list(sequences)
        ready = decoding(sequences)
        self._num_decoding, self._num_context = max(1, len(ready)), sum([one.committed_len for one in ready])
        self._moved.clear()
        self._tried.clear()
        budgets = super().budgets(sequences, value)
        if self._moved:
            for request_id, known in self._requests.items():
                if known.drafter in self._moved:
                    self._reconsider(request_id, known, self._drafters[known.drafter])
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
                budgets[sequence.request_id] = self._drafters[sequence.drafter].drafting
        return budgets if value.limits is NO_LIMITS else self._by_objectives(ready, value, budgets)

    def _by_objectives(
        self, ready: Sequence[SequenceView], value: DraftingValue, budgets: dict[str, DraftTerms]
    ) -> dict[str, DraftTerms]:
        names = {sequence.request_id: sequence.drafter for sequence in ready if sequence.drafter is not None}

        def acceptance_of(request_id: str) -> float:
            return self._acceptance(request_id, names[request_id]) if request_id in names else 0.0

        longest = {}
        for drafter in set(names.values()) if value.limits.streams and value.num_micro_batches == 1 else ():
            round_s = partial(value.round_s, drafter, len(ready), len(names), self._num_context)
            longest[drafter] = longest_draft(value.limits.streams, acceptance_of, round_s, self.max_len(drafter))
        drafted = [sequence for sequence in ready if sequence.request_id in names]
        return weighted(budgets, drafted, value.limits.weights, longest)

    def _acceptance(self, request_id: str, drafter: str) -> float:
        """Of its draft tokens, as far as it is known."""
        usual, known = self._drafters[drafter].usual, self._requests.get(request_id)
        return usual if known is None or known.drafter != drafter else known.acceptance.shrunk(usual, _PRIOR_TOKENS)

    def budget_of(self, drafter: str, value: DraftingValue) -> DraftTerms:
        known = self._drafters.get(drafter)
        if known is None:
            known = self._drafters[drafter] = _Drafter()
        if known.follow(drafter, value, self._num_decoding, self._num_context, super().budget_of(drafter, value)):
            self._moved.add(drafter)
        if known.pays:
            return known.drafting
        if known.tries():
            self._tried.add(drafter)
        return known.plain

    def learn(self, feedback: PassFeedback) -> None:
        drafters, requests = self._drafters, self._requests
        for request_id, judgement in feedback.judgements.items():
            drafter, num_right, num_judged = judgement.drafter, judgement.num_right, len(judgement.confidences)
            terms = drafters.get(drafter)
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

    def _reconsider(self, request_id: str, known: _Request, terms: _Drafter) -> None:
        """Pauses or resumes a request by what is known of it."""
        acceptance = known.acceptance.shrunk(terms.usual, _PRIOR_TOKENS)
        if request_id in self._paused:
            if acceptance > _RESUME * terms.least_acceptance:
                self._paused.discard(request_id)
                known.exploration.reset()
        elif not known.num_drafts_left:
            if acceptance < terms.least_acceptance:
                self._paused.add(request_id)
            else:
                known.exploration.reset()

    def _decide_paused(self, request_id: str, drafter: str, budgets: dict[str, DraftTerms]) -> None:
        known, terms = self._requests[request_id], self._drafters[drafter]
        if known.drafter != drafter:  # it was handed over: nothing is known of it there
            del self._requests[request_id]
            self._paused.discard(request_id)
        elif known.exploration.tries(terms.request_loss):
            known.begin_trial()
            self._paused.discard(request_id)
        else:
            budgets[request_id] = terms.plain


def weighted(
    budgets: Mapping[str, DraftTerms],
    drafted: Sequence[SequenceView],
    weights: Mapping[str, float],
    longest: Mapping[str, int],
) -> dict[str, DraftTerms]:
    """Budgets of the decoding requests ``drafted`` by weight and drafter, others as they are. Equal ones are one object.

    Args:
        weights: of requests that fall behind, above 1.
        longest: the most draft tokens of a drafter; others are not limited.
    """
    found = dict(budgets)
    steps = {request_id: round(_WEIGHT_STEPS * weight) for request_id, weight in weights.items()}
    total = sum([steps.get(sequence.request_id, _WEIGHT_STEPS) for sequence in drafted])
    mean = round(total / max(1, len(drafted)))  # in steps, too: else each change would be one of all prices
    for sequence in drafted:
        budget, drafter = budgets[sequence.request_id], sequence.drafter
        if drafter is None or not budget.num_tokens:
            continue
        num_tokens = min(budget.num_tokens, longest.get(drafter, budget.num_tokens))
        weight = steps.get(sequence.request_id, _WEIGHT_STEPS) / mean
        found[sequence.request_id] = _at(budget, weight, num_tokens)
    return found


@lru_cache(1024)
def _at(budget: DraftTerms, weight: float, num_tokens: int) -> DraftTerms:
    return replace(budget, num_tokens=num_tokens, row_price=min(1.0, budget.row_price / weight))


def longest_draft(
    streams: Iterable[Stream], acceptance_of: Callable[[str], float], round_s: Callable[[int], float], max_len: int
) -> int:
    """The most draft tokens, up to ``max_len``, with which no stream falls behind on average, but for those that do at any
    length. At least 1: what streams cannot bear may cost others the length of their drafts, but not the drafts.

    Args:
        acceptance_of: probability that a draft token of a request is right; 0 without drafts.
        round_s: time of a round that awaits drafts of so many tokens.
    """
    seconds = [round_s(length) for length in range(max_len + 1)]
    longest = max_len
    for stream in streams:
        acceptance = acceptance_of(stream.request_id)
        bearable = (n for n in range(longest, -1, -1) if seconds[n] <= stream.round_s(expected_tokens(acceptance, n)))
        longest = max(1, next(bearable, longest))
    return longest
