"""Disjoint cores for a target and for a drafter beside it, so that they compute at the same time."""

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import InvalidField


@dataclass(frozen=True, slots=True)
class CoreSet:
    """Cores of this machine. A thread must enter before its first product, since its OpenMP team keeps its cores."""

    cores: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"cores-{','.join(map(str, self.cores))}"

    def enter(self) -> None:
        os.sched_setaffinity(0, self.cores)
        _limit_threads(len(self.cores))


def usable_cores() -> CoreSet:
    """Those that this process may use."""
    return CoreSet(tuple(sorted(os.sched_getaffinity(os.getpid()))))


def core_sets(num_target: int, cores: Sequence[int] | None = None) -> tuple[CoreSet, CoreSet]:
    """Disjoint sets for a target, of ``num_target`` cores, and for its drafter, of the others. ``cores``: to divide; None:
    those that this process may use. Raises InvalidField: there are too few."""
    usable = usable_cores().cores if cores is None else tuple(cores)
    if not 1 <= num_target < len(usable):
        reason = f"must leave the target and the drafter a core each of {len(usable)}"
        raise InvalidField("num_target", num_target, reason)
    return CoreSet(usable[:num_target]), CoreSet(usable[num_target:])


def _limit_threads(num: int) -> None:
    """Of the products that the calling thread starts. ``torch.set_num_threads`` would set those of new threads, too."""
    import torch

    torch.get_num_threads()  # torch sets the number of a thread when it first asks
    runtime = _openmp()
    if runtime is not None:
        runtime.omp_set_num_threads(num)


def _openmp() -> ctypes.CDLL | None:
    from engine.cpu.build import openmp_runtime

    path = openmp_runtime()
    return None if path is None or not Path(path).exists() else ctypes.CDLL(path)
