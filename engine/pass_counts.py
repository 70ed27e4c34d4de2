"""What one pass computed, summed over its spans."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from cluster.types import Commit
from engine.target import SpanInput
from router.cost_model import CostModel


@dataclass(frozen=True, slots=True)
class PassCounts:
    """Context: tokens attended to before the rows of a span."""

    num_rows: int
    num_context: int
    num_sampled: int  # spans
    num_sampled_rows: int  # of those spans: the last committed token and the drafts
    num_sampled_context: int
    prompts: frozenset[str]  # requests that compute prompt tokens beyond the last one
    num_prompt_rows: int  # of those requests

    @classmethod
    def of(cls, spans: Iterable[SpanInput]) -> Self:
        num_rows = num_context = num_sampled = num_sampled_rows = num_sampled_context = num_prompt_rows = 0
        prompts = []
        for span in spans:
            length, base_len = len(span.token_ids), span.base_len
            num_rows += length
            num_context += base_len
            if span.samples:
                num_sampled += 1
                num_sampled_rows += 1 + span.num_drafts
                num_sampled_context += base_len
                if length == 1 + span.num_drafts:
                    continue
            prompts.append(span.request_id)
            num_prompt_rows += length
        return cls(
            num_rows, num_context, num_sampled, num_sampled_rows, num_sampled_context, frozenset(prompts), num_prompt_rows
        )

    def num_decoded(self, commits: Sequence[Commit]) -> int:
        """Tokens committed by requests that only decoded."""
        return sum([len(commit.token_ids) for commit in commits if commit.request_id not in self.prompts])

    def prompts_s(self, cost: CostModel) -> float:
        """The part of the pass that prompts took, by the cost model."""
        if not self.prompts:
            return 0.0
        num_decode_rows = self.num_rows - self.num_prompt_rows
        return cost.step_s(self.num_rows, self.num_context) - cost.step_s(num_decode_rows, self.num_context)
