"""The same number of draft tokens always."""

from collections.abc import Mapping

from cluster.config import FixedLength
from router.draft_length.base import BatchState, DraftLengths
from router.plan import DraftBudget


class Fixed(DraftLengths):
    """``num_tokens`` for every request, or what its drafter can; a row costs nothing."""

    def __init__(self, config: FixedLength, max_lens: Mapping[str, int]) -> None:
        super().__init__(max_lens)
        self._num_tokens = config.num_tokens

    def budget_of(self, drafter: str, batch: BatchState) -> DraftBudget:
        return DraftBudget(min(self._num_tokens, self.max_len(drafter)))
