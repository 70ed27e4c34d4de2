"""Latency surfaces: seconds as a function of two counts, in three forms that are compared on held-out points.

Every form is finite, positive where it was fitted, and never falls as either count grows.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from router.cost_model import Floats

NUM_FOLDS = 5
MIN_POINTS = 4
_SEED = 0
_PROJECTIONS = 40  # of Dykstra's algorithm; measurements converge in about twelve

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Coefficient = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Kind(StrEnum):
    """The two counts of a surface."""

    PASS = "pass"  # rows, context tokens
    DRAFT = "draft"  # batch, draft length
    CATCH_UP = "catch_up"  # tokens, unused


@dataclass(frozen=True, slots=True)
class LatencyPoint:
    x: int
    y: int
    seconds: float


@dataclass(frozen=True)
class Linear:
    """AdaSpec's form.

    Of a pass, equation 2: alpha * context + gamma * rows + delta. Of a draft, equation 3 with one row per request and
    pass: SL * delta + gamma * b * SL + alpha * b * SL * (SL - 1) / 2; the common initial context is part of gamma.
    """

    kind: Kind
    delta: Coefficient
    gamma: Coefficient
    alpha: Coefficient
    form: Literal["linear"] = "linear"

    def at(self, x: int, y: int) -> float:
        if self.kind is Kind.DRAFT:
            return y * (self.delta + x * (self.gamma + self.alpha * (y - 1) / 2))
        return self.delta + self.gamma * x + self.alpha * y

    @property
    def knots(self) -> tuple[int, ...]:
        """First counts between which, and beyond which, it is linear."""
        return (1, 2)


@dataclass(frozen=True)
class Piecewise:
    """FASER's form (equations 11 and 12): linear in both counts, with one knee.

    In the paper the knee lies over the share of compute, which is fixed in a profile; here, over the first count: more
    rows cost little until the device is full.
    """

    constant: Coefficient
    before: Coefficient  # slope over x up to the knee
    beyond: Coefficient  # slope beyond it
    slope_y: Coefficient
    knee: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    form: Literal["piecewise"] = "piecewise"

    def at(self, x: int, y: int) -> float:
        bent = self.before * min(x, self.knee) + self.beyond * max(0.0, x - self.knee)
        return self.constant + bent + self.slope_y * y

    @property
    def knots(self) -> tuple[int, ...]:
        knee = max(1, int(self.knee))
        return tuple(sorted({1, knee, knee + 1, knee + 2}))


@dataclass(frozen=True)
class MonotoneTable:
    """Values on a grid that never fall along it: linear between lines and beyond the last, constant before the first.

    ``seconds[i][j]`` is at (xs[i], ys[j]).
    """

    xs: Annotated[tuple[int, ...], Field(min_length=1)]
    ys: Annotated[tuple[int, ...], Field(min_length=1)]
    seconds: tuple[tuple[Seconds, ...], ...]
    form: Literal["table"] = "table"

    def __post_init__(self) -> None:
        values = np.array(self.seconds)
        if values.shape != (len(self.xs), len(self.ys)):
            raise ValueError(f"a table of {values.shape} does not fit {len(self.xs)} times {len(self.ys)} lines")
        if any(a >= b for lines in (self.xs, self.ys) for a, b in pairwise(lines)):
            raise ValueError(f"the lines of a table must ascend strictly, got {list(self.xs)} and {list(self.ys)}")
        if (np.diff(values, axis=0) < 0).any() or (np.diff(values, axis=1) < 0).any():
            raise ValueError("the values of a table must never fall")

    def at(self, x: int, y: int) -> float:
        # One slope beyond the last lines for all others: different slopes could make values fall along them.
        slope_x, slope_y = self._slopes
        extra = slope_x * max(0, x - self.xs[-1]) + slope_y * max(0, y - self.ys[-1])
        i, along = _place(self.xs, x)
        low = self._across(i, y)
        high = low if along == 0.0 else self._across(i + 1, y)
        return extra + low + along * (high - low)

    @property
    def knots(self) -> tuple[int, ...]:
        return (*self.xs, self.xs[-1] + 1)

    def _across(self, i: int, y: int) -> float:
        j, along = _place(self.ys, y)
        row = self.seconds[i]
        low: float = row[j]
        high: float = low if along == 0.0 else row[j + 1]
        return low + along * (high - low)

    @cached_property
    def _slopes(self) -> tuple[float, float]:
        """Mean slopes between the last two of ``xs`` and of ``ys``."""
        values = np.array(self.seconds)
        return _last_slope(self.xs, values), _last_slope(self.ys, values.T)


def _last_slope(lines: tuple[int, ...], values: Floats) -> float:
    return 0.0 if len(lines) == 1 else float((values[-1] - values[-2]).mean()) / (lines[-1] - lines[-2])


AnyForm = Linear | Piecewise | MonotoneTable
Form = Annotated[AnyForm, Field(discriminator="form")]
FORMS = ("linear", "piecewise", "table")


@dataclass(frozen=True, slots=True)
class FormComparison:
    """Three forms of one surface."""

    fits: Mapping[str, AnyForm]  # on all points
    held_out: Mapping[str, float]  # mean absolute percentage errors (fractions) on unseen points

    @property
    def best(self) -> str:
        return min(self.held_out, key=self.held_out.__getitem__)


def compare(kind: Kind, points: Sequence[LatencyPoint]) -> FormComparison:
    """Raises ValueError: fewer than MIN_POINTS points, repeated points, or durations that are not positive and finite."""
    if len(points) < MIN_POINTS or len({(p.x, p.y) for p in points}) < len(points):
        raise ValueError(f"a surface needs {MIN_POINTS} points that differ, got {[(p.x, p.y) for p in points]}")
    if not all(0.0 < p.seconds < float("inf") for p in points):
        raise ValueError(f"durations must be finite and above 0, got {[p.seconds for p in points]}")
    fits: dict[str, Callable[[Sequence[LatencyPoint]], AnyForm]] = {
        "linear": lambda seen: fit_linear(kind, seen),
        "piecewise": fit_piecewise,
        "table": fit_table,
    }
    errors: dict[str, list[float]] = {form: [] for form in fits}
    for held_out in folds(len(points)):
        seen = [point for i, point in enumerate(points) if i not in held_out]
        for form, fit in fits.items():
            fitted = fit(seen)
            errors[form] += [abs(fitted.at(p.x, p.y) - p.seconds) / p.seconds for p in (points[i] for i in held_out)]
    means = {form: float(np.mean(found)) for form, found in errors.items()}
    return FormComparison({form: fit(points) for form, fit in fits.items()}, means)


def folds(num_points: int) -> list[frozenset[int]]:
    """NUM_FOLDS random folds; deterministic."""
    order = np.random.default_rng(_SEED).permutation(num_points)
    return [frozenset(part.tolist()) for part in np.array_split(order, min(NUM_FOLDS, num_points))]


def fit_linear(kind: Kind, points: Sequence[LatencyPoint]) -> Linear:
    x, y, seconds = _columns(points)
    columns = (y, x * y, x * y * (y - 1) / 2) if kind is Kind.DRAFT else (np.ones_like(x), x, y)
    delta, gamma, alpha = _non_negative(columns, seconds)[0]
    return Linear(kind, delta, gamma, alpha)


def fit_piecewise(points: Sequence[LatencyPoint]) -> Piecewise:
    """The knee with the least error among the points' first counts."""
    x, y, seconds = _columns(points)
    found = []
    for knee in np.unique(x).tolist():
        columns = (np.ones_like(x), np.minimum(x, knee), np.maximum(0.0, x - knee), y)
        (constant, before, beyond, slope_y), error = _non_negative(columns, seconds)
        found.append((error, Piecewise(constant, before, beyond, slope_y, knee)))
    return min(found, key=lambda one: one[0])[1]


