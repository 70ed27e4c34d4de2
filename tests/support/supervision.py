"""Fake processes and their spawner, for the supervisor."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from actors.processes import Process, ProcessEnded
from actors.target import DrafterCounts, TargetInfo, TargetReport
from actors.worker import ProcessInfo
from cluster.client import TargetStatus
from cluster.config import DrafterConfig, SupervisionConfig
from cluster.types import ModelInfo
from router.scaling.configured import CostTables

MODEL = ModelInfo("tiny", 100, 64, (0,), "fingerprint")
FAST = SupervisionConfig(health_timeout_ms=50, start_timeout_s=0.5, quarantine_restarts=3)


@dataclass(eq=False)
class PretendedProcess:
    """Answers until a test ends or silences it."""

    name: str
    info: Any
    starts: bool = True
    silent: bool = False
    unread: float = 0.0
    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    report: TargetReport | None = None
    load_demand: dict[str, int] = field(default_factory=dict)
    cost_tables: CostTables | None = None
    _end: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def die(self, reason: str) -> None:
        if not self._end.done():
            self._end.set_result(reason)

    @property
    def alive(self) -> bool:
        return not self._end.done()

    async def ended(self) -> str:
        return await asyncio.shield(self._end)

    async def stalled_s(self) -> float:
        await self._answer()
        return self.unread

    async def call(self, method: str, *args: Any) -> Any:
        await self._answer()
        self.calls.append((method, args))
        answers = {"start": self.info, "report": self.report, "load_demand": self.load_demand}
        return (answers | {"cost_tables": self.cost_tables}).get(method)

    async def kill(self) -> None:
        self.die("killed")

    async def _answer(self) -> None:
        if not self.alive:
            raise ProcessEnded(self._end.result())
        if self.silent:
            await asyncio.sleep(3600)
        if not self.starts:
            self.die("it would not start")
            raise ProcessEnded("it would not start")


@dataclass
class PretendedSpawner:
    lives: dict[str, list[PretendedProcess]] = field(default_factory=dict)
    stillborn: set[str] = field(default_factory=set)
    mute: set[str] = field(default_factory=set)
    found: list[str] = field(default_factory=list)
    reserved: list[str] = field(default_factory=list)  # without a process
    given_back: list[str] = field(default_factory=list)
    draining: set[str] = field(default_factory=set)
    num_waiting: int = 2
    cost_tables: CostTables | None = None

    async def target(self, name: str) -> Process:
        number = len(self.lives.get(name, []))
        process = self._born(name, TargetInfo(100 + number, name, f"grpc://node:{number}", MODEL, name in self.draining))
        process.report = TargetReport(
            TargetStatus(name, "ready", 1, self.num_waiting, 10, 5, 30.0, 7.0),
            (DrafterCounts("ngram", 1, 40, 30, 0.002),),
            6,
        )
        process.cost_tables = self.cost_tables
        return process

    async def drafter(self, name: str, config: DrafterConfig, model: ModelInfo, addresses: Sequence[str]) -> Process:
        assert model is MODEL
        assert addresses
        return self._born(name, ProcessInfo(200))

    async def control(self, name: str) -> Process:
        return self._born(name, ProcessInfo(300))

    async def end(self, group: str, give_back: bool = False) -> None:
        name = group.removeprefix("drafter-")
        if give_back:
            self.given_back.append(group)
        if name in self.lives:
            await self.now(name).kill()

    def running(self) -> dict[str, bool]:
        return dict.fromkeys(self.reserved, False) | dict.fromkeys(self.found, True)

    def _born(self, name: str, info: Any) -> PretendedProcess:
        process = PretendedProcess(name, info, starts=name not in self.stillborn, silent=name in self.mute)
        self.lives.setdefault(name, []).append(process)
        return process

    def now(self, name: str) -> PretendedProcess:
        return self.lives[name][-1]


async def eventually(truth: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not truth():  # noqa: ASYNC110
            await asyncio.sleep(0.002)
