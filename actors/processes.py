"""What the supervisor manages: processes across restarts, and the interface to what spawns them."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf
from typing import Any, Protocol

from cluster.config import DrafterConfig, SupervisionConfig
from cluster.errors import OutriderError
from cluster.types import Adapter, ModelInfo

BACKOFF_S = 0.25  # before the second restart; doubles with each further one
MAX_BACKOFF_S = 5.0  # a start of a model takes longer, so that a longer pause saves little
WINDOW_S = 60.0  # in which failures count
QUARANTINE_S = 120.0  # a drafter that fails at each start costs 5 loads in 3 minutes, and one that recovers is soon back


@dataclass(frozen=True, slots=True)
class Restart:
    at_s: float
    quarantined: bool = False  # it failed too often


@dataclass(slots=True)
class RestartPolicy:
    """When a failed process is restarted: at once, then with exponential backoff, then after a quarantine. Failures older
    than the window are forgotten.

    Only drafters are quarantined (``may_quarantine``): the service works without them.
    """

    config: SupervisionConfig
    may_quarantine: bool
    num_restarts: int = 0
    _failures_s: deque[float] = field(default_factory=deque)

    def failed(self, now_s: float) -> Restart:
        """The process ended or did not start."""
        config = self.config
        self.num_restarts += 1
        while self._failures_s and self._failures_s[0] <= now_s - WINDOW_S:
            self._failures_s.popleft()
        self._failures_s.append(now_s)
        num_recent = len(self._failures_s)
        if self.may_quarantine and num_recent >= config.quarantine_restarts:
            self._failures_s.clear()
            return Restart(now_s + QUARANTINE_S, quarantined=True)
        if num_recent == 1:
            return Restart(now_s)
        doublings = min(num_recent - 2, 30)  # more would overflow a float; these reach any bound
        return Restart(now_s + min(BACKOFF_S * 2**doublings, MAX_BACKOFF_S))


logger = logging.getLogger(__name__)


class ProcessState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DOWN = "down"
    DRAINING = "draining"
    QUARANTINED = "quarantined"
    UNLOADED = "unloaded"  # not in memory; loaded on demand when there is room


class ProcessEnded(OutriderError):
    """A process ended or does not answer; says why."""


class ProcessUnavailable(ProcessEnded):
    """The connection to it was lost. Whether it has ended is not known."""


class Process(Protocol):
    """A running actor. Calls raise ProcessEnded once it is dead."""

    @property
    def name(self) -> str: ...

    async def ended(self) -> str:
        """Waits until its loop or the process has ended. Returns the reason."""

    async def stalled_s(self) -> float:
        """Seconds since its loop last made progress."""

    async def call(self, method: str, *args: Any) -> Any: ...

    async def kill(self) -> None:
        """Returns when it is dead."""


class Spawner(Protocol):
    """Spawns processes, or returns a running one of that name. Reserves resources for those that join later."""

    async def target(self, name: str) -> Process: ...

    async def drafter(self, name: str, config: DrafterConfig, model: ModelInfo, addresses: Sequence[str]) -> Process: ...

    async def control(self, name: str) -> Process:
        """The router, or the scheduler of chains."""

    async def end(self, group: str, give_back: bool = False) -> None:
        """Ends a target or drafter, also one that an earlier supervisor left running, by the name of its group; returns when
        it is dead. ``give_back``: its resources, too."""

    def running(self) -> Mapping[str, bool]:
        """Groups of targets and drafters that an earlier supervisor left, and whether each has a process already."""


@dataclass(frozen=True, slots=True)
class Directory:
    """The membership of the targets, as gateways learn it. ``epoch`` names the supervisor; ``version`` grows with each
    change."""

    epoch: str
    version: int = 0
    model: ModelInfo | None = None
    addresses: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()  # names of those that end when their requests have ended
    ends: bool = False  # the deployment: gateways end all requests with an error

    def changed(self, **fields: Any) -> "Directory":
        return replace(self, version=self.version + 1, **fields)


@dataclass(slots=True, eq=False)
class ManagedProcess:
    """A process that is kept running, across restarts."""

    name: str
    spawn: Callable[[], Awaitable[Process]]
    on_ready: Callable[["ManagedProcess", Any], Coroutine[Any, Any, None]]
    restarts: RestartPolicy
    timeout_factor: int = 1  # times supervision.health_timeout_ms
    state: ProcessState = ProcessState.STARTING
    process: Process | None = None
    pid: int | None = None
    start_at_s: float = 0.0
    reason: str | None = None  # why it is not ready
    task: asyncio.Task[None] | None = None  # supervises it

    @property
    def ready(self) -> Process | None:
        """None: it does not serve now."""
        return self.process if self.state is ProcessState.READY else None


@dataclass(slots=True, eq=False)
class ProcessPool:
    targets: dict[str, ManagedProcess] = field(default_factory=dict)
    drafters: dict[str, ManagedProcess] = field(default_factory=dict)
    control: dict[str, ManagedProcess] = field(default_factory=dict)

    def all(self) -> list[ManagedProcess]:
        return [*self.targets.values(), *self.drafters.values(), *self.control.values()]


class Tasks:
    """Tasks that run until ``cancel``. An exception that ends one is logged as a defect."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    async def cancel(self) -> None:
        """Returns when all have ended."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s failed", task.get_name(), exc_info=error)


class AdapterRegistry:
    """The LoRA adapters that calls may name: those of the file, until they are changed. Directories that it returns are new
    ones."""

    def __init__(self) -> None:
        self._adapters: tuple[Adapter, ...] | None = None  # None: those of the file
        self._recalled_version: float = -1  # of a directory of a former supervisor

    def applied(self, model: ModelInfo | None) -> ModelInfo | None:
        """The model as gateways learn it."""
        return model if model is None or self._adapters is None else replace(model, adapters=self._adapters)

    def recalled(self, directory: Directory, known: Directory) -> Directory:
        """With what a former supervisor told a gateway, unless another gateway has heard more. Else ``directory``."""
        if known.epoch == directory.epoch or known.model is None or known.version <= self._recalled_version:
            return directory
        return self._changed(directory, known.model.adapters, known.version)

    def swapped(self, directory: Directory, old: Adapter | None, new: Adapter | None) -> Directory | None:
        """With ``new`` in place of ``old``. None: ``old`` is gone, there is no room for ``new``, or its name is taken."""
        known, most = ((), 0) if directory.model is None else (directory.model.adapters, directory.model.max_adapters)
        left = tuple(one for one in known if one != old)
        if old is not None and old not in known:
            return None
        if new is not None and (len(left) >= most or new.name in [one.name for one in left]):
            return None
        return self._changed(directory, (*left, *([] if new is None else [new])), inf)

    def _changed(self, directory: Directory, adapters: tuple[Adapter, ...], recalled_version: float) -> Directory:
        self._adapters, self._recalled_version = adapters, recalled_version
        return directory.changed(model=self.applied(directory.model))
