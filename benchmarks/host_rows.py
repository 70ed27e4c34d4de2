"""Rows of the fault table on a server over hosts with addresses of their own."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial

from benchmarks.fault_rows import FaultRows, Row
from benchmarks.host_fleet import Fleet, fleet
from benchmarks.hosts import Host, HostedServer
from benchmarks.link_forwarder import Impairment
from cluster.config import Config

CUT_OFF_S = 8.0  # longer than the silence after which a link counts as down, shorter than that after which a host is dead
SPLIT_S = 45.0  # longer than both
IMPAIRED_S = 8.0
REPLACED_S = 2.0  # after the loss of a host another one starts
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
        self._hosts = hosts

    def table(self) -> list[Row]:
        hosts = self._hosts
        rows = [
            Row("host_cut_off", lambda: self._suffer(hosts.second.cut_off, CUT_OFF_S)),
            Row("host_split", lambda: self._split(hosts.second), "TargetActor"),
            Row("host_lost", lambda: self._lose(hosts.second), "TargetActor"),
            Row("api_host_lost", lambda: self._lose(hosts.first), "ServeReplica", ends_streams=True),
            *(Row(name, partial(self._impair, how)) for name, how in IMPAIRMENTS.items()),
        ]
        return rows if hosts.redis is None else [*rows, Row("head_lost", lambda: self._lose(hosts.head))]

    @staticmethod
    def _suffer(fault: Callable[[], AbstractContextManager[None]], seconds: float) -> None:
        with fault():
            time.sleep(seconds)

    def _impair(self, how: Impairment) -> None:
        self._suffer(lambda: self._hosts.second.impaired(how), IMPAIRED_S)

    def _split(self, host: Host) -> None:
        """Until Ray holds it for dead; then it is back, and is started again, as Kubernetes would do it."""
        self.killed.update(host.processes())
        self._suffer(host.cut_off, SPLIT_S)
        host.wait_ray_ended()
        self._hosts.replace(host)
        self._hosts.wait_joined()

    def _lose(self, host: Host) -> None:
        """Returns when another machine has joined, or, in place of the head, when all others have found it."""
        self.killed.update(host.processes())
        host.remove()
        time.sleep(REPLACED_S)
        self._hosts.replace(host)
        self._hosts.wait_joined()
