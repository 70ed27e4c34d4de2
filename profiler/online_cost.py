"""A cost model corrected online by measured over predicted pass times: their recent ratio, common to all passes, times a
ratio for each range of rows.

The speed of a machine changes within seconds, when others use it or its clock falls, and all passes with it. What differs
by range is how wrong the measured table is there, which stays: drafts pay or not by the ratio of a longer pass to a shorter
one, so ranges must not differ because they were visited at different times.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import exp, log

import numpy as np

from router.cost_model import CostModel, TableCost

COMMON_WEIGHT = 0.1  # of the newest pass in the common ratio: about the last ten count
WEIGHT = 0.02  # and in that of its range: about the last fifty
LARGEST_RESIDUAL = 0.5  # clips the log ratio of one pass over what was expected: it may have been disturbed
MOST_DISTURBED = 4  # passes in a row
FEW_PASSES = 8  # of a range, up to which the common ratio learns less from it
STALE = 256.0  # passes elsewhere after which a range's own ratio counts 1/e
PRIOR_PASSES = 2  # weight of the estimate before the first pass of a range
TRIAL_AFTER, MOST_DOUBLINGS = 512, 4  # small passes before a trial; each trial that changed nothing doubles them
TRIAL_PASSES, TRIAL_SPAN = 64, 8  # passes of a trial, and the ranges above the present one that it tries
CONFIRMED, CONFIRMATIONS = 0.8, 2  # passes on trial of such a share of the known time, after which the trial ends
ALIKE = 1 / 64  # relative difference below which contexts share a table
HALF_OCTAVES = tuple(dict.fromkeys(round(2 ** (i / 2)) for i in range(27)))


class OnlineCost:
    """``router.cost_model.CostModel``: ``base``, corrected. The thread that plans and passes owns it; others may read.

    Ranges lie around the ``knots``, corrections are interpolated between them, and corrected times never fall. A range
    without recent passes returns to the weighted mean: plans avoid an expensive range, which would else never recover.

    Where the base itself is wrong, as it is if other programs ran when it was measured, that is not enough: drafts seem not
    to pay, and no pass shows otherwise. So from time to time, while only small passes are made, larger ones are assumed to
    take no longer, until FEW_PASSES of a range were seen. Every decision follows the same table, so that drafts are made
    and verified. Passes that take what was known end the trial: objectives miss that time in CONFIRMATIONS of at least
    TRIAL_AFTER passes.
    """

    def __init__(self, base: CostModel, knots: Sequence[int] = HALF_OCTAVES) -> None:
        self._knots = tuple(knots)
        self.rebase(base)

    def rebase(self, base: CostModel) -> None:
        """From now on passes are those of another compute partition, which nothing is known of but ``base``."""
        self._base = base
        knots = self._knots
        self._common = 0.0  # log of the common ratio
        self._last_large, self._num_large = 0.0, 0  # residual of the last pass if it was large, and of how many in a row
        self._log_ratio, self._num = [0.0] * len(knots), [0] * len(knots)  # of the ranges, beside it
        self._freshness = [0.0] * len(knots)
        self._num_small = self._num_doublings = self._trial_left = self._tried_at = 0
        self._seen, self._num_confirmed = [0] * len(knots), 0  # in the present trial: passes of each range
        self._before_trial = [0.0] * len(knots)  # ratios
        # Points of a table of the base, and corrections by rows, at the points of corrected tables.
        self._factors: tuple[tuple[int, ...], list[tuple[int, float]]] | None = None
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
            ratio = self._mean_ratio = exp(self._common + self._mean())
        return self._base.prefill_s(num_rows, num_context) * ratio

    def draft_s(self, drafter: str, batch: int, draft_len: int) -> float | None:
        return self._base.draft_s(drafter, batch, draft_len)

    def catch_up_s(self, drafter: str, num_tokens: int) -> float | None:
        return self._base.catch_up_s(drafter, num_tokens)

    def ratio(self, num_rows: int) -> float:
        """Recent over profiled time of passes with so many rows."""
        return exp(self._common + self._known(self._region(num_rows), self._mean()))

    def observe(self, num_rows: int, num_context: int, step_s: float) -> None:
        """Adds a pass that took ``step_s``."""
        expected_s = self._base.step_s(num_rows, num_context)
        if step_s <= 0.0 or expected_s <= 0.0:
            return
        at = self._region(num_rows)
        self._count_trial(at)
        self._visit(at)
        ratio = log(step_s / expected_s) - self._common
        if self._trial_left and at > self._tried_at and ratio - self._before_trial[at] > log(CONFIRMED):
            self._num_confirmed += 1
            self._trial_left *= self._num_confirmed < CONFIRMATIONS
        step = self._clipped(ratio - self._log_ratio[at])
        self._num[at] += 1
        # What a range that few passes were seen of differs by is its own.
        self._common += COMMON_WEIGHT * min(1.0, self._num[at] / FEW_PASSES) * step
        self._log_ratio[at] += step * max(WEIGHT, 1.0 / (PRIOR_PASSES + self._num[at]))
        self._slice = self._factors = self._mean_ratio = None

    def _clipped(self, residual: float) -> float:
        """A pass may have been disturbed; several in a row were not."""
        is_large = abs(residual) > LARGEST_RESIDUAL
        self._num_large = self._num_large + 1 if is_large and residual * self._last_large >= 0.0 else int(is_large)
        self._last_large = residual if is_large else 0.0
        if not is_large or self._num_large > MOST_DISTURBED:
            return residual
        return LARGEST_RESIDUAL if residual > 0.0 else -LARGEST_RESIDUAL

    def _visit(self, at: int) -> None:
        """A range without recent passes restarts from its present estimate."""
        freshness = self._freshness[at]
        if freshness < 0.5:
            self._log_ratio[at] = self._known(at, self._mean())
            self._num[at] = int(min(self._num[at], 1.0 / WEIGHT) * freshness)
        self._freshness = [known * (1.0 - 1.0 / STALE) for known in self._freshness]
        self._freshness[at] = 1.0

    def _count_trial(self, at: int) -> None:
        """Counts a pass, and begins or ends a trial."""
        if self._trial_left:
            self._trial_left -= 1
            self._seen[at] += 1
            return
        if at > self._tried_at:
            self._num_doublings = 0
        if max(self._freshness[at + 1 : at + 1 + TRIAL_SPAN], default=1.0) > exp(-1):
            self._num_small = 0
            return
        self._num_small += 1
        if self._num_small >= TRIAL_AFTER << self._num_doublings:
            self._num_doublings = min(self._num_doublings + 1, MOST_DOUBLINGS)
            self._num_small, self._trial_left, self._tried_at = 0, TRIAL_PASSES, at
            self._seen, self._num_confirmed, mean = [0] * len(self._knots), 0, self._mean()
            self._before_trial = [self._known(one, mean) for one in range(len(self._knots))]

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
        base, known = self._base.table(num_context), self._factors  # one read, as in ``table``
        if known is None or known[0] != base.rows:
            known = self._factors = base.rows, self._factors_at(base.rows)
        seconds = [base.at(num_rows) * factor for num_rows, factor in known[1]]
        if self._trial_left:
            seconds = self._on_trial([num_rows for num_rows, _ in known[1]], seconds)
        return TableCost(tuple([num_rows for num_rows, _ in known[1]]), tuple(accumulate(seconds, max)))

    def _on_trial(self, rows: Sequence[int], seconds: Sequence[float]) -> list[float]:
        """``seconds`` of ``rows``; ranges on trial take no longer than that of the small passes."""
        low = self._tried_at
        most_s = seconds[rows.index(self._knots[low])]
        on_trial = [low < at <= low + TRIAL_SPAN and self._seen[at] < FEW_PASSES for at in range(len(self._knots))]
        found = zip(rows, seconds, strict=True)
        return [min(one_s, most_s) if on_trial[self._region(num)] else one_s for num, one_s in found]

    def _factors_at(self, base_rows: Sequence[int]) -> list[tuple[int, float]]:
        mean = self._mean()
        ratios = [self._known(at, mean) for at in range(len(self._knots))]
        rows = sorted({*self._knots, *base_rows})
        factors = np.exp(self._common + np.interp(rows, self._knots, ratios)).tolist()
        return list(zip(rows, factors, strict=True))
