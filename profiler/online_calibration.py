"""Calibration that keeps itself up: survival of draft prefixes as verification has lately found it."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_EDGES = np.concatenate([[0.0], 1.0 / (1.0 + np.exp(-np.linspace(-4.0, 4.0, 15))), [1.0]])
_NUM_BINS = len(_EDGES) - 1
_AT_ONCE = 32  # records: what a map costs to fit, about a millisecond for all positions, is shared by so many


class OnlineSurvival:
    """Follows one drafter. Sequential like temperature scaling: the predicted survival of a prefix, times the confidence of
    the next token, is put into a bin of that position, and the bins are kept at what came true there.

    A bin starts at what it was told, worth ``doubt`` verifications, so few or one-sided records are never taken for
    certainty; what is old fades with every new verification of its bin, so a drafter that changes is followed. Memory is
    constant: 16 bins for each of ``num_positions`` positions, later ones share the last. Between bins it is linear, and
    monotone, so the order of confidences at a position is kept.

    Args:
        num_positions: told apart.
        memory: verifications that a bin remembers at the most.
        doubt: verifications that the confidence itself is worth.
    """

    def __init__(self, num_positions: int = 8, memory: float = 500.0, doubt: float = 8.0) -> None:
        self._keep = 1.0 - 1.0 / memory
        self._doubt = doubt
        shape = (num_positions, _NUM_BINS)
        self._weight = np.zeros(shape)
        self._told = np.zeros(shape)  # sum of predictions
        self._true = np.zeros(shape)  # how many came true
        self._maps = [self._fitted(position) for position in range(num_positions)]
        self._pending: list[tuple[tuple[float, ...], int]] = []
        self.num_records = 0

    def survival(self, confidences: Sequence[Sequence[float]]) -> list[tuple[float, ...]]:
        """The probability that each prefix of each draft survives; it never rises along a draft."""
        lens = [len(row) for row in confidences]
        table = _table(confidences, lens)
        before = np.ones(len(lens))
        for k in range(table.shape[1]):
            before = table[:, k] = np.minimum(before, np.interp(before * table[:, k], *self._map(k)))
        return [tuple(row[:n]) for row, n in zip(table.tolist(), lens, strict=True)]

    def record(self, confidences: Sequence[float], num_accepted: int) -> None:
        """A draft was verified. ``confidences`` of the tokens that were, the first ``num_accepted`` of which were right.

        Taken up by the dozen: one alone changes little.
        """
        if confidences:
            self.num_records += 1
            self._pending.append((tuple(confidences), num_accepted))
            if len(self._pending) == _AT_ONCE:
                self._take_up()

    def _take_up(self) -> None:
        lens = [len(confidences) for confidences, _ in self._pending]
        table = _table([confidences for confidences, _ in self._pending], lens)
        num_verified = np.array(lens)
        num_accepted = np.array([num for _, num in self._pending])
        self._pending.clear()
        before = np.ones(len(lens))
        for k in range(table.shape[1]):
            told = before * table[:, k]
            before = np.minimum(before, np.interp(told, *self._map(k)))
            self._count(min(k, len(self._maps) - 1), told[num_verified > k], num_accepted[num_verified > k] > k)
        self._maps = [self._fitted(position) for position in range(len(self._maps))]

    def _count(self, position: int, told: Floats, came_true: NDArray[np.bool_]) -> None:
        at = np.minimum(np.searchsorted(_EDGES, told, side="right") - 1, _NUM_BINS - 1)
        num = np.bincount(at, minlength=_NUM_BINS)
        kept = self._keep**num
        self._weight[position] = self._weight[position] * kept + num
        self._told[position] = self._told[position] * kept + np.bincount(at, told, _NUM_BINS)
        self._true[position] = self._true[position] * kept + np.bincount(at, came_true, _NUM_BINS)

    def _map(self, position: int) -> tuple[Floats, Floats]:
        """Corners of the map of a position, constant beyond the outer ones."""
        return self._maps[min(position, len(self._maps) - 1)]

    def _fitted(self, position: int) -> tuple[Floats, Floats]:
        weight, told = self._weight[position], self._told[position]
        middle = (_EDGES[:-1] + _EDGES[1:]) / 2
        xs = np.clip(np.where(weight > 0, told / np.maximum(weight, 1e-12), middle), _EDGES[:-1], _EDGES[1:])
        ys = (self._true[position] + self._doubt * xs) / (weight + self._doubt)
        return xs, _pooled(ys, weight + self._doubt)


def _table(confidences: Sequence[Sequence[float]], lens: Sequence[int]) -> Floats:
    table = np.ones((len(lens), max(lens, default=0)))
    for row, values in zip(table, confidences, strict=True):
        row[: len(values)] = values
    return table


def _pooled(values: Floats, weights: Floats) -> Floats:
    """The nearest values that never fall, by least squares: pool adjacent violators."""
    pools: list[list[float]] = []  # value, weight, number of members
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        pools.append([value, weight, 1])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            late = pools.pop()
            early = pools[-1]
            total = early[1] + late[1]
            pools[-1] = [(early[0] * early[1] + late[0] * late[1]) / total, total, early[2] + late[2]]
    return np.repeat([pool[0] for pool in pools], [int(pool[2]) for pool in pools])
