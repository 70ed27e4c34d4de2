"""The rows of the fault table on a server with two targets: each fault many times, with streams under way."""

import asyncio
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from benchmarks.disturbed import DEADLINE_S, POLL_S, STATUS_AGE_S, Disturbed, DisturbedServer, FaultBenchFailed
from benchmarks.injections import ACTORS, hostile_clients, stopped, without_descriptors, without_disk
from benchmarks.interposer import Interposer
from benchmarks.load import LoadRequest, TimedAnswer
from benchmarks.redis_server import RedisServer
from benchmarks.report import Cell
from benchmarks.server import ServerProcess
from cluster.config import Config, FileStateConfig, RedisStateConfig, Resources, TransportConfig

STALL_S = 3.0  # shorter than the silence after which a link counts as down
CUT_OFF_S = 8.0  # longer
REDIS_AWAY_S = 2.0
DELAY_S = 0.3
CLOCK_JUMP_S = 3600.0
_ACTOR_OF = {"target": "TargetActor", "drafter": "DrafterActor", "router": "RouterActor", "supervisor": "PoolSupervisor"}
TARGETS = {"replicas": 2, "resources": Resources(cpus=0.25, gpus=0, threads=1)}


@dataclass(slots=True)
class RowResult:
    """``ends_streams``: streams may end with an error. ``complaints``: broken promises, one line each."""

    name: str
    ends_streams: bool = False
    runs: list[Disturbed] = field(default_factory=list)
    num_wrong_tokens: int = 0
    num_lost: int = 0  # streams, and those of a run from which the server did not recover
    num_leaked: int = 0
    num_resumed: int = 0
    complaints: list[str] = field(default_factory=list)

    def recovery(self, percent: float) -> float:
        """Seconds; infinite if the server recovered from no run."""
        return float(np.percentile([run.recovery_s for run in self.runs], percent)) if self.runs else math.inf

    def judge(self, plain: Sequence[TimedAnswer]) -> None:
        """The newest run."""
        for undisturbed, answer in zip(plain, self.runs[-1].answers, strict=True):
            if answer.error is not None and not self.ends_streams:
                self.num_lost += 1
                self.complaints.append(f"a stream ended: {answer.error}")
            is_whole = answer.error is None
            if answer.text != (undisturbed.text if is_whole else undisturbed.text[: len(answer.text)]):
                self.num_wrong_tokens += undisturbed.num_tokens
                self.complaints.append(f"{answer.text!r} instead of {undisturbed.text!r}")

    def cells(self) -> tuple[Cell, ...]:
        gap_s: Cell = "-" if self.ends_streams or not self.runs else max(run.max_gap_s for run in self.runs)
        counts = (len(self.runs), self.num_wrong_tokens, self.num_lost, self.num_leaked, self.num_resumed)
        return (self.name, *counts, gap_s, self.recovery(50), self.recovery(99))


@dataclass(frozen=True, slots=True)
class Row:
    """``replaces``: the actor whose process is replaced; None: none is. ``ends_streams``: as of `RowResult`."""

    name: str
    injure: Callable[[], object]
    replaces: str | None = None
    ends_streams: bool = False


def measure_rows(
    config: Config, folder: Path, asks: Sequence[LoadRequest], num_times: int
) -> tuple[list[RowResult], list[str]]:
    """Returns the rows, and processes that ended without being killed."""
    with ExitStack() as stack:
        redis = RedisServer(folder) if shutil.which("redis-server") else None
        if redis is not None:
            stack.callback(redis.stop)
        interposer = stack.enter_context(Interposer(folder))
        config = with_two_targets(config, folder, redis).model_copy(
            update={"transport": TransportConfig(kind="grpc", host="127.0.0.1")}
        )
        rows = _LocalRows(stack.enter_context(ServerProcess(config, interposer.environment)), redis, interposer)
        return rows.measure(rows.table(), asks, num_times), rows.lost


