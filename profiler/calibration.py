"""From confidences to probabilities that can be counted on: calibration of prefix survival, fitted and kept up online.

A confidence is conditional: that draft token k is right, given that those before it are. What a planner needs is survival,
the probability that tokens 1 to k are all right. Confidences of neural drafters are too high, and their errors multiply.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import isotonic_regression

from cluster.errors import ModelUnavailable
from profiler.reliability import expected_calibration_error

Floats = NDArray[np.float64]

FILE = "calibration.json"  # in a drafter's folder
_FORMAT = 1
_EPS = 1e-6  # confidences are kept this far from 0 and 1
MIN_RECORDS = 64  # that reach a position before it is fitted
# A geometric grid that holds 1: fitting what was fitted before on the same records finds 1 again, exactly.
TEMPERATURES = np.exp(np.arange(-60, 61) * 0.04)
_TIE = 1e-9  # ECEs nearer to each other than this are equal: the temperature nearest to 1 wins


@dataclass(frozen=True, slots=True)
class Records:
    """N verified drafts of up to K tokens.

    Shapes: confidences (N, K), conditional, as the drafter gave them, anything where nothing was verified;
    num_verified (N,), and num_accepted (N,), at most that.
    """

    confidences: Floats
    num_verified: NDArray[np.int64]
    num_accepted: NDArray[np.int64]

    @classmethod
    def of(cls, drafts: Sequence[tuple[Sequence[float], int]]) -> "Records":
        """Of (confidences of the verified tokens, how many were accepted) each."""
        longest = max((len(confidences) for confidences, _ in drafts), default=0)
        table = np.zeros((len(drafts), longest))
        for row, (confidences, _) in zip(table, drafts, strict=True):
            row[: len(confidences)] = confidences
        lens = np.array([len(confidences) for confidences, _ in drafts], np.int64)
        return cls(table, lens, np.array([num for _, num in drafts], np.int64))

    def __post_init__(self) -> None:
        num, longest = self.confidences.shape
        if self.num_verified.shape != (num,) or self.num_accepted.shape != (num,):
            raise ValueError(f"{num} drafts, but {self.num_verified.shape} and {self.num_accepted.shape} verdicts on them")
        sound = np.all((self.num_accepted >= 0) & (self.num_accepted <= self.num_verified) & (self.num_verified <= longest))
        if not sound:
            raise ValueError("a draft cannot have more accepted than verified tokens, or more of these than confidences")

    def __len__(self) -> int:
        return len(self.confidences)

    @property
    def max_len(self) -> int:
        return int(self.confidences.shape[1])

    def reaching(self, position: int) -> NDArray[np.bool_]:
        """The drafts of which token ``position``, counted from 0, was verified."""
        return self.num_verified > position

    def survived(self, position: int) -> NDArray[np.bool_]:
        """The drafts whose tokens up to ``position`` were all right."""
        return self.num_accepted > position


class Scaling(Protocol):
    """A fitted calibration. Pure, and order-preserving at each position: of two drafts that agree up to a position, the more
    confident one stays the more confident one."""

    def survival(self, confidences: ArrayLike) -> Floats:
        """(N, K) conditional confidences -> (N, K) probabilities that each prefix survives; they never rise along a row."""


@dataclass(frozen=True, slots=True)
class TemperatureScaling:
    """c -> sigmoid(logit(c) / T_k), with a temperature for each position; later positions have that of the last."""

    temperatures: tuple[float, ...] = (1.0,)

    def conditional(self, confidences: Sequence[float], first: int = 0) -> tuple[float, ...]:
        """Of one draft whose first token stands at position ``first``: calibrated conditional confidences."""
        last = len(self.temperatures) - 1
        ts = [self.temperatures[min(first + i, last)] for i in range(len(confidences))]
        return tuple(_scaled(np.asarray(confidences, np.float64), np.array(ts)).tolist())

    def survival(self, confidences: ArrayLike) -> Floats:
        table = np.asarray(confidences, np.float64)
        last = len(self.temperatures) - 1
        ts = np.array([self.temperatures[min(k, last)] for k in range(table.shape[-1])])
        return np.asarray(np.cumprod(_scaled(table, ts), axis=-1), np.float64)


@dataclass(frozen=True, slots=True)
class IsotonicScaling:
    """Of each position a monotone map from the product of the confidences to survival: what temperature scaling is
    compared with. Later positions have the map of the last."""

    maps: tuple[tuple[tuple[float, ...], tuple[float, ...]], ...] = ()

    def survival(self, confidences: ArrayLike) -> Floats:
        raw = np.asarray(np.cumprod(np.asarray(confidences, np.float64), axis=-1), np.float64)
        if not self.maps:
            return raw
        out = np.empty(raw.shape)
        for k in range(raw.shape[-1]):
            xs, ys = self.maps[min(k, len(self.maps) - 1)]
            out[..., k] = np.interp(raw[..., k], xs, ys)
        return np.asarray(np.minimum.accumulate(out, axis=-1), np.float64)


def fit_temperatures(records: Records) -> TemperatureScaling:
    """Sequential Temperature Scaling (DSpark, section 3.2.1): from the first position to the last, the temperature that
    minimises the expected calibration error of the cumulative product, the positions before it kept as they were fitted.

    A position that fewer than MIN_RECORDS drafts reach keeps the temperature of the one before, the first 1.
    """
    temperatures: list[float] = []
    before = np.ones(len(records))
    for k in range(records.max_len):
        reached = records.reaching(k)
        if reached.sum() < MIN_RECORDS:
            break
        logits = _logit(records.confidences[reached, k])
        outcomes = records.survived(k)[reached]
        errors = [expected_calibration_error(before[reached] * _sigmoid(logits / t), outcomes) for t in TEMPERATURES]
        near = np.flatnonzero(np.array(errors) <= min(errors) + _TIE)
        best = near[np.argmin(np.abs(near - len(TEMPERATURES) // 2))]
        temperatures.append(float(TEMPERATURES[best]))
        before = before * _scaled(records.confidences[:, k], np.array(temperatures[-1]))
    return TemperatureScaling(tuple(temperatures) or (1.0,))


def fit_isotonic(records: Records) -> IsotonicScaling:
    """The monotone map of each position that is nearest to the outcomes in the sense of least squares."""
    raw = np.cumprod(records.confidences, axis=-1)
    maps: list[tuple[tuple[float, ...], tuple[float, ...]]] = []
    for k in range(records.max_len):
        reached = records.reaching(k)
        if reached.sum() < MIN_RECORDS:
            break
        xs, where = np.unique(raw[reached, k], return_inverse=True)
        weights = np.bincount(where).astype(np.float64)
        means = np.bincount(where, records.survived(k)[reached].astype(np.float64)) / weights
        ys = np.asarray(isotonic_regression(means, weights=weights).x)
        corners = _corners(ys)
        maps.append((tuple(xs[corners].tolist()), tuple(ys[corners].tolist())))
    return IsotonicScaling(tuple(maps))


def save_scaling(scaling: TemperatureScaling, path: Path, **figures: float) -> None:
    """As JSON. ``figures`` (ECE, AUROC, number of records) stand beside it for readers."""
    content = {"format": _FORMAT, "temperatures": list(scaling.temperatures), "figures": figures}
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def load_scaling(path: Path) -> TemperatureScaling:
    """Raises ModelUnavailable when the file is missing or is no calibration; says why."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise ValueError(f"it has format {content['format']}, not {_FORMAT}")
        temperatures = tuple(float(t) for t in content["temperatures"])
        if not temperatures or not all(0.0 < t < np.inf for t in temperatures):
            raise ValueError("it needs positive temperatures")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelUnavailable(f"{path} is not a calibration ({error!r}); `outrider train` writes them") from error
    return TemperatureScaling(temperatures)


def _corners(ys: Floats) -> NDArray[np.int64]:
    """The points of a step function that linear interpolation needs: both ends of each step."""
    keep = np.ones(len(ys), np.bool_)
    keep[1:-1] = (ys[1:-1] != ys[:-2]) | (ys[1:-1] != ys[2:])
    return np.flatnonzero(keep)


def _scaled(confidences: Floats, temperatures: Floats) -> Floats:
    return _sigmoid(_logit(confidences) / temperatures)


def _logit(confidences: Floats) -> Floats:
    p = np.clip(confidences, _EPS, 1.0 - _EPS)
    return np.asarray(np.log(p) - np.log1p(-p))


def _sigmoid(logits: Floats) -> Floats:
    return np.asarray(1.0 / (1.0 + np.exp(-logits)))