def fit_table(points: Sequence[LatencyPoint]) -> MonotoneTable:
    """The nearest monotone table in log space, since errors of durations are relative.

    A missing cell is interpolated along both axes, or, without neighbours on both sides, extrapolated by a bilinear fit.
    """
    xs, ys = sorted({p.x for p in points}), sorted({p.y for p in points})
    values = np.full((len(xs), len(ys)), np.nan)
    for point in points:
        values[xs.index(point.x), ys.index(point.y)] = point.seconds
    filled = _filled(values, np.array(xs, float), np.array(ys, float))
    smooth = np.exp(_monotone(np.log(filled), weights=np.where(np.isnan(values), 1e-3, 1.0)))
    smooth = np.maximum.accumulate(np.maximum.accumulate(smooth, axis=0), axis=1)  # removes rounding errors
    return MonotoneTable(tuple(xs), tuple(ys), tuple(map(tuple, smooth.tolist())))


def _columns(points: Sequence[LatencyPoint]) -> tuple[Floats, Floats, Floats]:
    x, y, seconds = np.array([(p.x, p.y, p.seconds) for p in points], np.float64).T
    return x, y, seconds


def _non_negative(columns: Sequence[Floats], seconds: Floats) -> tuple[list[float], float]:
    """Non-negative coefficients of least relative squares, and the residual."""
    from scipy.optimize import nnls

    design = np.stack(columns, axis=1) / seconds[:, None]
    scale = np.maximum(np.linalg.norm(design, axis=0), 1e-300)
    coefficients, error = nnls(design / scale, np.ones_like(seconds))
    return (coefficients / scale).tolist(), float(error)


