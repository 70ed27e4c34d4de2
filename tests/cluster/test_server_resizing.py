"""Targets and drafters join and leave a real Ray cluster, on pretended GPUs, while streams run."""

import asyncio
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util import get_placement_group, placement_group_table, remove_placement_group

from actors.gateway import LinkClient
from actors.ray_groups import named_groups
from actors.ray_pool import Deployment, RaySpawner, start_supervisor
from actors.supervisor import Supervisor
from cluster.client import ClusterStatus
from cluster.config import DrafterConfig, ModelConfig, NgramOptions, Resources, ScalingConfig, Section, SloClass, SloConfig
from cluster.placement import place
from cluster.resolve import resolve
from cluster.sampling_params import SamplingParams
from cluster.types import Request
from deploy.placement_groups import make_groups, read_inventory
from router.scaling.report import FleetSize
from tests.cluster.test_nodes import Caller, _no_status
from tests.support.settings import small_config
from tests.support.waiting import DEADLINE_S, eventually

pytestmark = pytest.mark.ray

NUM_STREAMS = 6


@pytest.fixture
def node() -> Iterator[Cluster]:
    """One machine of 4 CPUs and 2 pretended GPUs."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "num_gpus": 2, "object_store_memory": 80 * 2**20})
    ray.init(address=cluster.address, namespace="resizing", logging_level="ERROR", log_to_driver=False)
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def _deployment(model: Path, state: Path, **changes: Section) -> Deployment:
    """One target that may become two, and no drafter that may become two."""
    base = small_config(str(model), state)
    of_target = base.target.model_copy(
        update={"device": "cpu", "kv_cache_gb": 0.01, "max_replicas": 2, "resources": Resources(cpus=1, gpus=0, threads=1)}
    )
    ngram = DrafterConfig(
        name="ngram",
        options=NgramOptions(),
        replicas=0,
        min_replicas=0,
        max_replicas=2,
        resources=Resources(cpus=0.5, gpus=0, threads=1),
    )
    inventory = read_inventory(ray.nodes())
    config = resolve(
        base.model_copy(
            update={
                "model": ModelConfig(name=str(model), max_model_len=256),
                "target": of_target,
                "drafters": (ngram,),
                "cluster": base.cluster.model_copy(update={"namespace": "resizing"}),
                **changes,
            }
        ),
        inventory,
    )
    groups = make_groups(place(config, inventory))
    assert set(groups) == {"target-0"}
    return Deployment(config, groups, str(state), "secret")


def test_targets_and_drafters_join_and_leave_under_streams(node: Cluster, tiny_model_folder: Path, tmp_path: Path) -> None:
    """All tokens are those of the smallest cluster, and what left has given back its place."""
    deployment = _deployment(tiny_model_folder, tmp_path)
    supervisor = start_supervisor(deployment)
    caller = None
    try:
        directory = ray.get(supervisor.ready.remote(), timeout=DEADLINE_S)
        caller = Caller(lambda: LinkClient("test", directory.model, directory.addresses, _no_status, "secret", DEADLINE_S))
        assert caller.client.wait_linked(DEADLINE_S)
        sampling = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)

        def start(name: str) -> list[object]:
            asks = [Request(f"{name}-{i}", (5, 6, 7 + i), sampling, time.monotonic()) for i in range(NUM_STREAMS)]
            return [caller.complete(ask) for ask in asks]

        def status() -> ClusterStatus:
            answer: ClusterStatus = ray.get(supervisor.status.remote(), timeout=DEADLINE_S)
            return answer

        def follow() -> None:
            known = ray.get(supervisor.ready.remote(), timeout=DEADLINE_S)
            caller.client.set_leaving(known.leaving)
            caller.client.set_addresses(known.addresses)

        alone = [one.result(DEADLINE_S) for one in start("alone")]

        ray.get(supervisor.resize.remote(FleetSize(2, {"ngram": 2})), timeout=DEADLINE_S)
        eventually(lambda: [t.state for t in status().targets] == ["ready"] * 2, DEADLINE_S)
        eventually(lambda: [d.state for d in status().drafters] == ["ready"] * 2, DEADLINE_S)
        assert _groups() == {"target-0", "target-1", "drafter-ngram", "drafter-ngram/1"}
        follow()
        assert caller.client.wait_linked(DEADLINE_S, num_targets=2)
        eventually(lambda: all("ngram" in t.riders for t in status().targets), DEADLINE_S)

        during = start("during")
        ray.get(supervisor.resize.remote(FleetSize(1, {"ngram": 0})), timeout=DEADLINE_S)
        follow()
        assert [one.result(DEADLINE_S) for one in during] == alone
        eventually(lambda: _groups() == {"target-0"}, DEADLINE_S)
        follow()
        assert [target.name for target in status().targets] == ["target-0"]
        assert not status().drafters
        assert [one.result(DEADLINE_S) for one in start("after")] == alone
    finally:
        if caller is not None:
            caller.close()
        ray.get(supervisor.stop.remote(), timeout=DEADLINE_S)
        ray.kill(supervisor)
        for group in deployment.groups.values():
            remove_placement_group(group)
    eventually(lambda: not _groups(), DEADLINE_S)


@pytest.mark.nightly
async def test_a_target_joins_in_a_burst_and_leaves_after_it(node: Cluster, tiny_model_folder: Path, tmp_path: Path) -> None:
    """By itself, on a clock that runs twenty times as fast; all tokens are those of the smallest cluster."""
    # With that objective a target can serve one request, so that every further one needs another target.
    slo = SloConfig(classes={"chat": SloClass(ttft_ms=60_000, tpot_ms=0.001)}, default="chat", shed=False)
    scaling = ScalingConfig(policy="outrider", target_start_s=5)
    deployment = _deployment(tiny_model_folder, tmp_path, slo=slo, scaling=scaling)

    async def resources() -> dict[str, float]:
        return ray.cluster_resources()

    supervisor = Supervisor(deployment.config, RaySpawner(deployment), None, resources)
    supervisor._autoscaler._clock = lambda: 20.0 * time.monotonic()
    sampling = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    numbers, tokens = count(), set()
    burst: list[asyncio.Task[None]] = []

    async def stream(client: LinkClient) -> None:
        request = Request(f"stream-{next(numbers)}", (5, 6, 7), sampling, time.monotonic())
        tokens.add(tuple([token async for commit in client.generate(request) for token in commit.token_ids]))

    async def busy(client: LinkClient) -> None:
        while True:
            await stream(client)

    async def until(names: set[str]) -> None:
        while {one.name for one in (await supervisor.status()).targets if one.state == "ready"} != names:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    client = None
    try:
        async with asyncio.timeout(DEADLINE_S):
            directory = await supervisor.ready()
            assert directory.model is not None
            client = LinkClient("test", directory.model, directory.addresses, _no_status, "secret", DEADLINE_S)
            assert await asyncio.to_thread(client.wait_linked, DEADLINE_S)
            await stream(client)
            burst += [asyncio.create_task(busy(client)) for _ in range(NUM_STREAMS)]
            await until({"target-0", "target-1"})
            client.set_addresses((await supervisor.ready()).addresses)
            assert await asyncio.to_thread(client.wait_linked, DEADLINE_S, 2)
            await asyncio.gather(*(stream(client) for _ in range(4)))
            assert not any(task.done() for task in burst)  # none has failed
            for task in burst:
                task.cancel()
            await asyncio.gather(*burst, return_exceptions=True)
            await until({"target-0"})
            await asyncio.to_thread(eventually, lambda: _groups() == {"target-0"}, DEADLINE_S)
            events = [one for one in (await supervisor.status()).scale_events if one.name == "target"]
            assert [(one.num_before, one.num_after) for one in events] == [(1, 2), (2, 1)]
            await stream(client)
            assert len(tokens) == 1
    finally:
        for task in burst:
            task.cancel()
        await asyncio.gather(*burst, return_exceptions=True)
        if client is not None:
            await client.close()
        await supervisor.stop()
        for name in named_groups():  # the last stream may have let another target join
            remove_placement_group(get_placement_group(name))
    eventually(lambda: not _groups(), DEADLINE_S)


def _groups() -> set[str]:
    return {group["name"] for group in placement_group_table().values() if group["state"] == "CREATED"}
