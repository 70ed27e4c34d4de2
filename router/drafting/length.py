"""What a draft-length policy reads, returns and learns from; the base of the policies; and the two without estimates."""

from collections.abc import Iterable, Mapping, Sequence

from cluster.config import DEFAULT_DRAFT_LEN
from cluster.types import Commit, DraftTerms, record
from router.assignment import drafter_of
from router.drafting.value import PRICE_STEPS, DraftingValue, QuotedPrice
from router.estimates.drafter_stats import Judgement
from router.plan import SequenceView

_PRICE_SHARE = 0.1  # a quoted row price stays while the true one is so near


@record
class PassFeedback:
    """What came of a pass that sampled."""

    commits: Sequence[Commit]
    judgements: Mapping[
        str, Judgement
    ]  # by request: the verdict on the proposal that it had; none of those with nothing to teach
    pass_s: float
    round_s: float  # from the pass before to the end of this one: also what was waited for drafts


class DraftLengths:
    """The base of the policies: budgets by drafter, the same for all its requests. It drafts as far as the drafter can, and
    ends drafts where a row does not pay.

    A policy is pure: no clock, no randomness without a seed. It overrides ``budget_of`` (one budget per drafter), or
    ``budgets`` (one per request), and ``learn``.

    Args:
        max_lens: the longest proposal of each configured drafter.
    """

    def __init__(self, max_lens: Mapping[str, int] | None = None) -> None:
        self._max_lens = dict(max_lens or {})
        self._row_price = QuotedPrice(_PRICE_SHARE, 1 / PRICE_STEPS)
        self._last: dict[str, DraftTerms] = {}  # equal budgets are one object: comparing them is quick

    def budgets(self, sequences: Iterable[SequenceView], value: DraftingValue) -> dict[str, DraftTerms]:
        """Of each request that has a drafter, for the proposal after the next pass. A budget of 0 tokens is plain decoding:
        nothing is drafted, awaited or verified, and the drafter stays in step."""
        self._row_price.follow(round(value.row_price * PRICE_STEPS) / PRICE_STEPS)
        of_drafter: dict[str, DraftTerms] = {}
        budgets = {}
        for sequence in sequences:
            drafter = sequence.drafter
            if drafter is not None:
                budget = of_drafter.get(drafter)
                if budget is None:
                    budget = self.budget_of(drafter, value)
                    last = self._last.get(drafter)
                    budget = of_drafter[drafter] = last if last == budget and last is not None else budget
                budgets[sequence.request_id] = budget
        self._last = of_drafter
        return budgets

    def learn(self, feedback: PassFeedback) -> None:
        """Once for each pass that sampled."""

    def budget_of(self, drafter: str, value: DraftingValue) -> DraftTerms:
        return DraftTerms(self.max_len(drafter), self.row_price)

    @property
    def row_price(self) -> float:
        """As quoted to drafters."""
        return self._row_price.value

    def max_len(self, drafter: str) -> int:
        return self._max_lens.get(drafter_of(drafter), DEFAULT_DRAFT_LEN)


def decoding(sequences: Iterable[SequenceView]) -> list[SequenceView]:
    """Those whose prompt is computed."""
    return [s for s in sequences if s.running and s.committed_len - s.computed_len == 1]


class Fixed(DraftLengths):
    """``num_tokens`` for every request, or what its drafter can; a row costs nothing."""

    def __init__(self, max_lens: Mapping[str, int], num_tokens: int) -> None:
        super().__init__(max_lens)
        self._num_tokens = num_tokens

    def budget_of(self, drafter: str, value: DraftingValue) -> DraftTerms:
        return DraftTerms(min(self._num_tokens, self.max_len(drafter)))


class Threshold(DraftLengths):
    """As assisted generation in Hugging Face's transformers stops (`assistant_confidence_threshold`). The drafter decides
    after each token, by its own confidence; a row costs nothing."""

    def __init__(self, max_lens: Mapping[str, int], min_confidence: float) -> None:
        super().__init__(max_lens)
        self._min_confidence = min_confidence

    def budget_of(self, drafter: str, value: DraftingValue) -> DraftTerms:
        return DraftTerms(self.max_len(drafter), min_confidence=self._min_confidence)