def _filled(values: Floats, xs: Floats, ys: Floats) -> Floats:
    filled = values.copy()
    is_known = ~np.isnan(values)
    known = np.argwhere(is_known)
    columns = [np.ones_like(values), *np.meshgrid(xs, ys, indexing="ij"), np.outer(xs, ys)]
    coefficients, _ = _non_negative([column[is_known] for column in columns], values[is_known])
    expected = np.maximum(sum(c * column for c, column in zip(coefficients, columns, strict=True)), values[is_known].min())
    ratios = np.log(values / expected)
    for i, j in np.argwhere(np.isnan(values)):
        if between := [*_between(xs, i, values[:, j]), *_between(ys, j, values[i, :])]:
            filled[i, j] = np.mean(between)
        else:
            nearness = 1.0 / np.square(known - (i, j)).sum(axis=1)
            filled[i, j] = expected[i, j] * np.exp(np.average(ratios[known[:, 0], known[:, 1]], weights=nearness))
    return filled


def _between(lines: Floats, at: int, values: Floats) -> list[float]:
    known = np.flatnonzero(~np.isnan(values))
    is_inside = len(known) and known[0] < at < known[-1]
    return [float(np.interp(lines[at], lines[known], values[known]))] if is_inside else []


def _monotone(values: Floats, weights: Floats) -> Floats:
    """The nearest matrix that never falls along rows or columns: Dykstra's projections over isotonic regressions."""
    current = values.copy()
    owed_x, owed_y = np.zeros_like(values), np.zeros_like(values)
    for _ in range(_PROJECTIONS):
        before = current
        along_x = _isotonic(current + owed_x, weights, 0)
        owed_x += current - along_x
        current = _isotonic(along_x + owed_y, weights, 1)
        owed_y += along_x - current
        if np.abs(current - before).max() < 1e-6:
            break
    return current


def _isotonic(values: Floats, weights: Floats, axis: int) -> Floats:
    from scipy.optimize import isotonic_regression

    v, w = np.moveaxis(values, axis, 0), np.moveaxis(weights, axis, 0)
    columns = [isotonic_regression(v[:, k], weights=w[:, k]).x for k in range(v.shape[1])]
    return np.moveaxis(np.stack(columns, axis=1), 0, axis)


def _place(lines: tuple[int, ...], at: int) -> tuple[int, float]:
    """Index of the line before ``at``, and the fraction of the way to the next, at most 1."""
    if len(lines) == 1 or at <= lines[0]:
        return 0, 0.0
    i = min(bisect_right(lines, at), len(lines) - 1) - 1
    return i, min(1.0, (at - lines[i]) / (lines[i + 1] - lines[i]))
