"""Quality of predicted probabilities: calibration error, ranking, and reliability diagrams."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

NUM_BINS = 15


@dataclass(frozen=True, slots=True)
class Bins:
    """Predictions in bins of equal width over [0, 1]; empty bins hold 0. Shapes: (NUM_BINS,)."""

    num: NDArray[np.int64]
    predicted: NDArray[np.float64]  # mean prediction
    observed: NDArray[np.float64]  # share that came true

    @classmethod
    def of(cls, predictions: ArrayLike, outcomes: ArrayLike) -> "Bins":
        p, y = np.asarray(predictions, np.float64).ravel(), np.asarray(outcomes, np.float64).ravel()
        at = _bin_of(p)
        num = np.bincount(at, minlength=NUM_BINS)
        filled = np.maximum(num, 1)
        return cls(num, np.bincount(at, p, NUM_BINS) / filled, np.bincount(at, y, NUM_BINS) / filled)


def _bin_of(predictions: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.minimum((predictions * NUM_BINS).astype(np.int64), NUM_BINS - 1)


def expected_calibration_error(predictions: ArrayLike, outcomes: ArrayLike) -> float:
    """Mean absolute difference of predicted and observed shares, weighted by bin size (Naeini et al. 2015); 0 if empty."""
    bins = Bins.of(predictions, outcomes)
    return float(np.sum(bins.num * np.abs(bins.predicted - bins.observed)) / max(1, bins.num.sum()))


def calibrated_error(predictions: ArrayLike) -> float:
    """The calibration error that right predictions are expected to show by chance: in a bin with probabilities p the
    difference is about normal with variance sum p (1 - p). 0 if empty."""
    p = np.asarray(predictions, np.float64).ravel()
    variances = np.bincount(_bin_of(p), p * (1.0 - p), NUM_BINS)
    return float(np.sqrt(2.0 / np.pi * variances).sum() / max(1, len(p)))


def auroc(scores: ArrayLike, outcomes: ArrayLike) -> float | None:
    """Probability that a positive outcome scored above a negative one, ties counting half; None with one class only."""
    s, y = np.asarray(scores, np.float64).ravel(), np.asarray(outcomes, np.bool_).ravel()
    from scipy.stats import rankdata

    num_true, num_false = int(y.sum()), int((~y).sum())
    if not num_true or not num_false:
        return None
    return float((rankdata(s)[y].sum() - num_true * (num_true + 1) / 2) / (num_true * num_false))


def plot_reliability(curves: Sequence[tuple[str, ArrayLike, ArrayLike]], path: Path, title: str) -> None:
    """Writes a PNG with (name, predictions, outcomes) per curve. The area of a dot is its share of the predictions."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="0.7", linewidth=1)
    for name, predictions, outcomes in curves:
        bins = Bins.of(predictions, outcomes)
        at = bins.num > 0
        (line,) = axes.plot(bins.predicted[at], bins.observed[at], linewidth=1)
        sizes = 10 + 200 * bins.num[at] / max(1, bins.num.sum())
        label = f"{name}, ECE {expected_calibration_error(predictions, outcomes):.3f}"
        axes.scatter(bins.predicted[at], bins.observed[at], s=sizes, color=line.get_color(), label=label)
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="predicted survival", ylabel="observed", title=title)
    axes.legend(loc="upper left", frameon=False)
    figure.savefig(path, dpi=120)
