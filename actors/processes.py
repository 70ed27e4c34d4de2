"""What the supervisor manages: processes across restarts, and the interface to what spawns them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol

from actors.restarts import RestartPolicy
from cluster.config import DrafterConfig
from cluster.errors import OutriderError
from cluster.types import ModelInfo

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
