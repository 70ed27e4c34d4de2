"""Acceptance of draft tokens over all requests, by drafter and position.

Each rate is the mean of a Beta posterior whose prior is the mean of all drafters at that position (empirical Bayes).
"""

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
from pydantic import BaseModel, ConfigDict, JsonValue

from router.assignment import Positions
from router.drafter.matching import Floats, Ints
from router.estimates.decayed import retained

NUM_POSITIONS = 8  # further ones share the last
_PRIOR_REACHED = 2.0  # drafts that the mean of all drafters counts as


class _Counts(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    reached: list[float]
    right: list[float]


class PoolAcceptance:
    """Memory is constant for a pool. Not thread-safe. ``memory``: drafts that each estimate remembers."""

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self.drafters: dict[str, int] = {}  # their rows
        self._counts = np.zeros((2, 0, NUM_POSITIONS))  # reached, right

    def row(self, drafter: str) -> int:
        """Row of a drafter, added if new."""
        row = self.drafters.setdefault(drafter, len(self.drafters))
        if row >= self._counts.shape[1]:
            self._counts = np.pad(self._counts, ((0, 0), (0, 1), (0, 0)))
        return row

    def add(self, rows: Ints, reached: Floats, right: Floats) -> None:
        """Adds counts (n, NUM_POSITIONS) by drafter (n,)."""
        new = np.zeros_like(self._counts)
        for sums, counts in zip(new, (reached, right), strict=True):
            np.add.at(sums, rows, counts)
        self._counts = self._counts * retained(new[0, :, :1], self._memory) + new

    def num_drafts(self, rows: Ints) -> Floats:
        found: Floats = self._counts[0, rows, 0]
        return found

    def means(self) -> Floats:
        """(drafters, positions) posterior means."""
        reached, right = self._counts
        root = (right.sum(axis=0) + 1.0) / (reached.sum(axis=0) + 2.0)  # of all drafters
        found: Floats = (right + _PRIOR_REACHED * root) / (reached + _PRIOR_REACHED)
        return found

    def snapshot(self) -> dict[str, JsonValue]:
        counts = np.round(self._counts, 3)
        return {
            drafter: {"reached": counts[0, row].tolist(), "right": counts[1, row].tolist()}
            for drafter, row in self.drafters.items()
            if counts[0, row].any()
        }

    def restore(self, snapshot: Mapping[str, JsonValue]) -> None:
        """Raises ValueError for an invalid snapshot; nothing is changed then."""
        found = {}
        for drafter, value in snapshot.items():
            counts = _Counts.model_validate(value)
            both = reached, right = np.array(counts.reached), np.array(counts.right)
            shapes = {reached.shape, right.shape}
            if shapes != {(NUM_POSITIONS,)} or (right < 0).any() or (right > reached + 0.01).any():
                text = f"{NUM_POSITIONS} and at least 0, and no more right than reached"
                raise ValueError(f"the counts of {drafter} must be {text}")
            found[drafter] = both
        self.drafters = {drafter: row for row, drafter in enumerate(found)}
        self._counts = np.array(list(found.values())).reshape(-1, 2, NUM_POSITIONS).swapaxes(0, 1)


def counts_of(positions: Sequence[Positions]) -> tuple[Floats, Floats]:
    """Reached and right counts; both (len(positions), NUM_POSITIONS)."""
    return _padded([p.num_reached for p in positions]), _padded([p.num_right for p in positions])


def _padded(counts: Sequence[tuple[int, ...]]) -> Floats:
    lens = np.fromiter(map(len, counts), np.int64, len(counts))
    flat = np.fromiter(chain.from_iterable(counts), np.float64, int(lens.sum()))
    ends = np.cumsum(lens)
    position = np.minimum(np.arange(len(flat)) - np.repeat(ends - lens, lens), NUM_POSITIONS - 1)
    at = np.repeat(np.arange(len(counts)), lens) * NUM_POSITIONS + position
    sums = np.bincount(at, flat, len(counts) * NUM_POSITIONS).astype(np.float64)
    return sums.reshape(-1, NUM_POSITIONS)
