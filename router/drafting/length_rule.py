"""The default: drafts are made while they pay, and each draft goes on while its next token does.

The target sets prices; the drafter, which knows its confidences, decides at each step (`router/drafting/stopping.py`).

- A batch of drafts costs the wait of all requests for it. A drafter whose drafts gain less, at the best length, gets budgets
  of 0 tokens: its requests are decoded plainly. One at a time tries it, or its reply time would never be measured again.
- A row of a request that falls behind its objective costs it less, by its weight, and costs the others more: rows cost what
  they did on average. No draft makes a round that awaits it longer than every stream can bear for the tokens it commits.
- Whether drafters on the target's device pay is decided by their gate (`colocated_gate.py`), not here. Their drafts are as
  long as gains most, by the profiled time of a batch of drafts. A cascade queries members by the price of a second.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

from cluster.types import DraftTerms
from router.drafting.length import DraftLengths, decoding
from router.drafting.value import DraftingValue, QuotedPrice, expected_tokens
from router.estimates.trial import Exploration
from router.plan import SequenceView
from router.planning.slo import NO_LIMITS, Stream

_SHARE = 0.1  # a quoted price of time stays while the true one is so near
_LEAST_PER_S = 0.5  # tokens per second
_TRIAL_ROUNDS = 8  # in which one request tries a drafter that pays for none
_RETAIN = 0.9  # share of its price that a drafter in use must gain
_WEIGHT_STEPS = 4  # in each unit of a weight: a row price that changes is a message


@dataclass(slots=True)
class _Drafter:
    pays: bool = True
    second_price: QuotedPrice = field(default_factory=lambda: QuotedPrice(_SHARE, _LEAST_PER_S))
    exploration: Exploration = field(default_factory=lambda: Exploration(num_rounds=_TRIAL_ROUNDS))


class Outrider(DraftLengths):
    """``max_lens`` as of the base."""

    def __init__(self, max_lens: Mapping[str, int] | None = None) -> None:
        super().__init__(max_lens)
        self._drafters: dict[str, _Drafter] = {}
        self._tried: dict[str, DraftTerms] = {}  # by drafter that one request tries in this round
        self._num_decoding, self._num_context = 1, 0

    def budgets(self, sequences: Iterable[SequenceView], value: DraftingValue) -> dict[str, DraftTerms]:
        sequences = list(sequences)
        ready = decoding(sequences)
        self._num_decoding, self._num_context = max(1, len(ready)), sum([one.committed_len for one in ready])
        self._tried.clear()
        budgets = super().budgets(sequences, value)
        for sequence in sequences if self._tried else ():
            if sequence.drafter in self._tried and sequence.running and sequence.max_new_tokens > 1:
                budgets[sequence.request_id] = self._tried.pop(sequence.drafter)
        return budgets if value.limits is NO_LIMITS else self._by_objectives(ready, value, budgets)

    def budget_of(self, drafter: str, value: DraftingValue) -> DraftTerms:
        known = self._drafters.setdefault(drafter, _Drafter())
        num, rate, max_len = self._num_decoding, value.waiting_rate(drafter), self.max_len(drafter)
        known.second_price.follow(rate / num)
        terms = DraftTerms(max_len, self.row_price, known.second_price.value)
        known.pays = value.pays(drafter, num, self._num_context, max_len, _RETAIN if known.pays else 1.0)
        if known.pays:
            known.exploration.reset()
            if value.view(drafter).shares_device:
                return replace(terms, num_tokens=value.best_len(drafter, num, max_len, self.row_price))
            return terms
        if known.exploration.tries(_TRIAL_ROUNDS * rate * value.draft_s(drafter, 1, max_len) / num):
            self._tried[drafter] = terms
        return replace(terms, num_tokens=0)

    def _by_objectives(
        self, ready: Sequence[SequenceView], value: DraftingValue, budgets: dict[str, DraftTerms]
    ) -> dict[str, DraftTerms]:
        names = {sequence.request_id: sequence.drafter for sequence in ready if sequence.drafter is not None}

        def acceptance_of(request_id: str) -> float:
            return value.view(names[request_id]).acceptance if request_id in names else 0.0

        longest = {}
        for drafter in set(names.values()) if value.limits.streams and value.num_micro_batches == 1 else ():
            round_s = partial(value.round_s, drafter, len(ready), len(names), self._num_context)
            longest[drafter] = longest_draft(value.limits.streams, acceptance_of, round_s, self.max_len(drafter))
        drafted = [sequence for sequence in ready if sequence.request_id in names]
        return weighted(budgets, drafted, value.limits.weights, longest)


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
