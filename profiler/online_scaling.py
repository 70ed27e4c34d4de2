"""Slope and offset of confidences, learned online: what is wrong with all of them alike is known after a few drafts."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_UNCHANGED = np.array([1.0, 0.0])  # slope, offset
_DEVIATIONS = np.array([0.3, 0.5])  # of them among drafters, as far as nothing is known
_LEAST_SLOPE = 0.05  # the more confident token stays the more probable one
_NUM_STEPS = 3
_EPS = 1e-3  # confidences are kept this far from 0 and 1
_MOST_AT_ONCE = 512


def is_due(num_pending: int, num_known: int, num_first: int) -> bool:
    """Whether so many new records are enough to fit anew, which takes half a millisecond that they share: ``num_first`` at
    first; the more are known, the less a few change."""
    return num_pending >= min(max(num_first, num_known // 4), _MOST_AT_ONCE)


class OnlineScaling:
    """c -> sigmoid(a_k logit(c) + b_k) at each of ``num_positions`` positions (Platt's scaling), a_k and b_k kept up by
    logistic regression with a Gaussian belief in them. What is old fades, ``memory`` tokens of a position are remembered at
    the most; without any the scaling changes nothing.
    """

    def __init__(self, num_positions: int, memory: float) -> None:
        self._keep = 1.0 - 1.0 / memory
        self._before = np.diag(_DEVIATIONS**-2.0)  # precision
        self._precision = np.tile(self._before, (num_positions, 1, 1))
        self._lines = np.tile(_UNCHANGED, (num_positions, 1))

    def __call__(self, confidences: Floats, positions: NDArray[np.intp]) -> Floats:
        """Scaled confidences; the shapes must broadcast."""
        slopes, offsets = self._lines[:, 0], self._lines[:, 1]
        return _sigmoid(slopes[positions] * _logit(confidences) + offsets[positions])

    def learn(self, confidences: Floats, positions: NDArray[np.intp], came_true: NDArray[np.bool_]) -> None:
        """Of tokens before which all were right, each [n]."""
        told = np.stack([_logit(confidences), np.ones_like(confidences)], axis=-1)
        at, positions, num = np.unique(positions, return_inverse=True, return_counts=True)  # the others stay as they are
        kept = (self._keep**num)[:, None, None]
        precision = kept * self._precision[at] + (1.0 - kept) * self._before
        weighed = kept * self._precision[at] @ self._lines[at, :, None] + (1.0 - kept) * (self._before @ _UNCHANGED)[:, None]
        np.add.at(weighed[:, :, 0], positions, (came_true - 0.5)[:, None] * told)
        lines = self._lines[at]
        for _ in range(_NUM_STEPS):
            bounded = precision.copy()
            curvature = _bound((told * lines[positions]).sum(-1))
            np.add.at(bounded, positions, curvature[:, None, None] * told[:, :, None] * told[:, None, :])
            lines = np.linalg.solve(bounded, weighed)[:, :, 0]
        lines[:, 0] = np.maximum(lines[:, 0], _LEAST_SLOPE)
        self._lines[at], self._precision[at] = lines, bounded


def _bound(logits: Floats) -> Floats:
    """The curvature of a parabola that touches log(1 + exp(x)) at x and -x and lies above it elsewhere (Jaakkola and Jordan,
    2000): steps along such parabolas never overshoot, where those of Newton do if confidences are near 0 or 1."""
    size = np.maximum(np.abs(logits), 1e-6)
    return np.asarray(np.tanh(size / 2) / (2 * size), np.float64)


def _logit(confidences: Floats) -> Floats:
    inside = np.clip(confidences, _EPS, 1.0 - _EPS)
    return np.asarray(np.log(inside / (1.0 - inside)), np.float64)


def _sigmoid(logits: Floats) -> Floats:
    return np.asarray(1.0 / (1.0 + np.exp(-logits)), np.float64)
