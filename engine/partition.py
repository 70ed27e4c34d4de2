"""Compute partitions: a device divided between a target and the drafters beside it, which then compute at the same time
(FASER, 4.3). On a CPU a lane is a set of cores; on a GPU a Green Context, a share of the multiprocessors, with a stream.

Every division is prepared at the start. `engine.lanes` takes one of them, or the whole device by turns.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from cluster.errors import InvalidField, OutriderError

SHARES = (0.5, 0.75, 0.875)  # of the device, for the target


class Lane(Protocol):
    def enter(self) -> None:
        """Confines the calling thread. On a GPU it waits for what the thread has launched before, so that whoever is told
        afterwards finds it computed."""


@dataclass(frozen=True, slots=True)
class Split:
    """A division. ``name``: measured costs hold for one name."""

    name: str
    target: Lane
    drafter: Lane


@dataclass(frozen=True, slots=True)
class Partition:
    """The prepared divisions of a device, and all of it. ``close``: once no thread is in a lane."""

    whole: Lane
    splits: Sequence[Split] = ()
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class CoreSet:
    """Cores of this machine, and the threads of products on them."""

    cores: tuple[int, ...]
    num_threads: int

    def enter(self) -> None:
        os.sched_setaffinity(0, self.cores)
        self._form_team()

    def _form_team(self) -> None:
        """The OpenMP threads of the calling thread keep the cores that they began with, so each one moves.
        ``torch.set_num_threads`` would set the number of new threads, too."""
        import torch

        from engine.cpu.build import openmp_runtime

        torch.get_num_threads()  # torch sets the number of a thread when it first asks
        path = openmp_runtime()
        if path is None or not Path(path).exists():
            return
        runtime = ctypes.CDLL(path)
        runtime.omp_set_num_threads(self.num_threads)
        move = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: os.sched_setaffinity(0, self.cores))
        runtime.GOMP_parallel(move, None, self.num_threads, 0)


def usable_cores(num_threads: int | None = None) -> CoreSet:
    """Those that this process may use. ``num_threads``: None: as many."""
    cores = tuple(sorted(os.sched_getaffinity(os.getpid())))
    return CoreSet(cores, num_threads or len(cores))


def core_sets(num_threads: int | None = None, cores: Sequence[int] | None = None) -> Partition:
    """``cores``: to divide; None: those that this process may use. ``num_threads``: of the target on all of them. Without
    two cores there are no splits."""
    whole = usable_cores(num_threads) if cores is None else CoreSet(tuple(cores), num_threads or len(cores))
    total, splits = len(whole.cores), []
    for num in sorted({round(share * total) for share in SHARES} & set(range(1, total))):
        lanes = (CoreSet(part, min(len(part), whole.num_threads)) for part in (whole.cores[:num], whole.cores[num:]))
        splits.append(Split(f"cores-{num}-of-{total}", *lanes))
    return Partition(whole, splits)


@dataclass(frozen=True, slots=True)
class StreamLane:
    """Multiprocessors of a GPU: what a thread launches in ``stream`` (a CUstream; 0: the default) runs on these alone."""

    device: int
    num_multiprocessors: int
    stream: int

    def enter(self) -> None:
        import torch

        torch.cuda.current_stream(self.device).synchronize()
        default = torch.cuda.default_stream(self.device)
        torch.cuda.set_stream(torch.cuda.ExternalStream(self.stream, self.device) if self.stream else default)


def green_contexts(device: int = 0) -> Partition:
    """By ``cuda-python``: ``torch.cuda.GreenContext`` takes the first multiprocessors each time, so two of its contexts
    overlap. The driver rounds up to what the architecture groups (8 multiprocessors on Hopper). A process calls it once,
    when torch has initialised the device.

    Raises InvalidField: cuda-python is missing; OutriderError: the driver refuses a call, named in the error.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise InvalidField("target.partition", "on", "needs the package cuda-python: install outrider[cuda]") from error
    with ExitStack() as made:
        _call(driver, "cuInit", 0)
        (handle,) = _call(driver, "cuDeviceGet", device)
        (all_of_it,) = _call(driver, "cuDeviceGetDevResource", handle, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
        total, splits = int(all_of_it.sm.smCount), dict[str, Split]()
        for share in SHARES:
            least = round(share * total)
            groups, num_groups, rest = _call(driver, "cuDevSmResourceSplitByCount", 1, all_of_it, 0, least)
            num = int(groups[0].sm.smCount) if num_groups else total
            name = f"multiprocessors-{num}-of-{total}"
            if name in splits or num >= total or not rest.sm.smCount:
                continue
            lanes = [_lane(driver, device, handle, part, made) for part in (groups[0], rest)]
            splits[name] = Split(name, *lanes)
        return Partition(StreamLane(device, total, 0), tuple(splits.values()), made.pop_all().close)


def _lane(driver: Any, device: int, handle: Any, part: Any, made: ExitStack) -> StreamLane:
    """``made``: destroys stream and context, in this order."""
    (description,) = _call(driver, "cuDevResourceGenerateDesc", [part], 1)
    flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    (context,) = _call(driver, "cuGreenCtxCreate", description, handle, flags)
    made.callback(partial(_call, driver, "cuGreenCtxDestroy", context))
    (stream,) = _call(driver, "cuGreenCtxStreamCreate", context, driver.CUstream_flags.CU_STREAM_NON_BLOCKING, 0)
    made.callback(partial(_call, driver, "cuStreamDestroy", stream))
    return StreamLane(device, int(part.sm.smCount), int(stream))


def _call(driver: Any, name: str, *arguments: object) -> tuple[Any, ...]:
    status, *values = getattr(driver, name)(*arguments)
    if int(status) != 0:
        raise OutriderError(f"{name} failed: {status.name}; Green Contexts need a driver of CUDA 12.4 or newer")
    return tuple(values)
