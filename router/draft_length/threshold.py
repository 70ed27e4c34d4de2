"""A draft ends with the first token of little confidence."""

from collections.abc import Mapping

from cluster.config import ThresholdLength
from cluster.types import StopRule
from router.draft_length.base import BatchState, DraftLengths
from router.plan import DraftBudget


class Threshold(DraftLengths):
    """As assisted generation in Hugging Face's transformers stops (`assistant_confidence_threshold`). The drafter decides
    after each token, by its own confidence; a row costs nothing."""

    def __init__(self, config: ThresholdLength, max_lens: Mapping[str, int]) -> None:
        super().__init__(max_lens)
        self._stop = StopRule(min_confidence=config.min_confidence)

    def budget_of(self, drafter: str, batch: BatchState) -> DraftBudget:
        return DraftBudget(self.max_len(drafter), stop=self._stop)
