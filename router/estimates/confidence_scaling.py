"""Slope and offset of confidences, learned online: errors that all confidences share show after a few drafts."""

import numpy as np
from numpy.typing import NDArray

from router.estimates.decayed import retained
from router.matching import Floats

_UNCHANGED = np.array([1.0, 0.0])  # slope, offset
_DEVIATIONS = (0.3, 0.5)  # prior standard deviations
_BEFORE = np.array([_DEVIATIONS[0] ** -2.0, 0.0, _DEVIATIONS[1] ** -2.0])  # prior precision, a matrix as in ``_product``
_LEAST_SLOPE = 0.05  # keeps the order of confidences
_NUM_STEPS = 3
_MARGIN = 1e-3
_MOST_AT_ONCE = 512


def num_due(num_known: int, num_first: int) -> int:
    """New records until the next fit, which takes half a millisecond: ``num_first`` at first, more as records grow."""
    return min(max(num_first, num_known // 4), _MOST_AT_ONCE)


class OnlineScaling:
    """c -> sigmoid(a_k logit(c) + b_k) at each of ``num_positions`` positions (Platt scaling), by Bayesian logistic
    regression with a Gaussian prior around the identity. Old tokens fade; ``memory`` tokens per position are remembered."""

    def __init__(self, num_positions: int, memory: float) -> None:
        self._memory = memory
        self._precision = np.tile(_BEFORE, (num_positions, 1))
        self._lines = np.tile(_UNCHANGED, (num_positions, 1))

    def __call__(self, confidences: Floats, positions: NDArray[np.intp]) -> Floats:
        """Scaled confidences; the shapes must broadcast."""
        slopes, offsets = self._lines[:, 0], self._lines[:, 1]
        return sigmoid(slopes[positions] * logit(confidences, _MARGIN) + offsets[positions])

    def learn(self, confidences: Floats, positions: NDArray[np.intp], is_right: NDArray[np.bool_]) -> None:
        """Learns tokens before which all were right, each [n]."""
        logits = logit(confidences, _MARGIN)
        at, positions, num = np.unique(positions, return_inverse=True, return_counts=True)  # the others stay as they are

        def sums(values: Floats) -> Floats:
            return np.asarray(np.bincount(positions, values, len(at)), np.float64)

        kept = retained(num.astype(np.float64), self._memory)
        precision = kept[:, None] * self._precision[at] + (1.0 - kept)[:, None] * _BEFORE
        weighed = _product(kept[:, None] * self._precision[at], self._lines[at])
        weighed += (1.0 - kept)[:, None] * _product(_BEFORE, _UNCHANGED)
        surprise = np.where(is_right, 0.5, -0.5)
        weighed += np.stack([sums(surprise * logits), sums(surprise)], axis=-1)
        lines = self._lines[at]
        for _ in range(_NUM_STEPS):
            curvature = _bound(lines[positions, 0] * logits + lines[positions, 1])
            sloped = curvature * logits
            bounded = precision + np.stack([sums(sloped * logits), sums(sloped), sums(curvature)], axis=-1)
            lines = _solved(bounded, weighed)
        lines[:, 0] = np.maximum(lines[:, 0], _LEAST_SLOPE)
        self._lines[at], self._precision[at] = lines, bounded


def _product(matrix: Floats, vector: Floats) -> Floats:
    """Symmetric matrices (..., 3), stored as elements 00, 01 and 11, times vectors (..., 2)."""
    a, b, c = matrix[..., 0], matrix[..., 1], matrix[..., 2]
    x, y = vector[..., 0], vector[..., 1]
    return np.stack([a * x + b * y, b * x + c * y], axis=-1)


def _solved(matrix: Floats, vector: Floats) -> Floats:
    """x of matrix x = vector, for positive definite matrices stored as in ``_product``."""
    a, b, c = matrix[..., 0], matrix[..., 1], matrix[..., 2]
    inverse = np.stack([c, -b, a], axis=-1) / (a * c - b * b)[..., None]
    return _product(inverse, vector)


def _bound(logits: Floats) -> Floats:
    """Curvature of the parabola that touches log(1 + exp(x)) at x and -x from above (Jaakkola and Jordan 2000): its steps
    never overshoot, unlike Newton's near confidences of 0 or 1."""
    size = np.maximum(np.abs(logits), 1e-6)
    return np.asarray(np.tanh(size / 2) / (2 * size), np.float64)


def logit(confidences: Floats, margin: float) -> Floats:
    """``margin``: distance that confidences keep from 0 and 1."""
    inside = np.clip(confidences, margin, 1.0 - margin)
    return np.asarray(np.log(inside / (1.0 - inside)), np.float64)


def sigmoid(logits: Floats) -> Floats:
    return np.asarray(1.0 / (1.0 + np.exp(-logits)), np.float64)
