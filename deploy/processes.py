"""The processes below this one: how much memory they hold, and how none of them is left behind."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36
MAX_SWEEPS = 5


def adopt_orphans() -> None:
    """From here on, a process whose parent dies becomes a child of this one, whatever session or group it moved to:
    `descendants` then finds all that was ever started below. Linux only; elsewhere it does nothing.

    Raises:
        OSError: the kernel refuses.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def descendants(of: int | None = None) -> list[psutil.Process]:
    """All processes below one (default: this one), at one moment."""
    try:
        return psutil.Process(of).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def end_all(processes: Iterable[psutil.Process], grace_s: float) -> None:
    """Asks processes to end, waits at most ``grace_s``, and kills what is left."""
    waited_for = list(processes)
    for process in waited_for:
        _signal(process, signal.SIGTERM)
    _, alive = psutil.wait_procs(waited_for, timeout=grace_s)
    for process in alive:
        _signal(process, signal.SIGKILL)
    psutil.wait_procs(alive, timeout=grace_s)


def end_descendants(grace_s: float) -> None:
    """Ends everything below this process, also what is born meanwhile.

    Raises:
        TimeoutError: something cannot even be killed.
    """
    end_all(descendants(), grace_s)
    for _ in range(MAX_SWEEPS):
        left = descendants()  # born of a parent that was about to end
        if not left:
            return
        for process in left:
            _signal(process, signal.SIGKILL)
        psutil.wait_procs(left, timeout=grace_s)
    raise TimeoutError(f"{len(left)} processes could not be ended: {', '.join(str(p.pid) for p in left)}")


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def pss_bytes(pid: int) -> int:
    """Proportional set size: private pages, and of shared ones its share. 0 for a process that is gone.

    Raises:
        OSError: this system does not tell (it needs Linux, and the right to read the process's maps).
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def tree_pss_bytes(pid: int) -> dict[str, int]:
    """Bytes held by a process and all below it, summed by the name that the process goes by."""
    held: dict[str, int] = {}
    for process in [psutil.Process(pid), *descendants(pid)]:
        try:
            name = _title(process)
        except psutil.NoSuchProcess:
            continue
        held[name] = held.get(name, 0) + pss_bytes(process.pid)
    return held


def tree_cpu_s(pid: int) -> dict[str, float]:
    """CPU seconds that a process and all below it have used so far, summed as in `tree_pss_bytes`."""
    used: dict[str, float] = {}
    for process in [psutil.Process(pid), *descendants(pid)]:
        try:
            name, times = _title(process), process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        used[name] = used.get(name, 0.0) + times.user + times.system
    return used


def _title(process: psutil.Process) -> str:
    """Ray's workers write theirs as ``ray::Class.method``; others are known by their program, or its script."""
    words = process.cmdline()
    if words and words[0].startswith("ray::"):
        return words[0].split(".")[0].split(":default:")[0]
    scripts = [Path(word).name for word in words[1:4] if word.endswith(".py")]
    return scripts[0] if scripts else process.name()
