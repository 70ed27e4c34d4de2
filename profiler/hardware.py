"""This machine: its CPU name, and the cores, memory and GPUs that this process may use."""

import os
import platform
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil

from cluster.resolve import Inventory, Node

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


ROOT = Path("/")


def cpu_quota(root: Path = ROOT) -> float | None:
    """CPU seconds per second: the least of this process's group and its ancestors; None: no limit."""
    quotas = []
    for folder in _folders("cpu", root):
        fields = (read(folder / "cpu.max") or "").split()
        if len(fields) != 2:
            fields = [read(folder / name) or "" for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
        quota, period = (int(one) if one.strip().isdigit() else 0 for one in fields)
        if quota > 0 and period > 0:  # unlimited is "max", or -1
            quotas.append(quota / period)
    return min(quotas, default=None)


def free_memory_bytes(root: Path = ROOT) -> int | None:
    """Allocatable memory: the least of this process's group and its ancestors; None: no limit.

    Inactive file pages count as free, since the kernel reclaims them.
    """
    found = []
    for folder in _folders("memory", root):
        limit = _number(folder, "memory.max", "memory.limit_in_bytes")
        used = _number(folder, "memory.current", "memory.usage_in_bytes")
        if limit is not None and used is not None:
            counts = dict(line.split() for line in (read(folder / "memory.stat") or "").splitlines())
            inactive = int(counts.get("total_inactive_file") or counts.get("inactive_file") or 0)
            found.append(max(0, limit - max(0, used - inactive)))
    return min(found, default=None)


def _number(folder: Path, *names: str) -> int | None:
    for name in names:
        text = (read(folder / name) or "").strip()
        if text.isdigit():
            return int(text)
    return None


def _folders(controller: str, root: Path) -> Iterator[Path]:
    """This process's groups for a controller, each with its mounted ancestors."""
    mounts = [line.partition(" - ") for line in (read(root / "proc/self/mountinfo") or "").splitlines()]
    for line in (read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        is_v2 = not controllers
        if not is_v2 and controller not in controllers.split(","):
            continue
        for mount, _, kind in mounts:
            mounted_root, mount_point = (name.replace("\\040", " ") for name in mount.split()[3:5])
            kind_name, *_, options = kind.split()
            if kind_name != ("cgroup2" if is_v2 else "cgroup") or not (is_v2 or controller in options.split(",")):
                continue
            top = root / mount_point.lstrip("/")
            # In a container the mount may start at its own group, or below an invisible path.
            inside = PurePosixPath(path)
            inside = inside.relative_to(mounted_root) if inside.is_relative_to(mounted_root) else PurePosixPath()
            own = top / str(inside).lstrip("/")
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(top))
            break


def read(file: Path) -> str | None:
    try:
        return file.read_text()
    except OSError:
        return None
