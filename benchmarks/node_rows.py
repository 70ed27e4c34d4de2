"""Rows of the fault table that take a Ray cluster of several nodes: a machine and the GCS are lost."""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

from benchmarks.disturbed import FaultBenchFailed
from benchmarks.fault_rows import ENVIRONMENT, FaultRows, Row, with_two_targets
from benchmarks.redis_server import RedisServer
from benchmarks.server import JoinedServer, ServerProcess
from cluster.config import Config, Resources, TransportConfig
from deploy.local_ray import OBJECT_STORE_BYTES, run_folder
from deploy.process_tree import descendants, end_all

GCS_AWAY_S = 3.0
REPLACED_S = 2.0  # after the loss of a machine another one joins
NUM_MACHINES = 2
MAX_STARTS = 3  # of a machine
LATE = "timed out during startup"  # what Ray says of a raylet that its GCS does not know
MACHINE_CPUS = 2  # holds a target and a drafter, and no second target
MACHINE = {"outrider-bench": "machine"}
MEMORY = {"object_store_memory": OBJECT_STORE_BYTES}
TARGET = Resources(cpus=1.85, gpus=0, threads=1, node_labels=MACHINE)
DRAFTER = Resources(cpus=0.15, gpus=0, threads=1, node_labels=MACHINE)  # the API's 0.2 fit the head only
SETTINGS = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_worker_niceness": "0",  # as of every deployment
    **ENVIRONMENT,
}


def start_node_rows(stack: ExitStack, config: Config, folder: Path) -> "NodeRows":
    """Needs a redis-server, in which the GCS keeps its state. ``stack`` ends it."""
    folder.mkdir()
    redis = RedisServer(folder)
    stack.callback(redis.stop)
    cluster = stack.enter_context(_ray_cluster(redis))
    config = with_two_targets(config, folder, redis)
    config = config.model_copy(
        update={
            "target": config.target.model_copy(update={"resources": TARGET}),
            "drafters": tuple(one.model_copy(update={"resources": DRAFTER}) for one in config.drafters),
            "cluster": config.cluster.model_copy(update={"ray_address": cluster.address, "ray_auth": "none"}),
            "transport": TransportConfig(host="127.0.0.1"),
        }
    )
    return NodeRows(stack.enter_context(JoinedServer(config)), cluster)


@contextmanager
def _ray_cluster(redis: RedisServer) -> Iterator[Any]:
    """A head with the GCS and room for the API, and machines for targets and drafters, as raylets of this one."""
    os.environ.update(SETTINGS)  # Ray reads them at import, and its processes inherit them
    from ray.cluster_utils import Cluster

    with run_folder() as folder:
        head = {"num_cpus": 1, "temp_dir": str(folder / "ray"), "include_dashboard": False, **MEMORY}
        of_head = {
            "RAY_REDIS_ADDRESS": redis.address,
            "RAY_TMPDIR": str(folder),  # where the cluster's address is noted; /tmp/ray need not exist
        }
        with patch.dict(os.environ, of_head):
            # It is shut down below: its own hooks at exit need the main thread.
            try:
                cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
            except BaseException:
                end_all([child for child in descendants() if child.name() in ("raylet", "gcs_server")], grace_s=1.0)
                raise
        try:
            for _ in range(NUM_MACHINES):
                add_machine(cluster)
            yield cluster
        finally:
            cluster.shutdown()


def add_machine(cluster: Any) -> None:
    """A machine whose raylet Ray does not know within 30 s is started again, as Kubernetes would do it. Raises
    FaultBenchFailed after MAX_STARTS."""
    for _ in range(MAX_STARTS):
        try:
            cluster.add_node(num_cpus=MACHINE_CPUS, labels=MACHINE, **MEMORY)
        except Exception as error:  # Ray has no class of its own for it
            if LATE not in str(error):
                raise
            _end_unknown_raylets(cluster)
        else:
            return
    raise FaultBenchFailed(f"Ray did not know a machine within 30 s of its start, {MAX_STARTS} times in a row")


def _end_unknown_raylets(cluster: Any) -> None:
    """Those that were given up would join later."""
    known = {pid for node in cluster.list_all_nodes() for pid in _pids(node)}
    for child in psutil.Process().children():
        if child.name() == "raylet" and child.pid not in known:
            end_all([child, *descendants(child.pid)], grace_s=1.0)


class NodeRows(FaultRows):
    def __init__(self, server: ServerProcess, cluster: Any) -> None:
        super().__init__(server)
        self._cluster = cluster

    def table(self) -> list[Row]:
        return [Row("machine_lost", self._lose_machine, "TargetActor"), Row("gcs_lost", self._lose_gcs)]

    def _lose_machine(self) -> None:
        """That of the drafter, with the target there. Another machine joins later: the drafter has room on the one that is
        left, the target has not."""
        raylet = self.server.workers("DrafterActor")[0].parent()
        assert raylet is not None
        node = next(node for node in self._cluster.worker_nodes if raylet.pid in _pids(node))
        gone = [raylet, *raylet.children(recursive=True)]
        self.killed.update(gone)
        for process in gone:
            process.kill()
        psutil.wait_procs(gone)
        self._cluster.remove_node(node, allow_graceful=False)
        time.sleep(REPLACED_S)
        add_machine(self._cluster)

    def _lose_gcs(self) -> None:
        """It comes back with what Redis has kept, as Kubernetes restarts it."""
        head = self._cluster.head_node
        head.kill_gcs_server()
        time.sleep(GCS_AWAY_S)
        head.start_gcs_server()


def _pids(node: Any) -> set[int]:
    return {one.process.pid for processes in node.all_processes.values() for one in processes}
