"""What this process may use of its machine: cores, CPU time and memory."""

import os
from pathlib import Path

import psutil
import pytest

from profiler import hardware
from profiler.hardware import available_memory_bytes, cpu_quota, free_memory_bytes, num_cores

GB = 2**30
# As in a container with a namespace of its own, as on a host with systemd, and version 1 in a container without a namespace.
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw"
V1_MOUNTS = (
    "31 23 0:27 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    "32 23 0:28 /docker/abc /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct"
)
V1_GROUPS = "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n1:name=systemd:/docker/abc\n0::/system.slice"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def in_v2_group(root: Path, path: str = "/") -> Path:
    return write(root, {"proc/self/mountinfo": V2_MOUNT, "proc/self/cgroup": f"0::{path}"})


def in_v1_group(root: Path) -> Path:
    return write(root, {"proc/self/mountinfo": V1_MOUNTS, "proc/self/cgroup": V1_GROUPS})


def test_limits_of_version_2(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/cpu.max": "250000 100000",
        "sys/fs/cgroup/memory.max": str(4 * GB),
        "sys/fs/cgroup/memory.current": str(3 * GB),
        "sys/fs/cgroup/memory.stat": f"anon {2 * GB}\ninactive_file {GB}",
    }
    root = write(in_v2_group(tmp_path), files)
    assert cpu_quota(root) == 2.5
    assert free_memory_bytes(root) == 2 * GB, "pages of files that were not used lately can be taken back"


def test_a_group_above_may_allow_less(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/user.slice/cpu.max": "100000 100000",
        "sys/fs/cgroup/user.slice/memory.max": str(2 * GB),
        "sys/fs/cgroup/user.slice/memory.current": str(GB),
        "sys/fs/cgroup/user.slice/run.scope/cpu.max": "max 100000",
        "sys/fs/cgroup/user.slice/run.scope/memory.max": str(8 * GB),
        "sys/fs/cgroup/user.slice/run.scope/memory.current": "0",
    }
    root = write(in_v2_group(tmp_path, "/user.slice/run.scope"), files)
    assert (cpu_quota(root), free_memory_bytes(root)) == (1.0, GB)


def test_limits_of_version_1(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GB),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GB),
        "sys/fs/cgroup/memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {GB // 2}",
    }
    root = write(in_v1_group(tmp_path), files)
    assert (cpu_quota(root), free_memory_bytes(root)) == (1.5, GB + GB // 2)


@pytest.mark.parametrize(
    "files",
    [{"sys/fs/cgroup/cpu.max": "max 100000", "sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/memory.current": "5"}, {}],
    ids=["max", "no controllers"],
)
def test_without_a_limit_version_2_tells_none(files: dict[str, str], tmp_path: Path) -> None:
    root = write(in_v2_group(tmp_path), files)
    assert (cpu_quota(root), free_memory_bytes(root)) == (None, None)


def test_without_a_limit_version_1_and_other_systems_tell_none(tmp_path: Path) -> None:
    root = write(in_v1_group(tmp_path / "v1"), {"sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1"})
    assert cpu_quota(root) is None
    assert cpu_quota(tmp_path / "macos") is None
    assert free_memory_bytes(tmp_path / "macos") is None


def test_this_machine_tells_sound_numbers() -> None:
    assert 1 <= num_cores() <= (os.cpu_count() or 1)
    assert 0 < available_memory_bytes() <= psutil.virtual_memory().total


def on_cores(monkeypatch: pytest.MonkeyPatch, cpus: set[int], topologies: Path, quota: float | None) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cpus, raising=False)
    monkeypatch.setattr(hardware, "_CPUS", topologies)
    monkeypatch.setattr(hardware, "cpu_quota", lambda: quota)


def test_two_threads_of_a_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    siblings = {0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5", 2: "2", 3: "3"}
    write(tmp_path, {f"cpu{cpu}/topology/thread_siblings_list": told for cpu, told in siblings.items()})
    on_cores(monkeypatch, {0, 4, 5, 2}, tmp_path, None)
    assert num_cores() == 3


@pytest.mark.parametrize(("quota", "expected"), [(None, 8), (2.5, 2), (0.5, 1), (100.0, 8)])
def test_the_quota_bounds_the_cores(
    quota: float | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cores(monkeypatch, set(range(8)), tmp_path, quota)  # without topologies: every CPU counts as a core
    assert num_cores() == expected


@pytest.mark.parametrize(("within", "expected"), [(None, 6), (2, 2), (9, 6)])
def test_the_limit_bounds_the_memory(within: int | None, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        available = 6

    monkeypatch.setattr(hardware.psutil, "virtual_memory", Memory)
    monkeypatch.setattr(hardware, "free_memory_bytes", lambda: within)
    assert available_memory_bytes() == expected
