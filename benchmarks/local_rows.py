"""Rows of the fault table on a server of one machine, with its own Ray cluster."""

import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path

import psutil

from benchmarks.disturbed import POLL_S, FaultBenchFailed
from benchmarks.fault_rows import ENVIRONMENT, STALL_S, FaultRows, Row, with_two_targets
from benchmarks.injections import ACTORS, hostile_clients, stopped, without_descriptors, without_disk
from benchmarks.interposer import Interposer
from benchmarks.redis_server import RedisServer
from benchmarks.server import ServerProcess
from cluster.config import Config, TransportConfig

CUT_OFF_S = 8.0  # longer than the silence after which a link counts as down
REDIS_AWAY_S = 2.0
DELAY_S = 0.3
PROXY_BACK_S = 3.0  # the wrapper starts another at once; Serve alone would take a minute
CLOCK_JUMP_S = 3600.0
_ACTOR_OF = {"target": "TargetActor", "drafter": "DrafterActor", "router": "RouterActor", "supervisor": "PoolSupervisor"}


def start_local_rows(stack: ExitStack, config: Config, folder: Path) -> "LocalRows":
    """A server with its own state, network and clock. ``stack`` ends it."""
    folder.mkdir()
    redis = RedisServer(folder) if shutil.which("redis-server") else None
    if redis is not None:
        stack.callback(redis.stop)
    interposer = stack.enter_context(Interposer(folder))
    config = with_two_targets(config, folder, redis).model_copy(update={"transport": TransportConfig(host="127.0.0.1")})
    server = stack.enter_context(ServerProcess(config, interposer.environment | ENVIRONMENT))
    return LocalRows(server, redis, interposer)


class LocalRows(FaultRows):
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
            Row("kill_proxy", self._kill_proxy, ends_streams=True),
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

    def _kill_proxy(self) -> None:
        """Returns when a new call is answered. What came meanwhile was refused, what was open has ended."""
        proxies, killed_s = self.server.proxies(), time.monotonic()
        for process in proxies:
            process.kill()
        while not self.all_ready():
            if time.monotonic() > killed_s + PROXY_BACK_S:
                raise FaultBenchFailed(f"no call was answered {PROXY_BACK_S:g} s after the proxy was killed")
            time.sleep(POLL_S)

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
            self._interposer.clock.set(offset_s)
            time.sleep(STALL_S / 2)

    @staticmethod
    def _lose(redis: RedisServer) -> None:
        redis.stop()
        time.sleep(REDIS_AWAY_S)
        redis.start()
