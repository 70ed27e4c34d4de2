"""Timing many things on a shared machine: interleaved sweeps, and the median of each. Its stopwatches leave out the time in
which other processes held the cores."""

import math
import os
import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

Key = TypeVar("Key", bound=Hashable)

MAX_VISITS = 25
MAX_PER_VISIT = 8  # runs of quick work
VISIT_S = 0.004
_TASKS = Path("/proc/self/task")
_STAT = "schedstat"  # nanoseconds on a core, nanoseconds ready and waiting for one, time slices
_MOST_WAITED = 0.95  # of the wall time, since the kernel counts in coarse steps


@dataclass(frozen=True, slots=True)
class Timing:
    """``seconds``: the median. ``spread``: the interquartile range over it."""

    seconds: float
    spread: float
    num: int

    @property
    def doubt(self) -> float:
        """Relative standard error of the median (of a normal sample: 1.25 sigma / sqrt(n))."""
        return 0.93 * self.spread / math.sqrt(self.num)

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Timing":
        if len(seconds) < 2:
            return cls(seconds[0], 0.0, 1)
        low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(middle, (high - low) / middle, len(seconds))


@dataclass(frozen=True, slots=True)
class TimingBudget:
    """Each work runs in ``min_visits`` sweeps, then again while its error exceeds ``precision`` and ``budget_s`` lasts."""

    min_visits: int
    budget_s: float
    precision: float = 0.015


def time_interleaved(
    works: Mapping[Key, Callable[[], float]],
    effort: TimingBudget,
    clock: Callable[[], float],
    said: Callable[[float], None] = lambda _: None,
) -> dict[Key, Timing]:
    """Each work runs once per call and returns its seconds. Sweeps in random order spread noise over all works; the first
    warms up. ``said`` is called with the share of the work that is done.
    """
    end_s, rng = clock() + effort.budget_s, random.Random(0)
    times: dict[Key, list[float]] = {key: [] for key in works}
    for work in works.values():
        work()
    for num_visits in range(MAX_VISITS):
        due = list(works)
        if num_visits >= effort.min_visits:
            due = [key for key, found in times.items() if Timing.of(found).doubt > effort.precision]
            if not due:
                break
        for key in rng.sample(due, len(due)):
            if num_visits >= effort.min_visits and clock() >= end_s:
                return {key: Timing.of(found) for key, found in times.items()}
            times[key] += _visit(works[key])
        said(min(1.0, (num_visits + 1) / effort.min_visits))
    return {key: Timing.of(found) for key, found in times.items()}


def _visit(work: Callable[[], float]) -> list[float]:
    found = [work()]
    while sum(found) < VISIT_S and len(found) < MAX_PER_VISIT:
        found.append(work())
    return found


class Stopwatch(Protocol):
    def start(self) -> None: ...

    def stop(self) -> float:
        """Seconds since ``start``."""


class OwnTime:
    """Wall time less the longest wait of any thread of this process for a core: one delays all that share a product.

    Without Linux's ``schedstat`` it is wall time. Contention for caches and memory is not subtracted.
    """

    def __init__(self) -> None:
        self._waited_ns: dict[str, int] = {}
        self._start_s = 0.0

    def start(self) -> None:
        self._waited_ns = _waited_ns()
        self._start_s = time.perf_counter()

    def stop(self) -> float:
        elapsed_s = time.perf_counter() - self._start_s
        waits = [waited - self._waited_ns[task] for task, waited in _waited_ns().items() if task in self._waited_ns]
        return elapsed_s - min(1e-9 * max(waits, default=0), _MOST_WAITED * elapsed_s)


def _waited_ns() -> dict[str, int]:
    """By thread."""
    try:
        tasks = os.listdir(_TASKS)
    except OSError:
        return {}
    found = {}
    for task in tasks:
        try:
            found[task] = int((_TASKS / task / _STAT).read_bytes().split()[1])
        except (OSError, ValueError, IndexError):
            continue  # the thread ended, or there is no schedstat
    return found
