"""The interface of overlap policies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from router.cost_model import CostModel
from router.plan import NO_PROMPTS, DrafterView, Frontier, PromptRows, SequenceView


@dataclass(frozen=True, slots=True)
class PassStart:
    """Which decoding requests the next pass takes."""

    ready: Sequence[SequenceView]  # it takes these; others wait for their proposal or for a later micro-batch
    held: Mapping[str, float] = field(default_factory=dict)  # request -> when it stops waiting for its proposal
    wake_s: float | None = None  # no pass now: decide again then, or when mail comes
    frontiers: Mapping[str, Frontier] = field(default_factory=dict)  # by drafter; others draft whole proposals and stop
    num_micro_batches: int = 1


class OverlapPolicy(Protocol):
    def start(
        self,
        decoding: Sequence[SequenceView],
        drafters: Mapping[str, DrafterView],
        cost: CostModel,
        now_s: float,
        prompts: PromptRows = NO_PROMPTS,
    ) -> PassStart:
        """For each plan. ``decoding``: requests without prompt tokens to compute, in order of arrival. A request is held
        for at most the maximum hold after its commit, so that a dead drafter costs no more than that."""
