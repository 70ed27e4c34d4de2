"""The time that work takes, less what others on the machine have kept it waiting."""

import os
import time
from pathlib import Path
from typing import Protocol

_TASKS = Path("/proc/self/task")
_STAT = "schedstat"  # nanoseconds on a core, nanoseconds ready and waiting for one, time slices
_MOST_WAITED = 0.95  # of the wall time: the kernel counts in steps of its own


class Stopwatch(Protocol):
    def start(self) -> None: ...

    def stop(self) -> float:
        """Seconds since ``start``."""


class OwnTime:
    """Wall time, less the longest that one of this process's threads has waited meanwhile for a core that somebody else had.

    Threads that share a product wait for the last of them, so what delays one delays all. Where the kernel does not tell
    (Linux does, in ``schedstat``), it is wall time. What else a neighbour takes, of caches and of memory, stays in it.
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
            continue  # the thread has ended, or the kernel does not tell
    return found
