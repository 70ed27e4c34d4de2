"""Acceptance of draft tokens over all requests, by drafter, prompt cluster, context length and position.

Each rate is the mean of a Beta posterior whose prior is the next coarser one (empirical Bayes, hierarchical shrinkage):

    all drafters -> drafter -> drafter, cluster -> drafter, cluster, context length        each at every position
"""

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
from pydantic import BaseModel, ConfigDict, JsonValue

from router.assignment import Positions
from router.drafter.matching import Floats, Ints
from router.estimates.decayed import retained

NUM_POSITIONS = 8  # further ones share the last
CONTEXT_LENS = (512, 2048, 8192)  # where one range of context lengths ends and the next begins
NUM_CONTEXTS = len(CONTEXT_LENS) + 1
_PRIOR_REACHED = 2.0  # drafts that the mean of all drafters counts as


class _Counts(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    reached: list[list[float]]
    right: list[list[float]]


class PoolAcceptance:
    """Memory is constant for a pool. Not thread-safe. ``strength``: drafts that the coarser estimate counts as in the finer
    one. ``memory``: drafts that each estimate remembers."""

    def __init__(self, num_clusters: int, strength: float, memory: float) -> None:
        self._num_clusters = num_clusters
        self._strength = strength
        self._memory = memory
        self.drafters: dict[str, int] = {}  # their rows
        # group 0: all; then the clusters; then each cluster's ranges of context length
        self._num_groups = 1 + num_clusters + num_clusters * NUM_CONTEXTS
        self._counts = np.zeros((2, 0, self._num_groups, NUM_POSITIONS))  # reached, right

    def row(self, drafter: str) -> int:
        """Row of a drafter, added if new."""
        row = self.drafters.setdefault(drafter, len(self.drafters))
        if row >= self._counts.shape[1]:
            self._counts = np.pad(self._counts, ((0, 0), (0, 1), (0, 0), (0, 0)))
        return row

    def add(self, rows: Ints, clusters: Ints, context_lens: Ints, reached: Floats, right: Floats) -> None:
        """Adds counts (n, NUM_POSITIONS) by drafter, cluster (NOWHERE: unknown) and context length, each (n,)."""
        known = clusters >= 0
        cells = 1 + self._num_clusters + clusters * NUM_CONTEXTS + np.searchsorted(CONTEXT_LENS, context_lens, side="right")
        groups = np.concatenate([np.zeros(len(rows), np.int64), 1 + clusters[known], cells[known]])
        at = np.concatenate([rows, rows[known], rows[known]]) * self._num_groups + groups
        new = np.stack([self._summed(at, np.concatenate([one, one[known], one[known]])) for one in (reached, right)])
        self._counts = self._counts * retained(new[0, :, :, :1], self._memory) + new

    def num_drafts(self, rows: Ints) -> Floats:
        found: Floats = self._counts[0, rows, 0, 0]
        return found

    def means(self) -> Floats:
        """(drafters, 1 + clusters, contexts, positions) posterior means; the first cluster is the unknown one."""
        reached, right = self._counts
        root = (right[:, 0].sum(axis=0) + 1.0) / (reached[:, 0].sum(axis=0) + 2.0)  # of all drafters, by position
        drafter = (right[:, 0] + _PRIOR_REACHED * root) / (reached[:, 0] + _PRIOR_REACHED)
        end, k = 1 + self._num_clusters, self._strength
        shape = (len(reached), self._num_clusters, NUM_CONTEXTS, NUM_POSITIONS)
        cell_reached, cell_right = reached[:, end:].reshape(shape), right[:, end:].reshape(shape)
        # The prior of a finer estimate excludes that estimate's own counts.
        others, others_right = _without(reached[:, :1], right[:, :1], reached[:, 1:end], right[:, 1:end])
        of_drafter = (others_right + _PRIOR_REACHED * root) / (others + _PRIOR_REACHED)
        around, around_right = _without(reached[:, 1:end, None], right[:, 1:end, None], cell_reached, cell_right)
        of_cluster = (around_right + k * of_drafter[:, :, None]) / (around + k)
        cells = (cell_right + k * of_cluster) / (cell_reached + k)
        unknown = (len(reached), 1, NUM_CONTEXTS, NUM_POSITIONS)
        return np.concatenate([np.broadcast_to(drafter[:, None, None], unknown), cells], axis=1)

    def snapshot(self) -> dict[str, JsonValue]:
        """Without context lengths, which are many and refill quickly."""
        counts = np.round(self._counts[:, :, : 1 + self._num_clusters], 3)
        return {
            drafter: {"reached": counts[0, row].tolist(), "right": counts[1, row].tolist()}
            for drafter, row in self.drafters.items()
            if self._counts[0, row].any()
        }

    def restore(self, snapshot: Mapping[str, JsonValue]) -> None:
        """Raises ValueError for an invalid snapshot; nothing is changed then."""
        shape = (1 + self._num_clusters, NUM_POSITIONS)
        found = {}
        for drafter, value in snapshot.items():
            counts = _Counts.model_validate(value)
            reached, right = np.array(counts.reached), np.array(counts.right)
            if reached.shape != shape or right.shape != shape or (right < 0).any() or (right > reached + 0.01).any():
                raise ValueError(f"the counts of {drafter} must be {shape} and at least 0, and no more right than reached")
            found[drafter] = reached, right
        self.drafters = {drafter: row for row, drafter in enumerate(found)}
        self._counts = np.zeros((2, len(found), self._num_groups, NUM_POSITIONS))
        for row, both in enumerate(found.values()):
            self._counts[:, row, : shape[0]] = both

    def _summed(self, at: Ints, counts: Floats) -> Floats:
        """Counts by drafter and group: (drafters, groups, positions)."""
        size = self._counts.shape[1] * self._num_groups * NUM_POSITIONS
        flat = (at[:, None] * NUM_POSITIONS + np.arange(NUM_POSITIONS)).ravel()
        sums = np.bincount(flat, counts.ravel(), size).astype(np.float64)
        return sums.reshape(-1, self._num_groups, NUM_POSITIONS)


def _without(reached: Floats, right: Floats, part_reached: Floats, part_right: Floats) -> tuple[Floats, Floats]:
    """Counts less those of a part, which has decayed less."""
    rest: Floats = np.maximum(reached - part_reached, 0.0)
    return rest, np.clip(right - part_right, 0.0, rest)


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
