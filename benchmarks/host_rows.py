"""Rows of the fault table on a server over hosts with addresses of their own."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial

import httpx

from benchmarks.disturbed import DEADLINE_S, RECOVERY_POLL_S, FaultBenchFailed
from benchmarks.fault_rows import FaultRows, Row, RowResult, Turns
from benchmarks.host_fleet import NUM_REPLICAS, Fleet, fleet
from benchmarks.hosts import Host, HostedServer
from benchmarks.link_forwarder import Impairment
from benchmarks.load import LoadRequest, TimedAnswer
from cluster.config import Config

CUT_OFF_S = 8.0  # longer than the silence after which a link counts as down, shorter than that after which a host is dead
SPLIT_S = 45.0  # longer than both
IMPAIRED_S = 8.0
REPLACED_S = 2.0  # after the loss of a host another one starts
LAUNCHER_LOST, API_HOST_LOST = "launcher_host_lost", "api_host_lost"
CONTROLLER = "ServeController"  # on the head
IMPAIRMENTS = {
    "host_deaf": Impairment(deaf=True),
    "host_delayed": Impairment(delay_s=0.05),  # 100 ms there and back
    "host_lossy": Impairment(loss=0.02),
    "host_slow": Impairment(bytes_per_s=125e3),  # a megabit a second
}


def start_host_rows(stack: ExitStack, config: Config) -> "HostRows":
    """``stack`` ends the hosts and the server."""
    hosts = stack.enter_context(fleet())
    supervision = config.supervision.model_copy(update={"quarantine_restarts": 1000})
    server = hosts.server(config.model_copy(update={"supervision": supervision}))
    return HostRows(stack.enter_context(server), hosts)


class HostRows(FaultRows):
    def __init__(self, server: HostedServer, hosts: Fleet) -> None:
        super().__init__(server)
        self._server, self._hosts = server, hosts
        self._num_processes[CONTROLLER] = 1

    def table(self) -> list[Row]:
        hosts = self._hosts
        rows = [
            Row("host_cut_off", lambda: self._suffer(hosts.second.cut_off, CUT_OFF_S)),
            Row("host_split", lambda: self._split(hosts.second), "TargetActor"),
            Row("host_lost", lambda: self._lose(hosts.second), "TargetActor"),
            Row(API_HOST_LOST, lambda: self._lose(hosts.first), "ServeReplica", ends_streams=True),
            Row("api_replicas_lost", self._lose_replicas, "ServeReplica", ends_streams=True),
            Row("clocks_differ", lambda: self._suffer(self._clocks_differ, IMPAIRED_S)),
            Row(LAUNCHER_LOST, self._lose_launcher, "DrafterActor", ends_streams=True),
            *(Row(name, partial(self._impair, how)) for name, how in IMPAIRMENTS.items()),
        ]
        return rows if hosts.redis is None else [*rows, Row("head_lost", lambda: self._lose(hosts.head), CONTROLLER)]

    def measure(self, turns: Turns, asks: Sequence[LoadRequest]) -> None:
        super().measure(turns, asks)
        self._enter_beside(None)

    def _measure_once(self, row: Row, result: RowResult, asks: Sequence[LoadRequest], plain: Sequence[TimedAnswer]) -> None:
        hosts = self._hosts
        self._enter_beside({LAUNCHER_LOST: hosts.front, API_HOST_LOST: hosts.first}.get(row.name, hosts.head))
        super()._measure_once(row, result, asks, plain)

    def _enter_beside(self, lost: Host | None) -> None:
        """Clients enter at another host, the front if it answers now: a connection to a machine without power never ends."""
        end_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < end_s:
            for host in (self._hosts.front, self._hosts.first, self._hosts.head):
                self._server.enter_at(host)
                with suppress(httpx.TransportError), self._server.client() as http:
                    if host is not lost and http.get("/health").is_success:
                        self.target = self._server.target()
                        return
            time.sleep(RECOVERY_POLL_S)
        raise FaultBenchFailed(f"no host but {lost} answers: {self.server.last_words()}")

    @staticmethod
    def _suffer(fault: Callable[[], AbstractContextManager[None]], seconds: float) -> None:
        with fault():
            time.sleep(seconds)

    def _impair(self, how: Impairment) -> None:
        self._suffer(lambda: self._hosts.second.impaired(how), IMPAIRED_S)

    @contextmanager
    def _clocks_differ(self) -> Iterator[None]:
        """By an hour each."""
        hosts = (self._hosts.front, self._hosts.first, self._hosts.second)
        try:
            for number, host in enumerate(hosts, -1):
                host.clock.set(number * 3600.0)
            yield
        finally:
            for host in hosts:
                host.clock.set(0.0)

    def _lose_replicas(self) -> None:
        """One by one: the next when Serve has replaced the last. Meanwhile the others answer."""
        for replica in self.server.workers("ServeReplica"):
            self.killed.add(replica)
            replica.kill()
            self._await_answer()
            end_s = time.monotonic() + DEADLINE_S
            while replica in (found := self.server.workers("ServeReplica")) or len(found) < NUM_REPLICAS:
                if time.monotonic() > end_s:
                    raise FaultBenchFailed(f"Serve has not replaced {replica}: {self.server.last_words()}")
                time.sleep(RECOVERY_POLL_S)

    def _split(self, host: Host) -> None:
        """Until Ray holds it for dead; then it is back, and is started again, as Kubernetes would do it."""
        self.killed.update(host.processes())
        self._suffer(host.cut_off, SPLIT_S)
        host.wait_ray_ended()
        self._hosts.replace(host)
        self._hosts.wait_joined()

    def _lose(self, host: Host, beside: Callable[[], object] = lambda: None) -> None:
        """Returns when another machine has joined, or, in place of the head, when all others have found it."""
        self.killed.update(host.processes())
        host.remove()
        beside()
        time.sleep(REPLACED_S)
        self._hosts.replace(host)
        self._hosts.wait_joined()

    def _lose_launcher(self) -> None:
        """With the drafters, the supervisor and a replica of the API; then `outrider serve` is started once more."""

        def beside() -> None:
            self._await_answer()
            self._hosts.wait_joined(3)  # until Ray has found the launcher dead, another one is refused

        self._lose(self._hosts.front, beside)
        self._server.start()
        self._server.wait_ready()

    def _await_answer(self) -> None:
        asyncio.run(self.until_answered(LoadRequest("beside the loss", (50, 51), 1)))
