"""What a step costs, as the planner and the policies see it."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class CostModel(Protocol):
    """Predicted duration of one packed target pass, in seconds."""

    def step_s(self, num_rows: int, num_context: int) -> float:
        """``num_rows`` tokens computed in the pass, ``num_context`` tokens attended to, summed over the sequences."""


@dataclass(frozen=True, slots=True)
class TableCost:
    """A monotone table of step time over rows, linear between its points and beyond its ends, plus a linear context term.

    ``rows`` ascend strictly; ``step_s_at`` holds their seconds at no context.
    """

    rows: tuple[int, ...]
    step_s_at: tuple[float, ...]
    per_context_s: float = 0.0

    def step_s(self, num_rows: int, num_context: int) -> float:
        return self._at(num_rows) + self.per_context_s * num_context

    def _at(self, num_rows: int) -> float:
        if len(self.rows) == 1 or num_rows <= self.rows[0]:
            return self.step_s_at[0]
        i = min(bisect_right(self.rows, num_rows), len(self.rows) - 1)
        low, high = self.rows[i - 1], self.rows[i]
        slope = (self.step_s_at[i] - self.step_s_at[i - 1]) / (high - low)
        return self.step_s_at[i - 1] + slope * (num_rows - low)


def monotone(points: Sequence[tuple[int, float]], per_context_s: float = 0.0) -> TableCost:
    """A TableCost from measured (rows, seconds): sorted, and never falling (the running maximum)."""
    rows: list[int] = []
    seconds: list[float] = []
    for num_rows, step_s in sorted(points):
        rows.append(num_rows)
        seconds.append(max(step_s, seconds[-1]) if seconds else step_s)
    return TableCost(tuple(rows), tuple(seconds), per_context_s)
