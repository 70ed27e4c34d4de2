"""Memory and CPU time of a process and its descendants."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil

from deploy.local_ray import descendants

Number = TypeVar("Number", int, float)

ALL, HELD = ("Pss",), ("Pss_Anon", "Pss_Shmem")
"""Parts of memory: with pages of files, or without. The kernel takes those back when it likes, and a process's share of them
changes with what other programs have open."""


def pss_bytes(pid: int, parts: Sequence[str] = ALL) -> int:
    """Proportional set size: private pages and a share of shared ones. 0 for a process that has ended.

    Raises:
        OSError: not Linux, or no right to read the process's maps.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.split(":")[0] in parts)


def tree_pss_bytes(pid: int, parts: Sequence[str] = ALL) -> dict[str, int]:
    """Bytes held by a process and its descendants, summed by process title."""
    return _by_title(pid, lambda process: pss_bytes(process.pid, parts))


def tree_cpu_s(pid: int) -> dict[str, float]:
    """CPU seconds used so far by a process and its descendants, summed by process title."""
    return _by_title(pid, lambda process: sum(process.cpu_times()[:2]))


def _by_title(pid: int, of: Callable[[psutil.Process], Number]) -> dict[str, Number]:
    found: dict[str, Number] = {}
    for process in [psutil.Process(pid), *descendants(pid)]:
        with suppress(psutil.NoSuchProcess):
            name, number = _title(process), of(process)
            found[name] = found[name] + number if name in found else number
    return found


def _title(process: psutil.Process) -> str:
    """``ray::Class`` of a Ray worker, else the script or the program."""
    words = process.cmdline()
    if words and words[0].startswith("ray::"):
        return words[0].split(".")[0].split(":default:")[0]
    scripts = [Path(word).name for word in words[1:4] if word.endswith(".py")]
    return scripts[0] if scripts else process.name()
