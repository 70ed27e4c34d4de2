"""Compute partitions: parts of a device for a target and for a drafter beside it, so that they compute at the same time.

On a CPU a partition is a set of cores. On a GPU it is a Green Context, a share of the multiprocessors (FASER, 4.3), made by
cuda-python.
"""

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cluster.errors import InvalidField, OutriderError


class Partition(Protocol):
    @property
    def name(self) -> str:
        """Costs that are measured in it hold for one name."""

    def enter(self) -> None:
        """Confines the calling thread, and the products that it starts from now on."""


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


@dataclass(frozen=True, slots=True)
class GreenContext:
    """Multiprocessors of a GPU. What a thread launches after ``enter`` runs on these alone, in a stream of the context; a
    thread may enter another one later."""

    device: int
    num_multiprocessors: int
    num_all: int  # of the device
    stream: int  # a CUstream of the context, for the life of the process

    @property
    def name(self) -> str:
        return f"multiprocessors-{self.num_multiprocessors}-of-{self.num_all}"

    def enter(self) -> None:
        import torch

        torch.cuda.set_stream(torch.cuda.ExternalStream(self.stream, device=f"cuda:{self.device}"))


class CudaDriver(Protocol):
    """The part of ``cuda.bindings.driver`` that Green Contexts take. Each call returns its status first."""

    @property
    def CUdevResourceType(self) -> Any: ...

    @property
    def CUgreenCtxCreate_flags(self) -> Any: ...

    @property
    def CUstream_flags(self) -> Any: ...


def green_contexts(num_target: int, device: int = 0, driver: CudaDriver | None = None) -> tuple[GreenContext, GreenContext]:
    """Disjoint parts of a GPU for a target, of about ``num_target`` multiprocessors, and for its drafter, of the others. The
    driver rounds up to what the architecture groups (8 on Hopper). Call it once torch has initialised the device.

    Args:
        driver: None: that of cuda-python, of CUDA 12.4 or newer.

    Raises:
        InvalidField: there are too few multiprocessors, or cuda-python is missing.
        OutriderError: the driver refuses a call; says which.
    """
    driver = driver or _cuda_driver()
    _call(driver, "cuInit", 0)
    (handle,) = _call(driver, "cuDeviceGet", device)
    (whole,) = _call(driver, "cuDeviceGetDevResource", handle, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
    num_all = int(whole.sm.smCount)
    if not 1 <= num_target < num_all:
        reason = f"must leave the target and the drafter a multiprocessor each of {num_all}"
        raise InvalidField("num_target", num_target, reason)
    groups, _, rest = _call(driver, "cuDevSmResourceSplitByCount", 1, whole, 0, num_target)
    if not groups or not rest.sm.smCount:
        raise InvalidField("num_target", num_target, f"leaves no whole group of the {num_all} multiprocessors")
    target, drafter = (_green_context(driver, device, handle, part, num_all) for part in (groups[0], rest))
    return target, drafter


def _green_context(driver: CudaDriver, device: int, handle: object, resource: Any, num_all: int) -> GreenContext:
    (description,) = _call(driver, "cuDevResourceGenerateDesc", [resource], 1)
    flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    (context,) = _call(driver, "cuGreenCtxCreate", description, handle, flags)
    (stream,) = _call(driver, "cuGreenCtxStreamCreate", context, driver.CUstream_flags.CU_STREAM_NON_BLOCKING, 0)
    return GreenContext(device, int(resource.sm.smCount), num_all, int(stream))


def _call(driver: CudaDriver, name: str, *arguments: object) -> tuple[Any, ...]:
    status, *values = getattr(driver, name)(*arguments)
    if int(status) != 0:
        raise OutriderError(
            f"{name} failed with CUDA status {int(status)}: Green Contexts need a driver of CUDA 12.4 or newer"
        )
    return tuple(values)


def _cuda_driver() -> CudaDriver:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise InvalidField("partition", "green-context", "needs the package cuda-python") from error
    found: CudaDriver = driver
    return found


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
