"""How long what is modelled takes: passes of a target, and drafts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cluster.messages import LevelReport
from router.assignment import Chain, drafter_of
from router.cost_model import CostModel
from simulator.agreement import SimulatedRequest

Rows = tuple[int, int]  # of one sequence in a pass: rows computed, tokens attended to


class PassTimer(Protocol):
    def seconds(self, decoding: Sequence[Rows], prefilling: Sequence[Rows]) -> float:
        """Of a pass. Rows of the first are all sampled, of the second none but the last of each."""


@dataclass(frozen=True, slots=True)
class PackedPass:
    """Sequences of all lengths lie side by side, nothing is padded: as our targets compute."""

    cost: CostModel

    def seconds(self, decoding: Sequence[Rows], prefilling: Sequence[Rows]) -> float:
        rows, context = sum(r for r, _ in decoding), sum(c for _, c in decoding)
        if not prefilling:
            return self.cost.step_s(rows, context) if rows else 0.0
        prompt_rows, prompt_context = sum(r for r, _ in prefilling), sum(c for _, c in prefilling)
        if not rows:
            return self.cost.prefill_s(prompt_rows, prompt_context)
        # What prompts add to rows that are computed anyway. They do not attend to the context of decoding sequences.
        added_s = self.cost.prefill_s(rows + prompt_rows, prompt_context) - self.cost.prefill_s(rows, 0)
        return self.cost.step_s(rows, context) + max(0.0, added_s)


@dataclass(frozen=True, slots=True)
class PaddedPass:
    """Every sequence takes as many rows and as much context as the longest (SPIN, figure 5). Prompts go apart."""

    cost: CostModel

    def seconds(self, decoding: Sequence[Rows], prefilling: Sequence[Rows]) -> float:
        total_s = 0.0
        if decoding:
            rows, context = (len(decoding) * max(column) for column in zip(*decoding, strict=True))
            total_s += self.cost.step_s(rows, context)
        if prefilling:
            rows, context = (len(prefilling) * max(column) for column in zip(*prefilling, strict=True))
            total_s += self.cost.prefill_s(rows, context)
        return total_s


@dataclass(slots=True)
class Work:
    """One request of a batch of drafts: ``num_tokens`` of the ``asked`` come, beginning at ``position`` of its answer.

    ``num_behind``: committed tokens that the drafter has not computed, beyond the one that every draft begins with.
    Nobody changes one; it is not frozen because that takes three times as long to make.
    """

    request: SimulatedRequest
    position: int
    asked: int
    num_tokens: int
    num_behind: int
    lead: Chain = ()  # who rides ahead of the drafter, nearest to it last


class DraftTimer(Protocol):
    def seconds(self, drafter: str, batch: Sequence[Work]) -> float:
        """Of one batch of drafts. ``drafter`` is a pool member."""

    def scoring_s(self, drafter: str, num_tokens: int) -> float:
        """Of a pass over committed tokens, in spare time, which keeps a drafter in step and yields its scores."""

    def take_levels(self) -> Sequence[LevelReport]:
        """What happened within chains since this was last asked."""


@dataclass(frozen=True, slots=True)
class DraftByCost:
    """As the cost model says: what the longest draft of the batch takes, or where that ended of its own accord the step in
    which it did; and catching up on top. A drafter that it does not know costs nothing."""

    cost: CostModel

    def seconds(self, drafter: str, batch: Sequence[Work]) -> float:
        name = drafter_of(drafter)
        longest = 1
        for work in batch:
            num_steps = work.num_tokens + 1 if work.num_tokens < work.asked else work.asked
            if num_steps > longest:
                longest = num_steps
        total_s = self.cost.draft_s(name, len(batch), longest) or 0.0
        for work in batch:
            if work.num_behind > 0:
                total_s += self.cost.catch_up_s(name, work.num_behind) or 0.0
        return total_s

    def scoring_s(self, drafter: str, num_tokens: int) -> float:
        name = drafter_of(drafter)
        return (self.cost.draft_s(name, 1, 1) or 0.0) + (self.cost.catch_up_s(name, num_tokens - 1) or 0.0)

    def take_levels(self) -> Sequence[LevelReport]:
        return ()


class Jitter:
    """Durations as they are, times a log-normal factor of mean 1. Deterministic by its generator."""

    def __init__(self, spread: float, random: np.random.Generator) -> None:
        self._spread = spread
        self._random = random

    def __call__(self, seconds: float) -> float:
        if self._spread == 0.0:
            return seconds
        return seconds * float(np.exp(self._random.normal(-(self._spread**2) / 2, self._spread)))
