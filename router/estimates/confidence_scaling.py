"""Slope and offset of confidences, learned online: errors that all confidences share show after a few drafts."""

import numpy as np
from numpy.typing import NDArray

from router.cost_model import Floats
from router.estimates.decayed import retained

_UNCHANGED = np.array([1.0, 0.0])  # slope, offset
_BEFORE = np.diag([0.3**-2.0, 0.5**-2.0])  # prior precision, from standard deviations
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
        self._precision = np.tile(_BEFORE, (num_positions, 1, 1))
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

        kept = retained(num.astype(np.float64), self._memory)[:, None, None]
        former, prior = kept * self._precision[at], (1.0 - kept) * _BEFORE
        surprise = np.where(is_right, 0.5, -0.5)
        weighed = former @ self._lines[at, :, None] + prior @ _UNCHANGED[:, None]
        weighed += np.stack([sums(surprise * logits), sums(surprise)], axis=-1)[..., None]
        lines = self._lines[at]
        for _ in range(_NUM_STEPS):
            curvature = _bound(lines[positions, 0] * logits + lines[positions, 1])
            sloped, squares = sums(curvature * logits), sums(curvature * logits * logits)
            added = np.stack([squares, sloped, sloped, sums(curvature)], axis=-1).reshape(-1, 2, 2)
            bounded = former + prior + added
            lines = np.linalg.solve(bounded, weighed)[..., 0]
        lines[:, 0] = np.maximum(lines[:, 0], _LEAST_SLOPE)
        self._lines[at], self._precision[at] = lines, bounded


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
    return np.asarray(0.5 + 0.5 * np.tanh(logits / 2), np.float64)  # does not overflow