def with_two_targets(config: Config, folder: Path, redis: RedisServer | None) -> Config:
    """Whose processes are restarted soon, however often they end."""
    state = FileStateConfig(folder=folder / "rows") if redis is None else RedisStateConfig(url=redis.url)
    rarely = {"quarantine_restarts": 1000, "max_restart_backoff_ms": 1000}
    return config.model_copy(
        update={
            "target": config.target.model_copy(update=TARGETS),
            "cluster": config.cluster.model_copy(update={"state": state}),
            "supervision": config.supervision.model_copy(update=rarely),
        }
    )


class FaultRows(DisturbedServer):
    """Measures rows on a server with two targets."""

    def __init__(self, server: ServerProcess) -> None:
        super().__init__(server)
        self._num_processes = {actor: len(server.workers(actor)) for actor in ACTORS}

    def measure(self, rows: Sequence[Row], asks: Sequence[LoadRequest], num_times: int) -> list[RowResult]:
        """Each row once, then each again. SIGINT, or a server that does not recover, ends it early."""
        results = [RowResult(row.name, row.ends_streams) for row in rows]
        plain = asyncio.run(self.undisturbed(asks))
        try:
            for number in range(num_times):
                for row, result in zip(rows, results, strict=True):
                    with self.phase(f"{row.name}, {number + 1} of {num_times}"):
                        self._measure_once(row, result, asks, plain)
        except KeyboardInterrupt:
            self.console.print("faults: interrupted")
        except (TimeoutError, FaultBenchFailed) as error:
            result.num_lost += len(asks)
            reason = str(error) or f"the server has not recovered within {DEADLINE_S:g} s: {self.server.last_words()}"
            result.complaints.append(reason)
        return [result for result in results if result.runs or result.complaints]

    def _measure_once(self, row: Row, result: RowResult, asks: Sequence[LoadRequest], plain: Sequence[TimedAnswer]) -> None:
        num_resumed = self._num_resumed()
        result.runs.append(asyncio.run(self._run(row, asks)))
        result.judge(plain)
        result.num_resumed += max(0, self._num_resumed() - num_resumed)  # a new API counts from 0
        left = self._leaked()
        result.num_leaked += len(left)
        result.complaints += left

    async def _run(self, row: Row, asks: Sequence[LoadRequest]) -> Disturbed:
        before = set() if row.replaces is None else set(self.server.workers(row.replaces))
        began_s = math.inf

        def injure() -> None:
            nonlocal began_s
            began_s = time.monotonic()
            row.injure()

        def recovered(_: object) -> bool:
            is_fresh = time.monotonic() > began_s + STATUS_AGE_S
            return is_fresh and self._is_replaced(row.replaces, before) and self.is_linked() and self.all_ready()

        return await self.disturbed(asks, injure, recovered)

    def _is_replaced(self, actor: str | None, before: set[psutil.Process]) -> bool:
        if actor is None:
            return True
        found = set(self.server.workers(actor))
        return len(found) == self._num_processes[actor] and bool(found - before)

    def is_linked(self) -> bool:
        """Whether drafters and gateways are linked to the targets, where that is known."""
        return True

    # ---- what is left

    def _num_resumed(self) -> int:
        return int(self._status().get("num_resumed", 0))

    def _status(self) -> dict[str, Any]:
        until_s = time.monotonic() + DEADLINE_S
        with self.server.client() as client:
            while time.monotonic() < until_s:
                with suppress(httpx.TransportError):
                    answer = client.get("/v1/outrider/status")
                    if answer.status_code == httpx.codes.OK:
                        status: dict[str, Any] = answer.json()
                        return status
                time.sleep(POLL_S)
        raise FaultBenchFailed(f"no status after {DEADLINE_S:g} s: {self.server.last_words()}")

    def _leaked(self) -> list[str]:
        """What an idle server must not have; the status is a second old, so it is asked until nothing is left."""
        left: list[str] = []
        until_s = time.monotonic() + 2 * STATUS_AGE_S + STALL_S
        while time.monotonic() < until_s:
            left = list(self._left())
            if not left:
                break
            time.sleep(POLL_S)
        return left

    def _left(self) -> Iterator[str]:
        for target in self._status()["targets"]:
            held, live = target["num_blocks"] - target["num_free_blocks"], target["num_running"] + target["num_waiting"]
            if held or live:
                yield f"{target['name']} idle: {held} blocks, {live} requests"
        for actor, num in self._num_processes.items():
            if (found := len(self.server.workers(actor))) != num:
                yield f"{found} processes of {actor}, not {num}"


