"""Offline calibration: turns a drafter's confidences into survival probabilities.

A confidence is the probability that draft token k is right, given that tokens 1 to k-1 are; survival, that tokens 1 to k
are all right. Neural drafters are overconfident, and their errors multiply along a draft.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cluster.errors import ModelUnavailable
from profiler.reliability import auroc, expected_calibration_error
from router.cost_model import Floats
from router.estimates.confidence_scaling import logit, sigmoid

FILE = "calibration.json"  # in a drafter's folder
_FORMAT = 2
_MARGIN = 1e-6
MIN_RECORDS = 64  # drafts that must reach a position with all before it right
# Prior standard deviations of log temperature, offset and margin weight: around 0 at the first position, then around the
# position before, since neighbours err alike and late positions have few records. A margin means the same at each position:
# weights that follow the few late records err on prompts of another kind.
_FIRST_SPREAD = (0.3, 0.5, 1.0)
_NEXT_SPREAD = (0.1, 0.05, 0.02)
_NEXT_SPREAD_WITH_MARGINS = (0.02, 0.05, 0.02)
_GRID = np.geomspace(0.25, 4.0, 65)  # temperatures


@dataclass(frozen=True, slots=True)
class Records:
    """N verified drafts of up to K tokens."""

    confidences: Floats  # (N, K), conditional; arbitrary beyond num_verified
    num_verified: NDArray[np.int64]  # (N,)
    num_accepted: NDArray[np.int64]  # (N,)
    log_margins: Floats | None = None  # (N, K), as of TemperatureScaling; arbitrary beyond num_verified

    @classmethod
    def of(
        cls, drafts: Sequence[tuple[Sequence[float], int]], log_margins: Sequence[Sequence[float]] | None = None
    ) -> "Records":
        """From (confidences of the verified tokens, number accepted) per draft, and their log margins."""
        lens = np.array([len(confidences) for confidences, _ in drafts], np.int64)

        def table(rows: Iterable[Sequence[float]]) -> Floats:
            filled = np.zeros((len(drafts), lens.max(initial=0)))
            for row, values in zip(filled, rows, strict=True):
                row[: len(values)] = values
            return filled

        confidences, num_accepted = table(c for c, _ in drafts), np.array([num for _, num in drafts], np.int64)
        return cls(confidences, lens, num_accepted, None if log_margins is None else table(log_margins))

    def __post_init__(self) -> None:
        num, longest = self.confidences.shape
        if self.num_verified.shape != (num,) or self.num_accepted.shape != (num,):
            raise ValueError(f"{num} drafts, but {self.num_verified.shape} and {self.num_accepted.shape} verdicts on them")
        if self.log_margins is not None and self.log_margins.shape != self.confidences.shape:
            raise ValueError(f"margins {self.log_margins.shape} of confidences {self.confidences.shape}")
        lens = np.array([np.zeros(num), self.num_accepted, self.num_verified, np.full(num, longest)])
        if (np.diff(lens, axis=0) < 0).any():
            raise ValueError("a draft cannot have more accepted than verified tokens, or more of these than confidences")

    def __len__(self) -> int:
        return len(self.confidences)

    def part(self, chosen: NDArray[np.bool_]) -> "Records":
        margins = None if self.log_margins is None else self.log_margins[chosen]
        return Records(self.confidences[chosen], self.num_verified[chosen], self.num_accepted[chosen], margins)

    @property
    def max_len(self) -> int:
        return int(self.confidences.shape[1])

    def reaching(self, position: int) -> NDArray[np.bool_]:
        """Drafts whose token ``position`` (from 0) was verified."""
        return self.num_verified > position

    def survived(self, position: int) -> NDArray[np.bool_]:
        """Drafts whose tokens up to ``position`` were all right."""
        return self.num_accepted > position


@dataclass(frozen=True, slots=True)
class TemperatureScaling:
    """c -> sigmoid(logit(c) / T_k + b_k + w_k log(1 + m)), with T, b and w per position; further positions use the last.

    The margin m is what the drafter's token leads the next best by, shared noise included (``engine.ops.GumbelArgmax``): the
    target chooses under the same noise, so this says more of its choice than a probability does. Without margins, w is 0.
    """

    temperatures: tuple[float, ...] = (1.0,)
    offsets: tuple[float, ...] = (0.0,)
    margin_weights: tuple[float, ...] = (0.0,)

    @property
    def num_positions(self) -> int:
        return max(len(self.temperatures), len(self.offsets), len(self.margin_weights))

    def at(self, position: int) -> tuple[float, float, float]:
        temperature, offset, weight = (
            values[min(position, len(values) - 1)] for values in (self.temperatures, self.offsets, self.margin_weights)
        )
        return temperature, offset, weight

    def conditional(self, confidences: Sequence[float], first: int = 0) -> tuple[float, ...]:
        """Calibrated conditional confidences of one draft from position ``first`` on, without margins."""
        return tuple(self._scaled(np.asarray(confidences, np.float64), first).tolist())

    def survival(self, confidences: ArrayLike, log_margins: ArrayLike | None = None) -> Floats:
        """(N, K) conditional confidences and log(1 + m) to (N, K) survival probabilities, which never rise along a row."""
        margins = np.asarray(0.0 if log_margins is None else log_margins, np.float64)
        scaled = self._scaled(np.asarray(confidences, np.float64), 0, margins)
        return np.asarray(np.cumprod(scaled, axis=-1), np.float64)

    def _scaled(self, confidences: Floats, first: int, log_margins: Floats | float = 0.0) -> Floats:
        positions = np.arange(first, first + confidences.shape[-1])
        temperatures, offsets, weights = (
            np.take(values, positions, mode="clip") for values in (self.temperatures, self.offsets, self.margin_weights)
        )
        return sigmoid(logit(confidences, _MARGIN) / temperatures + offsets + weights * log_margins)


@dataclass(frozen=True, slots=True)
class Calibration:
    """A scaling for each of one or more sampling temperatures: where drafts are sampled, fewer survive.

    ``with_margins``: for tokens whose margin is known, which is after they are chosen.
    """

    by_sampling: Mapping[float, TemperatureScaling] = field(default_factory=lambda: {0.0: TemperatureScaling()})
    with_margins: Mapping[float, TemperatureScaling] = field(default_factory=dict)

    def of(self, sampling_temperature: float) -> TemperatureScaling:
        """Interpolated linearly between the two nearest, the nearest outside."""
        return _interpolated(self.by_sampling, sampling_temperature)

    def with_margins_of(self, sampling_temperature: float) -> TemperatureScaling | None:
        """As ``of``."""
        return _interpolated(self.with_margins, sampling_temperature) if self.with_margins else None


def _interpolated(by_sampling: Mapping[float, TemperatureScaling], sampling_temperature: float) -> TemperatureScaling:
    known = sorted(by_sampling)  # in plain Python: it is asked for at each request, and numpy takes a millisecond here
    below = max((one for one in known if one <= sampling_temperature), default=known[0])
    above = min((one for one in known if one >= sampling_temperature), default=known[-1])
    low, high = by_sampling[below], by_sampling[above]
    if below == above:
        return low
    share = (sampling_temperature - below) / (above - below)
    positions = range(max(low.num_positions, high.num_positions))
    pairs = [zip(low.at(position), high.at(position), strict=True) for position in positions]
    mixed = [[a + share * (b - a) for a, b in pair] for pair in pairs]
    return TemperatureScaling(*(tuple(values) for values in zip(*mixed, strict=True)))


# For confidences that tell the margin alone: their logit is log(1 + m).
TELLING_MARGINS = Calibration(with_margins={0.0: TemperatureScaling((np.inf,), (0.0,), (1.0,))})


def log_margins(confidences: Sequence[float]) -> tuple[float, ...]:
    """log(1 + m) of the tokens of a draft, from confidences under TELLING_MARGINS."""
    return tuple(logit(np.asarray(confidences, np.float64), _MARGIN).tolist())


def fit_temperatures(records: Records) -> TemperatureScaling:
    """Sequential temperature scaling (DSpark, section 3.2.1): position by position, on drafts that are right up to there.

    The paper takes the temperature of least calibration error, which is noise with a few hundred drafts; this, the most
    probable one, with a prior centred on the position before. An offset corrects confidences that are too high throughout.

    Positions from the first with fewer than MIN_RECORDS such drafts use the one before; the first leaves confidences
    unchanged. Where the records hold margins, these are weighed too.
    """
    found: list[tuple[float, float, float]] = []
    before, spread = (0.0, 0.0, 0.0), _FIRST_SPREAD
    for k in range(records.max_len):
        tried = records.reaching(k) & (records.num_accepted >= k)
        if tried.sum() < MIN_RECORDS:
            break
        logits = logit(records.confidences[tried, k], _MARGIN)
        margins = np.zeros(len(logits)) if records.log_margins is None else records.log_margins[tried, k]
        before = _most_probable(logits, margins, records.survived(k)[tried], before, spread)
        found.append(before)
        spread = _NEXT_SPREAD if records.log_margins is None else _NEXT_SPREAD_WITH_MARGINS
    log_ts, offsets, weights = zip(*found, strict=True) if found else ((0.0,),) * 3
    return TemperatureScaling(tuple(np.exp(log_ts).tolist()), offsets, weights if any(weights) else (0.0,))


def _most_probable(
    logits: Floats,
    margins: Floats,
    outcomes: NDArray[np.bool_],
    expected: tuple[float, float, float],
    spread: tuple[float, float, float],
) -> tuple[float, float, float]:
    """Log temperature, offset and weight of the log margins with the largest posterior density, under independent normal
    priors."""
    from scipy.optimize import minimize  # takes 0.8 s, which drafters need not pay

    signs = np.where(outcomes, -1.0, 1.0)
    mean, deviation = np.array(expected), np.array(spread)

    def loss(x: Floats) -> tuple[float, Floats]:
        scaled = logits * np.exp(-x[0])
        wrong = signs * (scaled + x[1] + x[2] * margins)
        slopes = signs * sigmoid(wrong)  # of log(1 + exp(wrong))
        away = (x - mean) / deviation
        gradient = np.array([-(slopes * scaled).sum(), slopes.sum(), (slopes * margins).sum()]) + away / deviation
        return float(np.logaddexp(0.0, wrong).sum() + 0.5 * (away**2).sum()), gradient

    log_t, offset, weight = minimize(loss, mean, jac=True, method="BFGS").x.tolist()
    return log_t, offset, weight


def fit_by_grid(records: Records) -> TemperatureScaling:
    """The paper's own: position by position, the temperature of a grid with the least calibration error of survival."""
    found: list[float] = []
    before = np.ones(len(records))  # survival up to the position, as calibrated so far
    for k in range(records.max_len):
        reached = records.reaching(k)
        if (reached & (records.num_accepted >= k)).sum() < MIN_RECORDS:
            break
        logits, outcomes = logit(records.confidences[:, k], _MARGIN), records.survived(k)[reached]
        tried = [before * sigmoid(logits / t) for t in _GRID]
        errors = [expected_calibration_error(survival[reached], outcomes) for survival in tried]
        best = int(np.argmin(errors))
        found.append(float(_GRID[best]))
        before = tried[best]
    return TemperatureScaling(tuple(found) or (1.0,))


