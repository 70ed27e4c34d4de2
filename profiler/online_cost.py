"""A cost model that follows what passes really take: an EMA of the ratio by region of rows, and a test for drift.

A profile was measured on a machine that did nothing else, maybe under an older driver. What serving sees differs by a
factor that depends little on the context and something on the rows: so a ratio for each region of rows corrects it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log

from router.cost_model import CostModel, TableCost

WEIGHT = 0.02  # of the newest pass: about the last fifty of a region count
LARGEST_STEP = log(4.0)  # a pass further off than this counts as so far off
LARGEST_EVIDENCE = 0.5  # of one pass for a drift: it may have been disturbed
TOLERANCE = 0.05  # drift of the logarithm that is none
THRESHOLD = 2.0  # of the sum beyond it: eight passes that take 1.35 times as long, say, and five at the least
STALE = 256.0  # passes elsewhere after which a region's own ratio counts for a third, and that of the others for the rest
PRIOR_PASSES = 8  # that what is believed of a region counts for at its first
ALIKE = 1 / 64  # contexts that differ by less than this share take the same time, as far as plans go
OCTAVES = tuple(2**i for i in range(14))


@dataclass(slots=True)
class PageHinkley:
    """Two-sided cumulative sums of what exceeds a tolerance (Page, 1954): soon and rarely wrong whether a mean has moved."""

    tolerance: float = TOLERANCE
    threshold: float = THRESHOLD
    _above: float = 0.0
    _below: float = 0.0
    _run_above: tuple[int, float] = (0, 0.0)  # of the residuals since the sum was 0: how many, and their sum
    _run_below: tuple[int, float] = (0, 0.0)

    def add(self, residual: float) -> float | None:
        """Of a series whose mean should be 0. Returns by how much it has moved, when it has; the test then starts anew."""
        evidence = max(-LARGEST_EVIDENCE, min(LARGEST_EVIDENCE, residual))
        self._above = max(0.0, self._above + evidence - self.tolerance)
        self._below = max(0.0, self._below - evidence - self.tolerance)
        self._run_above = _longer(self._run_above, residual) if self._above else (0, 0.0)
        self._run_below = _longer(self._run_below, residual) if self._below else (0, 0.0)
        for total, (num, moved) in ((self._above, self._run_above), (self._below, self._run_below)):
            if total > self.threshold:
                self._above = self._below = 0.0
                self._run_above = self._run_below = (0, 0.0)
                return moved / num
        return None


def _longer(run: tuple[int, float], residual: float) -> tuple[int, float]:
    return run[0] + 1, run[1] + residual


@dataclass(frozen=True, slots=True)
class Drift:
    """Passes of about ``num_rows`` rows take ``ratio`` times what the profile says, since lately."""

    num_rows: int
    ratio: float


class OnlineCost:
    """``router.cost_model.CostModel``: ``base``, corrected. Owned by the thread that plans and passes; others may ask it.

    Regions are about the ``knots``, in octaves by default; between two of them the correction is interpolated, and the
    corrected times never fall. A region without passes of its own has the mean of the others, weighted by what is known; and
    one that has had none for long comes to it. Else one that was found dear while something else ran would seem so for ever,
    for plans would avoid it.
    """

    def __init__(self, base: CostModel, knots: Sequence[int] = OCTAVES) -> None:
        self._base = base
        self._knots = tuple(knots)
        self._log_ratio = [0.0] * len(knots)
        self._num = [0] * len(knots)
        self._freshness = [0.0] * len(knots)  # of the ratios
        self._tests = [PageHinkley() for _ in knots]
        self._slice: tuple[int, TableCost] | None = None  # the corrected table at a context; None: to be made anew
        self.num_drifts = 0

    @property
    def base(self) -> CostModel:
        return self._base

    def step_s(self, num_rows: int, num_context: int) -> float:
        known = self._slice  # one read: another thread may put the table of another context there
        if known is None or abs(num_context - known[0]) > ALIKE * known[0]:
            known = self._slice = (num_context, self._corrected(num_context))
        return known[1].step_s(num_rows, 0)

    def prefill_s(self, num_rows: int, num_context: int) -> float:
        return self._base.prefill_s(num_rows, num_context) * exp(self._mean())

    def draft_s(self, drafter: str, batch: int, draft_len: int) -> float | None:
        return self._base.draft_s(drafter, batch, draft_len)

    def catch_up_s(self, drafter: str, num_tokens: int) -> float | None:
        return self._base.catch_up_s(drafter, num_tokens)

    def ratio(self, num_rows: int) -> float:
        """Of what passes of so many rows take lately to what was measured before."""
        return exp(self._known(self._region(num_rows), self._mean()))

    def observe(self, num_rows: int, num_context: int, step_s: float) -> Drift | None:
        """A pass took ``step_s``. Returns what has changed if passes take another time than they did, all at once."""
        expected_s = self._base.step_s(num_rows, num_context)
        if step_s <= 0.0 or expected_s <= 0.0:
            return None
        at = self._region(num_rows)
        self._visit(at)
        found = log(step_s / expected_s)
        residual = max(-LARGEST_STEP, min(LARGEST_STEP, found - self._log_ratio[at]))
        self._num[at] += 1
        step = max(-LARGEST_EVIDENCE, min(LARGEST_EVIDENCE, residual))
        self._log_ratio[at] += step * max(WEIGHT, 1.0 / (PRIOR_PASSES + self._num[at]))
        self._slice = None
        moved = self._tests[at].add(residual) if self._num[at] * WEIGHT > 1.0 else None
        if moved is None:
            return None
        self._log_ratio[at] += moved
        self._slice = None
        self._num[at] = int(0.5 / WEIGHT)  # learn fast for a while, and test again when it is settled
        self.num_drifts += 1
        return Drift(self._knots[at], exp(self._log_ratio[at]))

    def _visit(self, at: int) -> None:
        """A region that has not been visited for long begins with what is believed of it now."""
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
        """Of the nearest knot, by ratio."""
        knots = self._knots
        for i in range(1, len(knots)):
            if num_rows * num_rows < knots[i - 1] * knots[i]:
                return i - 1
        return len(knots) - 1

    def _mean(self) -> float:
        """Over the regions that have seen passes, each counting as much as the EMA remembers of it, and as it is fresh."""
        weights = [min(num, 1.0 / WEIGHT) * known for num, known in zip(self._num, self._freshness, strict=True)]
        total = sum(weights)
        return sum(w * r for w, r in zip(weights, self._log_ratio, strict=True)) / total if total else 0.0

    def _corrected(self, num_context: int) -> TableCost:
        """The table over rows at a context; it is asked for many numbers of rows in a row."""
        mean = self._mean()
        seconds: list[float] = []
        for at, knot in enumerate(self._knots):
            corrected = self._base.step_s(knot, num_context) * exp(self._known(at, mean))
            seconds.append(max(corrected, seconds[-1]) if seconds else corrected)
        return TableCost(self._knots, tuple(seconds))
