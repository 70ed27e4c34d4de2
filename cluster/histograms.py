"""Histograms with fixed buckets: counted by one thread, shipped with the status, exported by ``/metrics``."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from typing import Self


@dataclass(frozen=True, slots=True)
class HistogramCounts:
    """``counts[i]``: values above ``bounds[i - 1]`` and at most ``bounds[i]``; the last count has those above all bounds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float = 0.0  # sum of the values

    def plus(self, other: "HistogramCounts") -> Self:
        """Raises ValueError unless both have the same bounds."""
        if other.bounds != self.bounds:
            raise ValueError(f"histograms of bounds {self.bounds} and {other.bounds} cannot be added")
        counts = tuple([mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)])
        return type(self)(self.bounds, counts, self.total + other.total)

    def cumulative(self) -> list[int]:
        """Values at most each bound; then all."""
        return list(accumulate(self.counts))


class Histogram:
    """Other threads may call ``snapshot``; a value that is noted meanwhile may be in the counts and not yet in the total."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def note(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> HistogramCounts:
        return HistogramCounts(self._bounds, tuple(self._counts), self._total)


def summed(histograms: Iterable[HistogramCounts]) -> HistogramCounts | None:
    """None: there are none. Raises ValueError unless all have the same bounds."""
    found = list(histograms)
    return reduce(HistogramCounts.plus, found) if found else None
