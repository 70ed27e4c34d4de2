"""Acceptance of draft tokens by drafter, prompt cluster, context length and position, with its uncertainty.

Each rate is a Beta posterior whose prior is the next coarser one (empirical Bayes, hierarchical shrinkage):

    all drafters -> drafter -> drafter, cluster -> drafter, cluster, context length        each at every position

Counts decay as newer ones come. The main result is the expected length of a round:

    L = 1 + sum over k < draft_len of a_0 a_1 ... a_k           the bonus token, and each surviving draft token
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from pydantic import BaseModel, ConfigDict, JsonValue

from router.assignment import Positions
from router.matching import NOWHERE, Floats, Ints

NUM_POSITIONS = 8  # told apart; those behind share the last
CONTEXT_LENS = (512, 2048, 8192)  # where one range of context lengths ends and the next begins
NUM_CONTEXTS = len(CONTEXT_LENS) + 1
_PRIOR_REACHED = 2.0  # of a drafter that nobody tried


@dataclass(frozen=True, slots=True)
class Rates:
    """Mean and standard deviation of the posterior at each position of a draft."""

    mean: Floats
    std: Floats

    def expected_len(self, draft_len: int) -> tuple[float, float]:
        """Tokens of a round, bonus token included, and the standard deviation of that expectation (delta method)."""
        at = np.minimum(np.arange(draft_len), len(self.mean) - 1)
        mean, std = self.mean[at], self.std[at]
        survival = np.cumprod(mean)
        slope = np.cumsum(survival[::-1])[::-1] / mean
        by_rate = np.bincount(at, weights=slope, minlength=len(self.mean))  # shared rates err together
        spread = np.sqrt(((by_rate * self.std[: len(by_rate)]) ** 2).sum()) if len(std) else 0.0
        return 1.0 + float(survival.sum()), float(spread)


@dataclass(frozen=True, slots=True)
class Lesson:
    """Draft tokens of a drafter that were right or wrong, by position."""

    drafter: str
    positions: Positions
    cluster: int | None = None
    context_len: int = 0


class _Counts(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    reached: list[list[float]]
    right: list[list[float]]


class AcceptanceTable:
    """Memory is constant for a pool. Not thread-safe.

    Args:
        num_clusters: of prompts.
        strength: drafts that the coarser estimate counts as in the finer one.
        memory: drafts that each estimate remembers.
    """

    def __init__(self, num_clusters: int, strength: float, memory: float) -> None:
        self._num_clusters = num_clusters
        self._strength = strength
        self._memory = memory
        self.drafters: dict[str, int] = {}  # their rows
        # group 0: all; then the clusters; then each cluster's ranges of context length
        self._num_groups = 1 + num_clusters + num_clusters * NUM_CONTEXTS
        self._reached = np.zeros((0, self._num_groups, NUM_POSITIONS))
        self._right = np.zeros((0, self._num_groups, NUM_POSITIONS))

    def row(self, drafter: str) -> int:
        """Row of a drafter, added if new."""
        row = self.drafters.setdefault(drafter, len(self.drafters))
        if row >= len(self._reached):
            more = np.zeros((1, self._num_groups, NUM_POSITIONS))
            self._reached, self._right = np.concatenate([self._reached, more]), np.concatenate([self._right, more])
        return row

    def observe(self, lessons: Sequence[Lesson]) -> None:
        if lessons:
            rows = np.array([self.row(lesson.drafter) for lesson in lessons])
            clusters = np.array([NOWHERE if lesson.cluster is None else lesson.cluster for lesson in lessons])
            contexts = np.array([lesson.context_len for lesson in lessons])
            self.add(rows, clusters, contexts, *counts_of([lesson.positions for lesson in lessons]))

    def add(self, rows: Ints, clusters: Ints, context_lens: Ints, reached: Floats, right: Floats) -> None:
        """Adds (lessons,) of drafters, clusters (NOWHERE: unknown) and context lengths, with counts (lessons,
        NUM_POSITIONS).
        """
        known = clusters >= 0
        cells = 1 + self._num_clusters + clusters * NUM_CONTEXTS + np.searchsorted(CONTEXT_LENS, context_lens, side="right")
        groups = np.concatenate([np.zeros(len(rows), np.int64), 1 + clusters[known], cells[known]])
        at = np.concatenate([rows, rows[known], rows[known]]) * self._num_groups + groups
        new_reached = self._summed(at, np.concatenate([reached, reached[known], reached[known]]))
        new_right = self._summed(at, np.concatenate([right, right[known], right[known]]))
        kept = np.exp(-new_reached[:, :, :1] / self._memory)
        self._reached = self._reached * kept + new_reached
        self._right = self._right * kept + new_right

    def means(self) -> Floats:
        """(drafters, 1 + clusters, contexts, positions) posterior means; the first cluster is the unknown one."""
        return self._posterior()[0]

    def rates(self, drafter: str, cluster: int | None = None, context_len: int = 0) -> Rates:
        """Rates of a drafter for such a request. An untried drafter has the common mean and a large deviation."""
        row = self.row(drafter)
        mean, reached = self._posterior()
        context = bisect_right(CONTEXT_LENS, context_len)
        at = (row, 0 if cluster is None else 1 + cluster, context)
        return Rates(mean[at], np.sqrt(mean[at] * (1.0 - mean[at]) / (reached[at] + 1.0)))

    def num_reached(self, drafter: str) -> float:
        """Number of remembered drafts."""
        row = self.drafters.get(drafter)
        return 0.0 if row is None else float(self._reached[row, 0, 0])

    def snapshot(self) -> dict[str, JsonValue]:
        """Without context lengths, which are many and refill quickly."""
        end = 1 + self._num_clusters
        return {
            drafter: {
                "reached": np.round(self._reached[row, :end], 3).tolist(),
                "right": np.round(self._right[row, :end], 3).tolist(),
            }
            for drafter, row in self.drafters.items()
            if self._reached[row].any()
        }

    def restore(self, snapshot: Mapping[str, JsonValue]) -> None:
        """Raises ValueError for an invalid snapshot; nothing is changed then."""
        shape = (1 + self._num_clusters, NUM_POSITIONS)
        found = []
        for drafter, value in snapshot.items():
            counts = _Counts.model_validate(value)
            reached, right = np.array(counts.reached), np.array(counts.right)
            if reached.shape != shape or right.shape != shape or (right < 0).any() or (right > reached + 0.01).any():
                raise ValueError(f"the counts of {drafter} must be {shape} and at least 0, and no more right than reached")
            found.append((drafter, reached, right))
        self.drafters = {}
        self._reached = np.zeros((0, self._num_groups, NUM_POSITIONS))
        self._right = np.zeros((0, self._num_groups, NUM_POSITIONS))
        for drafter, reached, right in found:
            row = self.row(drafter)
            self._reached[row, : shape[0]], self._right[row, : shape[0]] = reached, right

    def _summed(self, at: Ints, counts: Floats) -> Floats:
        """Counts by drafter and group: (drafters, groups, positions)."""
        size = len(self._reached) * self._num_groups * NUM_POSITIONS
        flat = (at[:, None] * NUM_POSITIONS + np.arange(NUM_POSITIONS)).ravel()
        sums = np.bincount(flat, counts.ravel(), size).astype(np.float64)
        return sums.reshape(-1, self._num_groups, NUM_POSITIONS)

    def _posterior(self) -> tuple[Floats, Floats]:
        """Means and their weights in drafts; both (drafters, 1 + clusters, contexts, positions)."""
        reached, right = self._reached, self._right
        root = (right[:, 0].sum(axis=0) + 1.0) / (reached[:, 0].sum(axis=0) + 2.0)  # of all drafters, by position
        drafter = (right[:, 0] + _PRIOR_REACHED * root) / (reached[:, 0] + _PRIOR_REACHED)
        end, k = 1 + self._num_clusters, self._strength
        shape = (len(reached), self._num_clusters, NUM_CONTEXTS, NUM_POSITIONS)
        cell_reached, cell_right = reached[:, end:].reshape(shape), right[:, end:].reshape(shape)
        # What a finer estimate is shrunk to does not count again what it has seen itself.
        others, others_right = _without(reached[:, :1], right[:, :1], reached[:, 1:end], right[:, 1:end])
        of_drafter = (others_right + _PRIOR_REACHED * root) / (others + _PRIOR_REACHED)
        around, around_right = _without(reached[:, 1:end, None], right[:, 1:end, None], cell_reached, cell_right)
        of_cluster = (around_right + k * of_drafter[:, :, None]) / (around + k)
        cells = (cell_right + k * of_cluster) / (cell_reached + k)
        unknown = (len(reached), 1, NUM_CONTEXTS, NUM_POSITIONS)
        mean = np.concatenate([np.broadcast_to(drafter[:, None, None], unknown), cells], axis=1)
        worth = np.broadcast_to((reached[:, 0] + _PRIOR_REACHED)[:, None, None], unknown)
        finer = cell_reached + np.minimum(k, around + np.minimum(k, others + _PRIOR_REACHED)[:, :, None])
        return mean, np.concatenate([worth, finer], axis=1)


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
