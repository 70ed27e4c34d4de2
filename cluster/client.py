"""What the API needs of the cluster behind it."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from cluster.types import Commit, ModelInfo, Request


@dataclass(frozen=True, slots=True)
class DrafterStatus:
    name: str
    kind: str
    state: str  # starting, ready, down, draining, quarantined
    num_requests: int
    num_proposed: int  # draft tokens verified since the start
    num_accepted: int
    reply_ms: float | None  # running mean; None before the first reply
    num_restarts: int = 0
    reason: str | None = None  # why it is not ready, where that is known
    verifies: bool = False  # others can ride ahead of it
    proposers: tuple[str, ...] = ()  # drafters that can, smallest first
    device: str | None = None  # where it is in memory; None: nowhere, or it is not known
    num_bytes: int | None = None  # of its device that count as its; None: not counted
    num_loads: int = 0
    num_evictions: int = 0
    num_fallbacks: int = 0  # loads on a CPU, for want of room on its own device


@dataclass(frozen=True, slots=True)
class TargetStatus:
    name: str
    state: str
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    tokens_per_s: float
    step_ms: float  # running mean of a pass
    num_preempted: int = 0  # requests since the start whose blocks were taken for older ones


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """What ``outrider status`` shows and ``/metrics`` exports."""

    model: str
    policy: str
    table_version: int
    targets: tuple[TargetStatus, ...]
    drafters: tuple[DrafterStatus, ...]


class EngineClient(Protocol):
    """The way from the API to the targets. Implementations: over links, and in process."""

    @property
    def is_linked(self) -> bool:
        """Whether a target can be reached now."""

    async def model(self) -> ModelInfo: ...

    def generate(self, request: Request) -> AsyncIterator[Commit]:
        """The request's commits, in order, the last with a finish reason. Closing the iterator aborts the request.

        Raises:
            Overloaded: no target takes more requests now.
            LinkClosed: no target is there; or it went while the request ran.
        """

    async def status(self) -> ClusterStatus:
        """Raises LinkClosed: nobody is there who knows."""

    async def close(self) -> None: ...
