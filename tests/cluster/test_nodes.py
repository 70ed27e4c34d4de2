"""Several raylets with pretended GPUs on this machine: groups land as planned, and a lost node is survived."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util import placement_group_table, remove_placement_group
from ray.util.state import list_actors

from actors.gateway import LinkClient
from actors.ray_pool import Deployment, start_supervisor
from benchmarks.server import ServerProcess
from cluster.client import ClusterStatus
from cluster.config import Config, DrafterConfig, ModelConfig, ModelOptions, NgramOptions, Resources, TargetConfig
from cluster.placement import place
from cluster.resolve import Inventory, resolve
from cluster.sampling_params import SamplingParams
from cluster.types import Request
from deploy.placement_groups import make_groups, read_inventory, with_cores
from profiler.hardware import num_cores
from tests.support.servers import served
from tests.support.settings import small_config
from tests.support.waiting import DEADLINE_S, eventually, gauge

pytestmark = pytest.mark.ray

# A dead node refuses connections and is found in two seconds instead of fifteen; a slow one is given 20 s.
FAST_HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 3,
    "health_check_timeout_ms": 20_000,
}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    """A head where nothing can be placed, one node of 4 GPUs, and two of 2 GPUs."""
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "object_store_memory": 80 * 2**20, "_system_config": FAST_HEALTH},
    )
    for num_gpus in (4, 2, 2):
        cluster.add_node(num_cpus=8, num_gpus=num_gpus, object_store_memory=80 * 2**20)
    ray.init(address=cluster.address, namespace="nodes", logging_level="ERROR", log_to_driver=False)
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_groups_land_as_planned(nodes: Cluster) -> None:
    """The ranks of the target together on the only node that holds them, the drafters on GPUs of their own elsewhere."""
    gpu = Resources(cpus=1, gpus=1, threads=1)
    config = Config(
        target=TargetConfig(device="cuda", resources=gpu).model_copy(update={"tensor_parallel": 4}),
        drafters=(
            DrafterConfig(name="small", options=ModelOptions(model="small"), device="cuda", replicas=2, resources=gpu),
            DrafterConfig(name="ngram", options=NgramOptions(), resources=Resources(cpus=0.1, gpus=0, threads=1)),
        ),
    )
    inventory = read_inventory(ray.nodes())
    plan = place(resolve(config, inventory), inventory)
    groups = make_groups(plan)
    try:
        landed: dict[str, list[str]] = {
            name: [placement_group_table(group)["bundles_to_node_id"][i] for i in range(len(group.bundle_specs))]
            for name, group in groups.items()
        }
        assert len(set(landed["target-0"])) == 1
        assert landed["target-0"][0] == plan.group("target-0").bundles[0].node
        assert len(set(landed["drafter-small"])) == 2
        assert landed["target-0"][0] not in landed["drafter-small"]

        class Bystander:
            """Sits in a bundle as a rank or a drafter would, and says where it is."""

            def where(self) -> tuple[str, tuple[str, ...]]:
                return ray.get_runtime_context().get_node_id(), tuple(str(gpu) for gpu in ray.get_gpu_ids())

        sitting = [
            ray.remote(Bystander)
            .options(
                num_cpus=1,
                num_gpus=1,
                scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    groups[name], placement_group_bundle_index=i
                ),
            )
            .remote()
            for name, num_bundles in (("target-0", 4), ("drafter-small", 2))
            for i in range(num_bundles)
        ]
        places = ray.get([one.where.remote() for one in sitting], timeout=DEADLINE_S)
        assert len({(node, gpus) for node, gpus in places}) == 6, "two processes share a GPU"
        for one in sitting:
            ray.kill(one)
    finally:
        for group in groups.values():
            remove_placement_group(group)


def test_a_node_that_does_not_answer_is_left_out(
    nodes: Cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here one that is gone since the inventory was read."""
    monkeypatch.setattr("deploy.placement_groups.QUERY_DEADLINE_S", DEADLINE_S)  # the others may be slow
    present = read_inventory(ray.nodes())
    gone = replace(present.nodes[0], name="0" * 56)
    found = with_cores(Inventory((*present.nodes, gone)))
    assert [node.num_cores for node in found.nodes] == [num_cores()] * len(present.nodes) + [None]
    assert gone.name in caplog.text


class Caller:
    """A gateway's client on an event loop of its own thread."""

    def __init__(self, make: Callable[[], LinkClient]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="caller")
        self._thread.start()
        self.client = make()

    def complete(self, request: Request) -> Any:
        async def one() -> list[int]:
            return [token async for commit in self.client.generate(request) for token in commit.token_ids]

        return asyncio.run_coroutine_threadsafe(one(), self._loop)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.client.close(), self._loop).result(DEADLINE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)
        self._loop.close()


