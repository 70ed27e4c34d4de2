"""Arrivals of requests: traces, rates of ten minutes, and made-up ones; scaled to the size of a fleet.

A trace is scaled by repeating requests: each becomes ``factor`` of them on average, by chance one more or less, in the same
second. So a larger fleet sees the same bursts. Rates of ten minutes become counts per second by a Poisson law; their
lengths are drawn from a trace of single requests.
"""

from collections.abc import Mapping, Sequence
from csv import DictReader
from csv import Error as CsvError
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cluster.errors import InvalidField
from simulator.serving import read_trace

Floats = NDArray[np.float64]

RATES_FILE = "servegen_rate_10min.csv"
RATE_WINDOW_S = 600.0
NUM_LENGTHS = 12  # pairs of lengths that stand for all of a trace, where requests are too many to be held one by one
MAX_TIE_S = 3.0  # times of a trace that are rounded to such steps are spread over them


@dataclass(frozen=True, slots=True)
class Arrivals:
    """In order of time. An entry stands for ``weight`` requests of the same lengths."""

    name: str
    arrival_s: Floats
    prompt_len: Floats
    output_len: Floats
    weight: Floats
    duration_s: float

    @property
    def num_requests(self) -> float:
        return float(self.weight.sum())


def read_folder(folder: Path) -> list[Path]:
    """The traces of a folder of data. Raises InvalidField: there are none."""
    found = sorted(path for path in (folder / "traces").glob("*.csv*") if path.name != RATES_FILE)
    if not found:
        raise InvalidField("--data", str(folder), "has no traces/*.csv: name a folder with traces, or leave it out")
    return found


def trace(path: Path) -> Arrivals:
    """Raises InvalidField."""
    rows = np.array(list(read_trace(path)), dtype=np.float64).reshape(-1, 3)
    if not len(rows):
        raise InvalidField("trace", str(path), "has no requests")
    times = _spread_ties(rows[:, 0])
    name = path.name.removesuffix(".gz").removesuffix(".csv")
    return Arrivals(name, times, rows[:, 1], rows[:, 2], np.ones(len(rows)), float(times[-1]) + 1.0)


def _spread_ties(times: Floats) -> Floats:
    """Requests of one rounded moment lie evenly between it and the next, at most MAX_TIE_S later."""
    moments, first, counts = np.unique(times, return_index=True, return_counts=True)
    gaps = np.minimum(np.diff(moments, append=moments[-1] + MAX_TIE_S), MAX_TIE_S)
    within = np.arange(len(times)) - np.repeat(first, counts)
    shares = np.where(np.repeat(counts, counts) > 1, within / np.repeat(counts, counts), 0.0)
    spread: Floats = times + shares * np.repeat(gaps, counts)
    return spread


def scaled(arrivals: Arrivals, factor: float, random: np.random.Generator) -> Arrivals:
    """With ``factor`` times as many requests, in the same seconds."""
    times, weights = arrivals.arrival_s, arrivals.weight
    if factor >= 8.0:  # single ones no longer matter
        return replace(arrivals, weight=weights * factor)
    num = np.floor(factor * weights + random.random(len(weights))).astype(np.int64)
    index = np.repeat(np.arange(len(times)), num)
    return Arrivals(
        arrivals.name,
        times[index],
        arrivals.prompt_len[index],
        arrivals.output_len[index],
        np.ones(len(index)),
        arrivals.duration_s,
    )


def read_rates(path: Path) -> Mapping[str, Sequence[float]]:
    """Requests per second by model, one for each RATE_WINDOW_S from the start. Raises InvalidField."""
    found: dict[str, list[float]] = {}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in DictReader(file):
                rates = found.setdefault(row["model"], [])
                while len(rates) * RATE_WINDOW_S < float(row["window_start_s"]):
                    rates.append(0.0)
                rates.append(float(row["requests_per_s"]))
    except OSError as error:
        raise InvalidField("rates", str(path), f"cannot be read ({error.strerror or error})") from error
    except (CsvError, KeyError, TypeError, ValueError, UnicodeDecodeError) as error:
        raise InvalidField(
            "rates", str(path), f"needs model, window_start_s and requests_per_s in each line ({error})"
        ) from error
    return found