class _LocalRows(FaultRows):
    """Rows on one machine, whose Ray cluster belongs to the server."""

    def __init__(self, server: ServerProcess, redis: RedisServer | None, interposer: Interposer) -> None:
        super().__init__(server)
        self._redis = redis
        self._interposer = interposer
        self._links = interposer.links

    def table(self) -> list[Row]:
        rows = [
            *(Row(f"{name}_killed", partial(self.kill, actor), actor) for name, actor in _ACTOR_OF.items()),
            *(Row(f"{name}_hangs", partial(self._hang, actor), actor) for name, actor in _ACTOR_OF.items()),
            Row("api_killed", partial(self.kill, "ServeReplica"), "ServeReplica", ends_streams=True),
            Row("supervisor_stalls", lambda: self._stall(self.server.workers("PoolSupervisor"))),
            Row("ray_stalls", lambda: self._stall(self._ray_processes())),
            Row("disk_full", lambda: self._deprive(without_disk, STALL_S)),
            Row("descriptors_used_up", lambda: self._deprive(without_descriptors, STALL_S / 2)),
            Row("hostile_clients", lambda: hostile_clients(self.target, STALL_S)),
            Row("network_cut", lambda: self._cut(self._links.ports(), STALL_S)),
            Row("target_cut_off", lambda: self._cut(self._links.ports()[:1], CUT_OFF_S)),
            Row("network_delays", self._delay),
            Row("network_resets", self._links.reset),
            Row("clock_jumps", self._jump_clock),
        ]
        return rows if self._redis is None else [*rows, Row("redis_lost", partial(self._lose, self._redis))]

    def is_linked(self) -> bool:
        num = {actor: len(self.server.workers(actor)) for actor in ("TargetActor", "DrafterActor", "ServeReplica")}
        return self._links.num_links() == num["TargetActor"] * (num["DrafterActor"] + num["ServeReplica"])

    def _hang(self, actor: str) -> None:
        """Suspends a process and never resumes it; its supervisor must kill it."""
        process = self.server.workers(actor)[0]
        self.killed.add(process)
        process.suspend()

    def _stall(self, processes: Sequence[psutil.Process]) -> None:
        with ExitStack() as stack:
            for process in processes:
                stack.enter_context(stopped(process))
            time.sleep(STALL_S)

    def _deprive(self, of: Callable[[psutil.Process], AbstractContextManager[None]], seconds: float) -> None:
        """Takes a resource from all processes of Outrider for ``seconds``."""
        with ExitStack() as stack:
            for actor in ACTORS:
                for process in self.server.workers(actor):
                    stack.enter_context(of(process))
            time.sleep(seconds)

    def _ray_processes(self) -> list[psutil.Process]:
        found = [p for p in psutil.Process(self.server.pid).children(recursive=True) if p.name() in ("raylet", "gcs_server")]
        if len(found) != 2:
            raise FaultBenchFailed(f"a raylet and a GCS were expected, and found {found}")
        return found

    def _cut(self, ports: Sequence[int], seconds: float) -> None:
        with self._links.cut(*ports):
            time.sleep(seconds)

    def _delay(self) -> None:
        with self._links.delayed(DELAY_S):
            time.sleep(STALL_S)

    def _jump_clock(self) -> None:
        """An hour back, then forward to the true time. The other way round, Serve would check no replica for an hour."""
        for offset_s in (-CLOCK_JUMP_S, 0.0):
            self._interposer.set_clock(offset_s)
            time.sleep(STALL_S / 2)

    @staticmethod
    def _lose(redis: RedisServer) -> None:
        redis.stop()
        time.sleep(REDIS_AWAY_S)
        redis.start()
