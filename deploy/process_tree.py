"""Finds and ends all processes below this one."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress

import psutil

_PR_SET_CHILD_SUBREAPER = 36
MAX_SWEEPS = 5


def adopt_orphans() -> None:
    """Makes this process the subreaper of its descendants, so that `descendants` also finds orphans (Linux only)."""
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def descendants(of: int | None = None) -> list[psutil.Process]:
    """All processes below one, by default this one."""
    try:
        return psutil.Process(of).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def end_all(processes: Iterable[psutil.Process], grace_s: float) -> None:
    """Sends SIGTERM, waits at most ``grace_s``, and kills the rest."""
    ending = list(processes)
    for process in ending:
        _signal(process, signal.SIGTERM)
    _, alive = psutil.wait_procs(ending, timeout=grace_s)
    for process in alive:
        _signal(process, signal.SIGKILL)
    psutil.wait_procs(alive, timeout=grace_s)


def end_descendants(grace_s: float) -> None:
    """Ends everything below this process, also what starts meanwhile. Raises TimeoutError: a process survives SIGKILL."""
    end_all(descendants(), grace_s)
    for _ in range(MAX_SWEEPS):
        left = descendants()  # started by a parent that was ending
        if not left:
            return
        for process in left:
            _signal(process, signal.SIGKILL)
        psutil.wait_procs(left, timeout=grace_s)
    raise TimeoutError(f"{len(left)} processes could not be ended: {', '.join(str(p.pid) for p in left)}")


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)
