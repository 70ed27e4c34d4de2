"""What a step, a draft and catching up cost, as the planner, the policies, cascades and the simulator see it."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # of the passes that are measured and reported; extrapolated beyond


class CostModel(Protocol):
    """Expected durations on this hardware, in seconds; None: that drafter was not measured."""

    def step_s(self, num_rows: int, num_context: int) -> float:
        """One packed target pass that verifies: ``num_rows`` tokens computed and all of them sampled, ``num_context`` tokens
        attended to, summed over the sequences. Never falls as either grows."""

    def prefill_s(self, num_rows: int, num_context: int) -> float:
        """As ``step_s``, of a chunk of one prompt, of which nothing is sampled. ``num_context``: tokens of that prompt
        before it; not those that other sequences of the pass attend to."""

    def table(self, num_context: int) -> "TableCost":
        """``step_s`` of every number of rows at about this context. Exact at its steps: linear between its points."""

    def draft_s(self, drafter: str, batch: int, draft_len: int) -> float | None:
        """One batch of drafts of ``draft_len`` tokens by a configured drafter that is in step with its requests."""

    def catch_up_s(self, drafter: str, num_tokens: int) -> float | None:
        """What it takes on top of a draft to catch up with ``num_tokens`` committed tokens of one request."""


@dataclass(frozen=True, slots=True)
class TableCost:
    """A monotone table of step time over rows, linear between its points and beyond its ends, plus a linear context term.
    ``rows`` ascend strictly; ``step_s_at`` holds their seconds at no context."""

    rows: tuple[int, ...]
    step_s_at: tuple[float, ...]
    per_context_s: float = 0.0

    def step_s(self, num_rows: int, num_context: int) -> float:
        return self.at(num_rows) + self.per_context_s * num_context

    def prefill_s(self, num_rows: int, num_context: int) -> float:
        return self.step_s(num_rows, num_context)

    def table(self, num_context: int) -> "TableCost":
        context_s = self.per_context_s * num_context
        return TableCost(self.rows, tuple([seconds + context_s for seconds in self.step_s_at])) if context_s else self

    def draft_s(self, drafter: str, batch: int, draft_len: int) -> None:
        return None

    def catch_up_s(self, drafter: str, num_tokens: int) -> None:
        return None

    def at(self, num_rows: float) -> float:
        """Seconds without context."""
        rows, seconds = self.rows, self.step_s_at
        if len(rows) == 1 or num_rows <= rows[0]:
            return seconds[0]
        i = min(bisect_right(rows, num_rows), len(rows) - 1)
        low, low_s = rows[i - 1], seconds[i - 1]
        return low_s + (seconds[i] - low_s) / (rows[i] - low) * (num_rows - low)

    def at_each(self, num_rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """As ``at``, of several numbers of rows that ascend."""
        seconds = np.interp(num_rows, self.rows, self.step_s_at)
        last = self.rows[-1]
        if num_rows[-1] > last and len(self.rows) > 1:
            slope = (self.step_s_at[-1] - self.step_s_at[-2]) / (last - self.rows[-2])
            seconds += slope * np.maximum(0, num_rows - last)
        return seconds

    def scaled(self, factor: float) -> Self:
        return replace(self, step_s_at=tuple([factor * seconds for seconds in self.step_s_at]))


def monotone(points: Sequence[tuple[int, float]], per_context_s: float = 0.0) -> TableCost:
    """A TableCost from measured (rows, seconds): sorted, and never falling (the running maximum)."""
    rows, seconds = zip(*sorted(points), strict=True)
    return TableCost(rows, tuple(accumulate(seconds, max)), per_context_s)


def bounded(measured: TableCost) -> TableCost:
    """A pass takes at most what passes of fewer rows, one after the other, take for as many; more was a disturbance."""
    found: list[float] = []
    for num, seconds in zip(measured.rows, measured.step_s_at, strict=True):
        in_turn = [-(-num // rows) * one_s for rows, one_s in zip(measured.rows, found, strict=False)]
        found.append(min(seconds, *in_turn) if in_turn else seconds)
    return replace(measured, step_s_at=tuple(found))


@dataclass(frozen=True, slots=True)
class PaddedCost:
    """``base`` of a target whose passes are padded to the next of the ``prepared`` numbers of rows, ascending and not empty:
    each costs what that many cost, in steps. Larger passes are not padded."""

    base: CostModel
    prepared: tuple[int, ...]

    def step_s(self, num_rows: int, num_context: int) -> float:
        return self.base.step_s(self._padded(num_rows), num_context)

    def prefill_s(self, num_rows: int, num_context: int) -> float:
        return self.base.prefill_s(self._padded(num_rows), num_context)

    def table(self, num_context: int) -> TableCost:
        table, last = self.base.table(num_context), self.prepared[-1]
        firsts = [1, *[size + 1 for size in self.prepared]]  # of each step, and of the passes that are not padded
        rows = sorted({*firsts, *self.prepared, *[rows for rows in table.rows if rows > last]})
        return TableCost(tuple(rows), tuple([table.at(self._padded(num)) for num in rows]))

    def draft_s(self, drafter: str, batch: int, draft_len: int) -> float | None:
        return self.base.draft_s(drafter, batch, draft_len)

    def catch_up_s(self, drafter: str, num_tokens: int) -> float | None:
        return self.base.catch_up_s(drafter, num_tokens)

    def _padded(self, num_rows: int) -> int:
        at = bisect_left(self.prepared, num_rows)
        return self.prepared[at] if at < len(self.prepared) else num_rows


def padded(cost: CostModel, prepared: tuple[int, ...]) -> CostModel:
    """``prepared``: as of `router.plan.Capacity`; may be empty."""
    return PaddedCost(cost, prepared) if prepared else cost


def relative_draft_cost(cost: CostModel, drafter: str, draft_len: int) -> float | None:
    """Of one draft token at batch 1, as a share of a one-row target step (``PoolMember.cost``); None: not measured."""
    draft_s = cost.draft_s(drafter, 1, draft_len)
    return None if draft_s is None else draft_s / draft_len / cost.step_s(1, 0)
