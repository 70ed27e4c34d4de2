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
from scipy.optimize import isotonic_regression, minimize

from cluster.errors import ModelUnavailable
from profiler.reliability import auroc, expected_calibration_error

Floats = NDArray[np.float64]

FILE = "calibration.json"  # in a drafter's folder
_FORMAT = 1
_EPS = 1e-6  # confidences are kept this far from 0 and 1
MIN_RECORDS = 64  # that come to a position with all before it right, before it is fitted
# Standard deviations of what a fit expects: of the logarithm of a temperature and of an offset, at the first position around
# 1 and 0, and at each later one around those of the position before, for neighbours err alike and late ones are rarely seen.
_FIRST_SPREAD = (0.3, 0.5)
_NEXT_SPREAD = (0.1, 0.05)


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
    """c -> sigmoid(logit(c) / T_k + b_k), with a temperature and an offset for each position; later positions have those of
    the last."""

    temperatures: tuple[float, ...] = (1.0,)
    offsets: tuple[float, ...] = (0.0,)

    def at(self, position: int) -> tuple[float, float]:
        """Temperature and offset."""
        last_temperature, last_offset = len(self.temperatures) - 1, len(self.offsets) - 1
        return self.temperatures[min(position, last_temperature)], self.offsets[min(position, last_offset)]

    def conditional(self, confidences: Sequence[float], first: int = 0) -> tuple[float, ...]:
        """Of one draft whose first token stands at position ``first``: calibrated conditional confidences."""
        return tuple(self._scaled(np.asarray(confidences, np.float64), first).tolist())

    def survival(self, confidences: ArrayLike) -> Floats:
        return np.asarray(np.cumprod(self._scaled(np.asarray(confidences, np.float64), 0), axis=-1), np.float64)

    def _scaled(self, confidences: Floats, first: int) -> Floats:
        of_positions = np.array([self.at(first + k) for k in range(confidences.shape[-1])]).reshape(-1, 2)
        return _sigmoid(_logit(confidences) / of_positions[:, 0] + of_positions[:, 1])


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
    """Sequential temperature scaling (DSpark, section 3.2.1), from the first position to the last, each on the drafts whose
    tokens before it were all right.

    Two things differ. What the paper searches for, the temperature of least calibration error of the product, is noise where
    a few hundred drafts come to a position; here it is the most probable one, given the outcomes and that neighbouring
    positions err alike. And an offset is fitted beside it: no temperature mends confidences that are too high throughout.

    A position that fewer than MIN_RECORDS such drafts reach keeps what the one before has, the first leaves confidences as
    they are.
    """
    found: list[tuple[float, float]] = []
    before, spread = (0.0, 0.0), _FIRST_SPREAD
    for k in range(records.max_len):
        tried = records.reaching(k) & (records.num_accepted >= k)
        if tried.sum() < MIN_RECORDS:
            break
        before = _most_probable(_logit(records.confidences[tried, k]), records.survived(k)[tried], before, spread)
        found.append(before)
        spread = _NEXT_SPREAD
    if not found:
        return TemperatureScaling()
    return TemperatureScaling(tuple(float(np.exp(log_t)) for log_t, _ in found), tuple(offset for _, offset in found))


def _most_probable(
    logits: Floats, outcomes: NDArray[np.bool_], expected: tuple[float, float], spread: tuple[float, float]
) -> tuple[float, float]:
    """Logarithm of the temperature, and offset: of the largest posterior density under independent normal priors."""
    signs = np.where(outcomes, -1.0, 1.0)
    mean, deviation = np.array(expected), np.array(spread)

    def loss(x: Floats) -> tuple[float, Floats]:
        scaled = logits * np.exp(-x[0])
        margins = signs * (scaled + x[1])
        slopes = signs * _sigmoid(margins)  # of log(1 + exp(margin))
        away = (x - mean) / deviation
        gradient = np.array([-(slopes * scaled).sum(), slopes.sum()]) + away / deviation
        return float(np.logaddexp(0.0, margins).sum() + 0.5 * (away**2).sum()), gradient

    log_t, offset = minimize(loss, mean, jac=True, method="BFGS").x.tolist()
    return log_t, offset


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


@dataclass(frozen=True, slots=True)
class Quality:
    """Of predicted survival. Means over the positions that at least MIN_RECORDS drafts reach with all before it right."""

    ece: float | None
    auroc: float | None  # of positions where both outcomes were seen


def quality(survival: ArrayLike, records: Records) -> Quality:
    """``survival`` (N, K) is what was predicted of the records."""
    table = np.asarray(survival, np.float64)
    errors, rankings = [], []
    for k in range(records.max_len):
        reached = records.reaching(k)
        if (reached & (records.num_accepted >= k)).sum() >= MIN_RECORDS:
            predicted, outcomes = table[reached, k], records.survived(k)[reached]
            errors.append(expected_calibration_error(predicted, outcomes))
            ranking = auroc(predicted, outcomes)
            rankings += [] if ranking is None else [ranking]
    return Quality(float(np.mean(errors)) if errors else None, float(np.mean(rankings)) if rankings else None)


def save_scaling(scaling: TemperatureScaling, path: Path, **figures: float) -> None:
    """As JSON. ``figures`` (ECE, AUROC, number of records) stand beside it for readers."""
    content = {
        "format": _FORMAT,
        "temperatures": list(scaling.temperatures),
        "offsets": list(scaling.offsets),
        "figures": figures,
    }
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def load_scaling(path: Path) -> TemperatureScaling:
    """Raises ModelUnavailable when the file is missing or is no calibration; says why."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise ValueError(f"it has format {content['format']}, not {_FORMAT}")
        temperatures = tuple(float(t) for t in content["temperatures"])
        offsets = tuple(float(b) for b in content.get("offsets", (0.0,)))
        if not temperatures or not all(0.0 < t < np.inf for t in temperatures):
            raise ValueError("it needs positive temperatures")
        if not offsets or not np.all(np.isfinite(offsets)):
            raise ValueError("it needs finite offsets")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelUnavailable(f"{path} is not a calibration ({error!r}); `outrider train` writes them") from error
    return TemperatureScaling(temperatures, offsets)


def _corners(ys: Floats) -> NDArray[np.int64]:
    """The points of a step function that linear interpolation needs: both ends of each step."""
    keep = np.ones(len(ys), np.bool_)
    keep[1:-1] = (ys[1:-1] != ys[:-2]) | (ys[1:-1] != ys[2:])
    return np.flatnonzero(keep)


def _logit(confidences: Floats) -> Floats:
    p = np.clip(confidences, _EPS, 1.0 - _EPS)
    return np.asarray(np.log(p) - np.log1p(-p))


def _sigmoid(logits: Floats) -> Floats:
    return np.asarray(1.0 / (1.0 + np.exp(-logits)))
