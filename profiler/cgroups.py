"""CPU and memory limits from control groups, versions 1 and 2 (Linux)."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

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