@dataclass(frozen=True, slots=True)
class Quality:
    """Of predicted survival: means over the positions that at least MIN_RECORDS drafts reach with all before it right."""

    ece: float | None
    auroc: float | None  # of positions where both outcomes were seen
    brier: float | None = None

    def figures(self, suffix: str) -> dict[str, float]:
        known = {"ece": self.ece, "auroc": self.auroc, "brier": self.brier}
        return {f"{name}_{suffix}": value for name, value in known.items() if value is not None}


def quality(survival: ArrayLike, records: Records) -> Quality:
    """``survival`` (N, K): predictions for the records."""
    table = np.asarray(survival, np.float64)
    errors, rankings, briers = [], [], []
    for k in range(records.max_len):
        reached = records.reaching(k)
        if (reached & (records.num_accepted >= k)).sum() >= MIN_RECORDS:
            predicted, outcomes = table[reached, k], records.survived(k)[reached]
            errors.append(expected_calibration_error(predicted, outcomes))
            briers.append(np.mean((predicted - outcomes) ** 2))
            ranking = auroc(predicted, outcomes)
            rankings += [] if ranking is None else [ranking]
    return Quality(*(float(np.mean(values)) if values else None for values in (errors, rankings, briers)))


def save_calibration(calibration: Calibration, path: Path, **figures: float) -> None:
    """Writes JSON, with ``figures`` (ECE, AUROC, number of records) for readers."""
    content = {
        "format": _FORMAT,
        "fits": _as_json(calibration.by_sampling),
        "fits_with_margins": _as_json(calibration.with_margins),
        "figures": figures,
    }
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def load_calibration(path: Path) -> Calibration:
    """Also of the first format, which had one fit. Raises ModelUnavailable if the file is missing or no calibration."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] not in (1, _FORMAT):
            raise ValueError(f"it has format {content['format']}, not {_FORMAT}")
        fits = content["fits"] if content["format"] == _FORMAT else [content | {"sampling_temperature": 0.0}]
        found, with_margins = (
            {float(fit["sampling_temperature"]): _scaling_of(fit) for fit in part}
            for part in (fits, content.get("fits_with_margins", ()))
        )
        if not found or not all(0.0 <= t < np.inf for t in (*found, *with_margins)):
            raise ValueError("there must be fits, of sampling temperatures from 0")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelUnavailable(f"{path} is not a calibration ({error!r}); `outrider train` writes them") from error
    return Calibration(found, with_margins)


def _as_json(by_sampling: Mapping[float, TemperatureScaling]) -> list[dict[str, Any]]:
    return [{"sampling_temperature": t, **asdict(scaling)} for t, scaling in sorted(by_sampling.items())]


def _scaling_of(fit: Mapping[str, Any]) -> TemperatureScaling:
    temperatures = tuple(float(t) for t in fit["temperatures"])
    offsets, weights = (tuple(float(x) for x in fit.get(name, (0.0,))) for name in ("offsets", "margin_weights"))
    if not temperatures or not all(0.0 < t < np.inf for t in temperatures):
        raise ValueError("temperatures must be positive")
    if not offsets or not weights or not np.all(np.isfinite((*offsets, *weights))):
        raise ValueError("offsets and weights of margins must be finite")
    return TemperatureScaling(temperatures, offsets, weights)
