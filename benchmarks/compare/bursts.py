"""Requests that arrive in bursts: a slice of a recorded trace, or made up."""

import csv
import gzip
import random
from collections.abc import Sequence
from pathlib import Path

TRACE = Path("traces/servegen_mlarge_h155.2.csv.gz")  # 25 clients of a production model; peak over valley 15.7
BURST_S, CALM_S = 3.0, 6.0  # of made-up arrivals, in turns
BURST_OVER_CALM = 8.0  # rate of arrivals


def trace_arrivals(data: Path, num_requests: int, mean_rate: float) -> list[float]:
    """Seconds of ``num_requests`` arrivals round the busiest moment of TRACE, stretched to ``mean_rate`` a second."""
    with gzip.open(data / TRACE, "rt", encoding="utf-8") as file:
        arrivals = [float(row["arrival_s"]) for row in csv.DictReader(file)]
    return bursty_slice(arrivals, num_requests, mean_rate)[1]


def bursty_slice(arrivals: Sequence[float], num_requests: int, mean_rate: float) -> tuple[int, list[float]]:
    """The slice with the widest swing: its busiest tenth takes the least of its time. The number of its first arrival, and
    the arrivals from 0 on, stretched to ``mean_rate`` a second. ``arrivals``: at least ``num_requests``, two or more."""
    tenth = max(1, num_requests // 10)
    starts = range(0, max(1, len(arrivals) - num_requests), tenth)

    def swing(start: int) -> float:
        cut = arrivals[start : start + num_requests]
        return min(cut[i + tenth] - cut[i] for i in range(num_requests - tenth)) / (cut[-1] - cut[0])

    first = min(starts, key=swing)
    cut = arrivals[first : first + num_requests]
    stretch = num_requests / mean_rate / (cut[-1] - cut[0])
    return first, [(at_s - cut[0]) * stretch for at_s in cut]


def bursty_arrivals(num_requests: int, mean_rate: float, seed: int) -> list[float]:
    """Poisson arrivals whose rate is high for BURST_S and low for CALM_S, in turns; on average ``mean_rate`` a second."""
    rng = random.Random(seed)
    calm_rate = mean_rate * (BURST_S + CALM_S) / (BURST_OVER_CALM * BURST_S + CALM_S)
    at_s, arrivals = 0.0, list[float]()
    while len(arrivals) < num_requests:
        phase_s = at_s % (BURST_S + CALM_S)
        in_burst = phase_s < BURST_S
        gap_s = rng.expovariate(calm_rate * (BURST_OVER_CALM if in_burst else 1.0))
        left_s = (BURST_S if in_burst else BURST_S + CALM_S) - phase_s
        if gap_s > left_s:  # the rate changes before the next one comes: begin anew there, which a Poisson process allows
            at_s += left_s
            continue
        at_s += gap_s
        arrivals.append(at_s)
    return arrivals
