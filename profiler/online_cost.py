"""A cost model corrected online: an EMA of measured over predicted pass time per range of rows, and a drift test.

Serving differs from a profile by a factor that depends little on the context and somewhat on the rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import exp, log

import numpy as np

from router.cost_model import CostModel, TableCost

WEIGHT = 0.02  # of the newest pass: about the last fifty of a range count
LARGEST_STEP = log(4.0)  # clips residuals
LARGEST_EVIDENCE = 0.5  # clips the evidence of one pass, which may have been disturbed
TOLERANCE = 0.05  # of the log ratio
THRESHOLD = 2.0  # of the sum: eight passes that take 1.35 times as long, and at least five
STALE = 256.0  # passes elsewhere after which a range's own ratio counts 1/e
PRIOR_PASSES = 8  # weight of the estimate before the first pass of a range
ALIKE = 1 / 64  # relative difference below which contexts share a table
OCTAVES = tuple(2**i for i in range(14))


def _clipped(value: float, most: float) -> float:
    return max(-most, min(most, value))


@dataclass(slots=True)
class _CumulativeSum:
    """One side of the test, with the number and sum of the residuals since its sum was 0."""

    total: float = 0.0
    num: int = 0
    moved: float = 0.0

    def add(self, evidence: float, residual: float) -> None:
        self.total = max(0.0, self.total + evidence - TOLERANCE)
        self.num, self.moved = (self.num + 1, self.moved + residual) if self.total else (0, 0.0)


class PageHinkley:
    """Two-sided cumulative sums beyond a tolerance (Page 1954): detects a moved mean early, with few false alarms."""

    def __init__(self) -> None:
        self._above, self._below = _CumulativeSum(), _CumulativeSum()

    def add(self, residual: float) -> float | None:
        """Adds a residual whose mean should be 0. Returns the shift once detected; the test then restarts."""
        evidence = _clipped(residual, LARGEST_EVIDENCE)
        self._above.add(evidence, residual)
        self._below.add(-evidence, residual)
        for side in (self._above, self._below):
            if side.total > THRESHOLD:
                self._above, self._below = _CumulativeSum(), _CumulativeSum()
                return side.moved / side.num
        return None


@dataclass(frozen=True, slots=True)
class Drift:
    """Passes of about ``num_rows`` rows now take ``ratio`` times the profiled time."""

    num_rows: int
    ratio: float


class OnlineCost:
    """``router.cost_model.CostModel``: ``base``, corrected. The thread that plans and passes owns it; others may read.

    Ranges lie around the ``knots``, corrections are interpolated between them, and corrected times never fall. A range
    without recent passes returns to the weighted mean: plans avoid an expensive range, which would else never recover.
    """

    def __init__(self, base: CostModel, knots: Sequence[int] = OCTAVES) -> None:
        self._base = base
        self._knots = tuple(knots)
        self._log_ratio, self._num = [0.0] * len(knots), [0] * len(knots)
        self._freshness = [0.0] * len(knots)  # of the ratios
        self._tests = [PageHinkley() for _ in knots]
        self._slice: tuple[int, TableCost] | None = None  # the corrected table at a context
        self._mean_ratio: float | None = None

    @property
    def base(self) -> CostModel:
        return self._base

    def step_s(self, num_rows: int, num_context: int) -> float:
        return self.table(num_context).at(num_rows)

    def table(self, num_context: int) -> TableCost:
        known = self._slice  # one read, since another thread may replace it
        if known is None or abs(num_context - known[0]) > ALIKE * known[0]:
            known = self._slice = (num_context, self._corrected(num_context))
        return known[1]

    def prefill_s(self, num_rows: int, num_context: int) -> float:
        ratio = self._mean_ratio  # one read, as in ``table``
        if ratio is None:
            ratio = self._mean_ratio = exp(self._mean())
        return self._base.prefill_s(num_rows, num_context) * ratio

    def draft_s(self, drafter: str, batch: int, draft_len: int) -> float | None:
        return self._base.draft_s(drafter, batch, draft_len)

    def catch_up_s(self, drafter: str, num_tokens: int) -> float | None:
        return self._base.catch_up_s(drafter, num_tokens)

    def ratio(self, num_rows: int) -> float:
        """Recent over profiled time of passes with so many rows."""
        return exp(self._known(self._region(num_rows), self._mean()))

    def observe(self, num_rows: int, num_context: int, step_s: float) -> Drift | None:
        """Adds a pass that took ``step_s``. Returns a sudden change of pass times, if detected."""
        expected_s = self._base.step_s(num_rows, num_context)
        if step_s <= 0.0 or expected_s <= 0.0:
            return None
        at = self._region(num_rows)
        self._visit(at)
        found = log(step_s / expected_s)
        residual = _clipped(found - self._log_ratio[at], LARGEST_STEP)
        self._num[at] += 1
        step = _clipped(residual, LARGEST_EVIDENCE)
        self._log_ratio[at] += step * max(WEIGHT, 1.0 / (PRIOR_PASSES + self._num[at]))
        self._slice = self._mean_ratio = None
        moved = self._tests[at].add(residual) if self._num[at] * WEIGHT > 1.0 else None
        if moved is None:
            return None
        self._log_ratio[at] += moved
        self._slice = self._mean_ratio = None
        self._num[at] = int(0.5 / WEIGHT)  # learns fast for a while before it tests again
        return Drift(self._knots[at], exp(self._log_ratio[at]))

    def _visit(self, at: int) -> None:
        """A range without recent passes restarts from its present estimate."""
        freshness = self._freshness[at]
        if freshness < 0.5:
            self._log_ratio[at] = self._known(at, self._mean())
            self._num[at] = int(min(self._num[at], 1.0 / WEIGHT) * freshness)
            self._tests[at] = PageHinkley()
        self._freshness = [known * (1.0 - 1.0 / STALE) for known in self._freshness]
        self._freshness[at] = 1.0

    def _known(self, at: int, mean: float) -> float:
        return mean + self._freshness[at] * (self._log_ratio[at] - mean)

    def _region(self, num_rows: int) -> int:
        """The nearest knot, by ratio."""
        return sum(num_rows * num_rows >= low * high for low, high in pairwise(self._knots))

    def _mean(self) -> float:
        """Over the ranges, weighted by remembered passes and freshness."""
        weights = [min(num, 1.0 / WEIGHT) * known for num, known in zip(self._num, self._freshness, strict=True)]
        total = sum(weights)
        return sum(w * r for w, r in zip(weights, self._log_ratio, strict=True)) / total if total else 0.0

    def _corrected(self, num_context: int) -> TableCost:
        """The steps of the base stay: corrections, not times, are interpolated between the knots."""
        mean, base = self._mean(), self._base.table(num_context)
        ratios = [self._known(at, mean) for at in range(len(self._knots))]
        rows = sorted({*self._knots, *base.rows})
        factors = np.exp(np.interp(rows, self._knots, ratios)).tolist()
        seconds = [base.at(num_rows) * factor for num_rows, factor in zip(rows, factors, strict=True)]
        return TableCost(tuple(rows), tuple(accumulate(seconds, max)))