def from_rates(
    name: str, rates: Sequence[float], factor: float, lengths: Arrivals, random: np.random.Generator, step_s: float = 1.0
) -> Arrivals:
    """Counts per ``step_s`` and pair of lengths, by a Poisson law at ``factor`` times these rates."""
    pairs = typical_lengths(lengths)
    num_steps = int(RATE_WINDOW_S / step_s)
    expected = np.repeat(np.asarray(rates, dtype=np.float64), num_steps) * factor * step_s
    counts = random.poisson(expected[:, None] * pairs.weight[None, :])
    step, kind = np.nonzero(counts)
    within = (np.arange(len(step)) % len(pairs.weight) + 0.5) / len(pairs.weight)
    times = (step + within) * step_s
    order = np.argsort(times, kind="stable")
    step, kind = step[order], kind[order]
    return Arrivals(
        name,
        times[order],
        pairs.prompt_len[kind],
        pairs.output_len[kind],
        counts[step, kind].astype(np.float64),
        len(rates) * RATE_WINDOW_S,
    )


def typical_lengths(lengths: Arrivals) -> Arrivals:
    """NUM_LENGTHS pairs of lengths, each the mean of an equal part of the requests, ordered by what they cost; ``weight`` is
    their share."""
    order = np.argsort(lengths.prompt_len + 8.0 * lengths.output_len, kind="stable")
    parts = np.array_split(order, min(NUM_LENGTHS, len(order)))
    return Arrivals(
        lengths.name,
        np.zeros(len(parts)),
        np.array([lengths.prompt_len[part].mean() for part in parts]),
        np.array([lengths.output_len[part].mean() for part in parts]),
        np.array([len(part) / len(order) for part in parts]),
        0.0,
    )


@dataclass(frozen=True, slots=True)
class MadeUp:
    """A rate over time by straight lines between points, and log-normal lengths of these medians."""

    name: str
    points: tuple[tuple[float, float], ...]  # second, requests per second
    prompt_len: float = 600.0
    output_len: float = 200.0
    spread: float = 0.8  # of the logarithm of lengths

    def arrivals(self, random: np.random.Generator) -> Arrivals:
        times = []
        for (from_s, low), (to_s, high) in pairwise(self.points):
            most = max(low, high)
            num = random.poisson(most * (to_s - from_s))
            drawn = np.sort(random.uniform(from_s, to_s, num))
            rate = low + (high - low) * (drawn - from_s) / (to_s - from_s)
            times.append(drawn[random.random(num) * most < rate])
        at = np.concatenate(times)
        prompts, outputs = (
            np.clip(np.round(median * np.exp(self.spread * random.standard_normal(len(at)))), 1, 30 * median)
            for median in (self.prompt_len, self.output_len)
        )
        return Arrivals(self.name, at, prompts, outputs, np.ones(len(at)), self.points[-1][0])


def day_and_bursts() -> tuple[MadeUp, ...]:
    """What is simulated without a folder of data: a day of swing in two hours, floods after silence, and steps."""
    hours = [(i * 300.0, 1.0 + 0.7 * float(np.sin(2 * np.pi * i / 24))) for i in range(25)]
    flood: list[tuple[float, float]] = [(0.0, 0.3)]
    for start_s, rate in ((240.0, 2.5), (900.0, 3.0), (1500.0, 2.0), (1860.0, 3.0), (2580.0, 2.5), (3120.0, 3.0)):
        flood += [(start_s, 0.3), (start_s + 1.0, rate), (start_s + 90.0, rate), (start_s + 91.0, 0.3)]
    steps = [(0.0, 0.5), (1200.0, 0.5), (1201.0, 1.25), (2400.0, 1.25), (2401.0, 0.4), (3600.0, 0.4)]
    return (
        MadeUp("made-swing", tuple(hours)),
        MadeUp("made-floods", (*flood, (3600.0, 0.3)), prompt_len=1500.0, output_len=60.0),
        MadeUp("made-steps", tuple(steps)),
    )
