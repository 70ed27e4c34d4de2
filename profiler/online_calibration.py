"""Calibration that keeps itself up: survival of draft prefixes as verification has lately found it."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

_EDGES = np.concatenate([[0.0], 1.0 / (1.0 + np.exp(-np.linspace(-4.0, 4.0, 15))), [1.0]])
_NUM_BINS = len(_EDGES) - 1
_STEPS = 1000
_GRID = np.linspace(0.0, 1.0, _STEPS + 1)
# Records: what the maps cost to fit, half a millisecond, is shared by so many. The more are known, the less a few change.
_FIRST_AT_ONCE = 32
_MOST_AT_ONCE = 128


class OnlineSurvival:
    """Follows one drafter: how often tokens of a confidence came true at each position, given that those before them did.

    Survival is the product of these (as in Kaplan and Meier's estimator), so drafts of which only a part was verified, for
    whatever reason, teach as far as they were. A bin starts at what the position before found, the first at what it
    was told, worth ``doubt`` verifications, so few or one-sided records are never taken for certainty; what is old fades
    with every new verification of its bin, so a drafter that changes is followed. Memory is constant: 16 bins for each of
    ``num_positions`` positions, later ones share the last. Between bins it is linear, and monotone: at a position the more
    confident token stays the more probable one.

    Args:
        num_positions: told apart.
        memory: verifications that a bin remembers at the most.
        doubt: verifications that what was believed before is worth.
    """

    def __init__(self, num_positions: int = 8, memory: float = 500.0, doubt: float = 8.0) -> None:
        self._keep = 1.0 - 1.0 / memory
        self._doubt = doubt
        shape = (num_positions, _NUM_BINS)
        self._weight = np.zeros(shape)
        self._told = np.zeros(shape)  # sum of confidences
        self._true = np.zeros(shape)  # how many came true
        self._maps = [_GRID.tolist()] * num_positions  # what a confidence in steps means at a position
        self._pending: list[tuple[tuple[float, ...], int]] = []
        self.num_records = 0

    def survival(self, confidences: Sequence[Sequence[float]]) -> list[tuple[float, ...]]:
        """The probability that each prefix of each draft survives; it never rises along a draft."""
        return [self._survival(row) for row in confidences]

    def _survival(self, confidences: Sequence[float]) -> tuple[float, ...]:
        """In plain Python: a draft is too short for numpy to pay."""
        survival, found = 1.0, []
        last = len(self._maps) - 1
        for position, confidence in enumerate(confidences):
            survival *= self._maps[min(position, last)][round(confidence * _STEPS)]
            found.append(survival)
        return tuple(found)

    def record(self, confidences: Sequence[float], num_accepted: int) -> None:
        """A draft was verified. ``confidences`` of the tokens that were, the first ``num_accepted`` of which were right.

        Taken up by the dozen: one alone changes little.
        """
        if confidences:
            self.num_records += 1
            self._pending.append((tuple(confidences[: num_accepted + 1]), num_accepted))
            if len(self._pending) >= min(max(_FIRST_AT_ONCE, self.num_records // 8), _MOST_AT_ONCE):
                self._take_up()

    def _take_up(self) -> None:
        tried = [(k, confidence, k < num) for row, num in self._pending for k, confidence in enumerate(row)]
        self._pending.clear()
        told = np.array([confidence for _, confidence, _ in tried])
        bins = np.minimum(np.searchsorted(_EDGES, told, side="right") - 1, _NUM_BINS - 1)
        at = self._positions(1 + max(k for k, _, _ in tried))[[k for k, _, _ in tried]] * _NUM_BINS + bins

        def sums(values: ArrayLike | None = None) -> Floats:
            return np.bincount(at, values, self._weight.size).reshape(self._weight.shape).astype(np.float64)

        num = sums()
        kept = self._keep**num
        self._weight = self._weight * kept + num
        self._told = self._told * kept + sums(told)
        self._true = self._true * kept + sums([came_true for _, _, came_true in tried])
        before = _GRID
        for position in range(len(self._maps)):
            before = self._fitted(position, before)
            self._maps[position] = before.tolist()

    def _positions(self, num: int) -> NDArray[np.intp]:
        return np.minimum(np.arange(num), len(self._weight) - 1)

    def _fitted(self, position: int, before: Floats) -> Floats:
        """What each of _STEPS + 1 confidences means at a position, (_STEPS + 1,); ``before``: at the position before it."""
        weight, told = self._weight[position], self._told[position]
        middle = (_EDGES[:-1] + _EDGES[1:]) / 2
        xs = np.clip(np.where(weight > 0, told / np.maximum(weight, 1e-12), middle), _EDGES[:-1], _EDGES[1:])
        told_before = np.interp(xs, _GRID, before)
        ys = (self._true[position] + self._doubt * told_before) / (weight + self._doubt)
        return np.interp(_GRID, xs, _pooled(ys, weight + 1.0))


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
