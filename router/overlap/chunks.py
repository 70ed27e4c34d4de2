"""Budgets of requests whose drafters work ahead of a frontier."""

from collections.abc import Iterable, Mapping

from cluster.types import StopRule
from router.plan import DraftBudget, Frontier, SequenceView

_MAX_MADE = 4096


class Chunks:
    """Cuts budgets to chunks. Equal budgets stay one object, so that comparing them is quick."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, float, StopRule, int], DraftBudget] = {}

    def limited(
        self, budgets: Mapping[str, DraftBudget], frontiers: Mapping[str, Frontier], sequences: Iterable[SequenceView]
    ) -> Mapping[str, DraftBudget]:
        """The budgets of requests whose drafter has a frontier are at most a chunk, and allow to draft ahead."""
        found = dict(budgets)
        for sequence in sequences:
            frontier = None if sequence.drafter is None else frontiers.get(sequence.drafter)
            budget = budgets.get(sequence.request_id)
            if frontier is not None and budget is not None and budget.num_tokens:
                num_tokens = min(budget.num_tokens, frontier.chunk_len)
                key = num_tokens, budget.row_price, budget.stop, frontier.ahead_len
                if len(self._made) > _MAX_MADE:
                    self._made.clear()
                found[sequence.request_id] = self._made.setdefault(key, DraftBudget(*key))
        return found
