"""Time of a piece of work, less the time that its threads waited for a core."""

import os
import time
from pathlib import Path
from typing import Protocol

_TASKS = Path("/proc/self/task")
_STAT = "schedstat"  # nanoseconds on a core, nanoseconds ready and waiting for one, time slices
_MOST_WAITED = 0.95  # of the wall time, since the kernel counts in coarse steps


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
