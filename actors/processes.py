"""What a supervisor keeps alive: processes through all their lives, and the seam to whoever makes them."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from actors.restarts import RestartPolicy
from cluster.config import DrafterConfig
from cluster.errors import OutriderError
from cluster.types import ModelInfo


class ProcessState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DOWN = "down"
    DRAINING = "draining"
    QUARANTINED = "quarantined"
    UNLOADED = "unloaded"  # not in memory; loaded when it is wanted and there is room


class ProcessEnded(OutriderError):
    """A process ended, or answers no more; says why."""


class Process(Protocol):
    """One life of an actor. Its questions raise ProcessEnded once it is dead."""

    async def ended(self) -> str:
        """Waits until its loop or the process itself has ended, and says why."""

    async def unread_s(self) -> float: ...

    async def call(self, method: str, *args: Any) -> Any: ...

    async def kill(self) -> None:
        """At once; returns when it is dead."""


class Spawner(Protocol):
    """Makes processes. Each returns one that exists already under the name, if there is one that lives."""

    async def target(self, name: str) -> Process: ...

    async def drafter(self, name: str, config: DrafterConfig, model: ModelInfo, addresses: Sequence[str]) -> Process: ...

    async def router(self) -> Process: ...

    async def end_drafter(self, name: str) -> None:
        """Ends a drafter that another supervisor left running; returns when it is dead, if there was one."""


@dataclass(frozen=True, slots=True)
class Directory:
    """Where the targets are. ``version`` grows with every change in the life of one supervisor, which ``epoch`` names."""

    epoch: str
    version: int = 0
    model: ModelInfo | None = None
    addresses: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class ManagedProcess:
    """One process that is to be there, through all its lives."""

    name: str
    spawn: Callable[[], Awaitable[Process]]
    on_ready: Callable[["ManagedProcess", Any], Coroutine[Any, Any, None]]
    restarts: RestartPolicy
    patience: int = 1
    state: ProcessState = ProcessState.STARTING
    process: Process | None = None
    pid: int | None = None
    start_at_s: float = 0.0
    reason: str | None = None  # why it is not ready, or was not when it last ended
    task: asyncio.Task[None] | None = None  # that keeps it


@dataclass(slots=True, eq=False)
class ProcessPool:
    targets: dict[str, ManagedProcess] = field(default_factory=dict)
    drafters: dict[str, ManagedProcess] = field(default_factory=dict)
    router: ManagedProcess | None = None

    def all(self) -> list[ManagedProcess]:
        return [*self.targets.values(), *self.drafters.values(), *([self.router] if self.router else [])]
