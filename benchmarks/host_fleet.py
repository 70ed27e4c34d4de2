"""A server over four hosts: a head where only Ray runs, and three for the rest."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from benchmarks.disturbed import FaultBenchFailed
from benchmarks.hosts import HEAD_PORT, Host, HostedServer, Hosts, why_not
from benchmarks.redis_server import RedisServer
from cluster.config import Config, Resources, TransportConfig

POOL = "outrider/pool"
NUM_REPLICAS = 2  # of the API
TARGET = Resources(cpus=1.85, gpus=0, threads=1, node_labels={POOL: "target"})
DRAFTER_CPUS = (
    0.75  # of all drafters: a replica of the API (0.2) fits beside them, and beside the first target, not the second
)


@dataclass(frozen=True, slots=True)
class Fleet:
    """``front``: the host of drafters, supervisor and a replica of the API, where the server was started and clients enter.
    ``first``: of a target and the other replica; ``second``: of a target alone. ``redis``: keeps the head's state."""

    hosts: Hosts
    head: Host
    front: Host
    first: Host
    second: Host
    redis: RedisServer | None
    cpus_of_second: int = 2

    def config(self, config: Config) -> Config:
        """For this fleet: two targets, two replicas of the API."""
        cpus = round(DRAFTER_CPUS / max(1, len(config.drafters)), 2)
        drafter = Resources(cpus=cpus, gpus=0, threads=1, node_labels={POOL: "front"})
        state = config.cluster.state if self.redis is None else self.redis.config
        joined = {"ray_address": f"{self.head.address}:{HEAD_PORT}", "state": state}
        return config.model_copy(
            update={
                "target": config.target.model_copy(update={"replicas": 2, "resources": TARGET}),
                "drafters": tuple(one.model_copy(update={"resources": drafter}) for one in config.drafters),
                "api": config.api.model_copy(update={"host": "0.0.0.0", "replicas": NUM_REPLICAS}),
                "cluster": config.cluster.model_copy(update=joined),
                "transport": TransportConfig(),
            }
        )

    def server(self, config: Config) -> HostedServer:
        return HostedServer(self.config(config), self.front, self.front)

    def start_head(self) -> None:
        environment = {} if self.redis is None else {"RAY_REDIS_ADDRESS": self.redis.address}
        self.head.start_head("--num-cpus=0", environment=environment)

    def join(self, host: Host) -> None:
        """With CPUs for its parts; ``second`` has some for drafters, too, where these may be beside targets."""
        if host is self.front:
            host.join(self.head, "--num-cpus=1", f"--labels={POOL}=front")
        else:
            host.join(self.head, f"--num-cpus={3 if host is self.first else self.cpus_of_second}", f"--labels={POOL}=target")

    def wait_joined(self, num_hosts: int = 4) -> None:
        """Until Ray knows so many hosts. Raises FaultBenchFailed."""
        self.hosts.wait_joined(self.head, num_hosts)

    def replace(self, host: Host) -> None:
        """By a new machine at its address."""
        host.remove()
        host.add()
        if host is self.head:
            self.start_head()
        else:
            self.join(host)


@contextmanager
def fleet(without_second: bool = False) -> Iterator[Fleet]:
    """With a redis-server, if there is one. ``without_second``: it has not joined yet. Raises FaultBenchFailed: hosts cannot
    be made here."""
    if reason := why_not():
        raise FaultBenchFailed(reason)
    with ExitStack() as stack:
        hosts = stack.enter_context(Hosts())
        redis = None
        if shutil.which("redis-server"):
            folder = hosts.folder / "redis"
            folder.mkdir()
            redis = RedisServer(folder, hosts.own_address)
            stack.callback(redis.stop)
        found = Fleet(hosts, hosts.add(), hosts.add(), hosts.add(), hosts.add(), redis, 4 if without_second else 2)
        found.start_head()
        joined = (found.front, found.first, found.second)[: 2 if without_second else 3]
        for host in joined:
            found.join(host)
        found.wait_joined(1 + len(joined))
        yield found
