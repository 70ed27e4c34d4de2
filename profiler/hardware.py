"""This machine: its CPU name, and the cores, memory and GPUs that this process may use."""

import os
import platform
from pathlib import Path

import psutil

from cluster.inventory import Inventory, Node
from profiler.cgroups import cpu_quota, free_memory_bytes, read

_CPUS = Path("/sys/devices/system/cpu")
_SIBLINGS = ("core_cpus_list", "thread_siblings_list")  # the second on Linux before 5.7


def cpu_name() -> str:
    info = read(Path("/proc/cpuinfo"))
    if info is None:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name"))
    return next(names, platform.machine())


def num_cores() -> int:
    """Physical cores within the affinity mask and the cgroup quota, at least 1: a second thread on a core gains nothing."""
    cores = _physical_cores(_CPUS)
    quota = cpu_quota()
    return max(1, cores if quota is None else min(cores, int(quota)))


def available_memory_bytes() -> int:
    """Allocatable memory, on the machine and within the cgroup limit."""
    available: int = psutil.virtual_memory().available
    within = free_memory_bytes()
    return available if within is None else min(available, within)


def _physical_cores(cpus: Path) -> int:
    if not hasattr(os, "sched_getaffinity"):
        return psutil.cpu_count(logical=False) or os.cpu_count() or 1
    usable = os.sched_getaffinity(0)
    return len({_siblings(cpus / f"cpu{cpu}" / "topology") or str(cpu) for cpu in usable})


def _siblings(topology: Path) -> str | None:
    """The logical CPUs of a core, as the system lists them."""
    return next((found for name in _SIBLINGS if (found := read(topology / name)) is not None), None)


def here() -> Inventory:
    """The inventory of this machine. Imports torch."""
    import torch

    num_gpus = torch.cuda.device_count()
    gpu_bytes = [torch.cuda.get_device_properties(i).total_memory for i in range(num_gpus)]
    return Inventory((Node("here", float(num_cores()), float(num_gpus), gpu_bytes=min(gpu_bytes, default=None)),))