def test_a_drafter_whose_node_is_lost_comes_back_on_another(nodes: Cluster, tiny_model_folder: Path, tmp_path: Path) -> None:
    """Over gRPC between nodes. What runs meanwhile runs on, with the same tokens."""
    # Room for the target and nobody else: whatever node the drafter is on may be lost.
    nodes.add_node(num_cpus=1, labels={"zone": "safe"}, object_store_memory=80 * 2**20)
    eventually(lambda: any(node["Labels"].get("zone") == "safe" for node in ray.nodes()))
    base = small_config(str(tiny_model_folder), tmp_path)
    config = base.model_copy(
        update={
            "model": ModelConfig(name=str(tiny_model_folder), max_model_len=256),
            "target": base.target.model_copy(
                update={
                    "device": "cpu",
                    "kv_cache_gb": 0.01,
                    "resources": Resources(cpus=1, gpus=0, threads=1, node_labels={"zone": "safe"}),
                }
            ),
            "drafters": (
                DrafterConfig(name="ngram", options=NgramOptions(), resources=Resources(cpus=0.5, gpus=0, threads=1)),
            ),
            "cluster": base.cluster.model_copy(update={"namespace": "nodes"}),
        }
    )
    inventory = read_inventory(ray.nodes())
    config = resolve(config, inventory)
    assert config.transport.kind == "grpc"
    groups = make_groups(place(config, inventory))
    supervisor = start_supervisor(Deployment(config, groups, str(tmp_path), "secret"))
    caller = None
    try:
        directory = ray.get(supervisor.ready.remote(), timeout=DEADLINE_S)
        status: Callable[[], ClusterStatus] = lambda: ray.get(supervisor.status.remote(), timeout=DEADLINE_S)  # noqa: E731
        eventually(lambda: status().drafters[0].state == "ready", DEADLINE_S)
        caller = Caller(lambda: LinkClient("test", directory.model, directory.addresses, _no_status, "secret", DEADLINE_S))
        assert caller.client.wait_linked(DEADLINE_S)
        sampling = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
        alone = caller.complete(Request("alone", (5, 6, 7), sampling, time.monotonic())).result(DEADLINE_S)

        pid = ray.get(supervisor.pids.remote())["ngram"]
        where = _node_of(pid)
        during = caller.complete(Request("during", (5, 6, 7), sampling, time.monotonic()))
        nodes.remove_node(_raylet(nodes, where), allow_graceful=False)
        assert during.result(DEADLINE_S) == alone
        eventually(lambda: not _alive(where), DEADLINE_S)
        eventually(lambda: status().drafters[0].num_restarts >= 1, DEADLINE_S)
        eventually(lambda: status().drafters[0].state == "ready", DEADLINE_S)
        assert _node_of(ray.get(supervisor.pids.remote())["ngram"]) != where
        again = caller.complete(Request("again", (5, 6, 7), sampling, time.monotonic()))
        assert again.result(DEADLINE_S) == alone
    finally:
        if caller is not None:
            caller.close()
        ray.get(supervisor.stop.remote(), timeout=DEADLINE_S)
        ray.kill(supervisor)
        for group in groups.values():
            remove_placement_group(group)


def test_a_running_cluster_is_joined_and_left_as_it_was(nodes: Cluster, tiny_model_folder: Path, tmp_path: Path) -> None:
    base = small_config(str(tiny_model_folder), tmp_path)
    joining = base.cluster.model_copy(update={"ray_address": nodes.address, "ray_auth": "none", "namespace": "joined"})
    config = base.model_copy(update={"cluster": joining})
    with served(config) as server, server.client() as http:
        assert http.post("/v1/completions", json={"model": "model", "prompt": [5, 6], "max_tokens": 3}).status_code == 200
        eventually(lambda: gauge(http, "outrider_drafter_ready") == 2, DEADLINE_S)
        eventually(lambda: {"TargetActor", "DrafterActor", "RouterActor", "PoolSupervisor"} <= _actor_classes("joined"))
    assert server.wait_end() == 0, server.last_words()
    eventually(lambda: not _actor_classes("joined"), DEADLINE_S)
    eventually(lambda: {group["state"] for group in placement_group_table().values()} <= {"REMOVED"})


def test_a_cluster_that_asks_for_no_token_is_not_joined(nodes: Cluster, tiny_model_folder: Path, tmp_path: Path) -> None:
    base = small_config(str(tiny_model_folder), tmp_path)
    joining = base.cluster.model_copy(update={"ray_address": nodes.address, "namespace": "refused"})
    server = ServerProcess(base.model_copy(update={"cluster": joining}))
    server.start()
    assert server.wait_end() == 1
    server.__exit__(None, None, None)
    assert "asks for no token" in server.last_words(1)
    assert not _actor_classes("refused")


def _actor_classes(namespace: str) -> set[str]:
    actors = list_actors(filters=[("ray_namespace", "=", namespace), ("state", "=", "ALIVE")], limit=1000)
    return {actor.class_name for actor in actors}


async def _no_status() -> ClusterStatus:
    raise NotImplementedError


def _node_of(pid: int) -> str:
    return next(actor.node_id for actor in list_actors(filters=[("pid", "=", str(pid)), ("state", "=", "ALIVE")]))


def _alive(node_id: str) -> bool:
    return any(node["NodeID"] == node_id and node["Alive"] for node in ray.nodes())


def _raylet(cluster: Cluster, node_id: str) -> Any:
    return next(node for node in cluster.worker_nodes if node.node_id == node_id)
