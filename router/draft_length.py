"""How far to draft: for each request, how many tokens its drafter may propose and what verifying one more token costs."""

from collections.abc import Iterable, Mapping
from typing import Self

from cluster.config import DEFAULT_DRAFT_LEN, Config
from router.assignment import drafter_of
from router.cost_model import CostModel
from router.estimates.decayed import DecayedMean
from router.plan import DraftBudget, SequenceView

PRICE_STEPS = 64  # a row price is rounded to this share of a token, so that it rarely changes and is rarely sent
_MEMORY = 64.0  # rounds that the decode rate averages


class DraftLengths:
    """The default rule: the drafter's longest proposal; the row price ends drafts that do not pay. ``max_lens``: the longest
    proposal of each configured drafter."""

    def __init__(self, max_lens: Mapping[str, int] | None = None) -> None:
        self._max_lens = dict(max_lens or {})
        self._made: dict[tuple[int, float], DraftBudget] = {}  # equal budgets are one object: comparing them is quick

    @classmethod
    def of(cls, config: Config) -> Self:
        return cls({drafter.name: drafter.max_draft_len for drafter in config.drafters})

    def budgets(self, sequences: Iterable[SequenceView], row_price: float) -> dict[str, DraftBudget]:
        """Of each request that has a drafter, for the proposal after the next pass."""
        row_price = round(row_price * PRICE_STEPS) / PRICE_STEPS
        of_drafter: dict[str, DraftBudget] = {}
        budgets = {}
        for sequence in sequences:
            drafter = sequence.drafter
            if drafter is not None:
                budget = of_drafter.get(drafter)
                if budget is None:
                    budget = of_drafter[drafter] = self._budget(drafter, row_price)
                budgets[sequence.request_id] = budget
        return budgets

    def _budget(self, drafter: str, row_price: float) -> DraftBudget:
        num_tokens = self._max_lens.get(drafter_of(drafter), DEFAULT_DRAFT_LEN)
        return self._made.setdefault((num_tokens, row_price), DraftBudget(num_tokens, row_price))


class DecodeRate:
    """Tokens decoded per second over the last rounds: whole rounds count, but for the time that prompts took in a pass."""

    def __init__(self) -> None:
        self._tokens, self._seconds = DecayedMean(), DecayedMean()
        self._last: tuple[float, int, float] | None = None  # of the last round, as for `note`, if it decoded

    @property
    def tokens_per_s(self) -> float | None:
        """None: not known yet."""
        return self._tokens.value / self._seconds.value if self._seconds.is_known else None

    def note(self, began_s: float, num_tokens: int, prompts_s: float) -> None:
        """A round that began at ``began_s`` decoded so many tokens; prompts took ``prompts_s`` of its pass."""
        if self._last is not None:
            last_began_s, num_last, last_prompts_s = self._last
            seconds = began_s - last_began_s - last_prompts_s
            if seconds > 0.0:  # else the prompts' time was overestimated
                self._tokens.add(num_last, _MEMORY)
                self._seconds.add(self._seconds.clipped(seconds), _MEMORY)
        self._last = (began_s, num_tokens, prompts_s) if num_tokens else None

    def interrupt(self) -> None:
        """A round decoded nothing: the time until the next one does not count."""
        self._last = None


def row_price(tokens_per_s: float | None, num_rows: int, num_context: int, cost: CostModel) -> float:
    """Tokens that could be decoded in the time of one row more, or of the last one, from 0 to 1. A draft token less likely
    to survive than this is not worth its row. At a knee of the cost the cheaper side counts."""
    if tokens_per_s is None:
        return 0.0
    here_s = cost.step_s(num_rows, num_context)
    row_s = cost.step_s(num_rows + 1, num_context) - here_s
    if num_rows > 1:
        row_s = min(row_s, here_s - cost.step_s(num_rows - 1, num_context))
    return max(0.0, min(1.0, row_s * tokens_per_s))  # a cost that is corrected meanwhile may fall
