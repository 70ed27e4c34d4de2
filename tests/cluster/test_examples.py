"""Every shipped example of the native engine starts on machines with pretended GPUs, until a process would touch CUDA."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster
from ray.util import placement_group_table

from actors.processes import Process, ProcessEnded
from actors.ray_pool import Deployment, RaySpawner
from actors.supervisor import ROUTER
from cluster.config import Config, DrafterOptions, HiddenStateOptions, ModelConfig, ModelOptions, StateConfig, load
from cluster.placement import PlacementError
from cluster.resolve import Inventory
from cluster.types import ModelInfo
from deploy.deployment import connect
from engine.model_facts import ModelFacts, read_facts
from engine.models.tokenizer import fingerprint
from tests.support.dspark import write_dspark
from tests.support.examples import EXAMPLES, MACHINES
from tests.support.tiny_model import write_tiny_model
from tests.support.waiting import DEADLINE_S

pytestmark = pytest.mark.ray

TOUCHES_CUDA = "device: must be cpu or auto, since (this build of torch has no CUDA|torch finds no GPU here)"
MEMORY = 512 * 2**30  # of each pretended machine: the examples' drafters are counted with the longest requests


@pytest.fixture(scope="module", params=sorted(MACHINES.keys() - {"vllm-cpu"}))  # tests/cluster/test_vllm.py starts that one
def machines(request: pytest.FixtureRequest) -> Iterator[tuple[str, Cluster]]:
    """An example's name, and a Ray cluster of the machines that it is written for."""
    cluster = Cluster()
    for node in MACHINES[request.param].nodes:
        cluster.add_node(
            wait=False,
            num_cpus=int(node.num_cpus),
            num_gpus=int(node.num_gpus),
            labels=dict(node.labels),
            memory=MEMORY,
            object_store_memory=80 * 2**20,
            include_dashboard=False,
        )
    cluster.wait_for_nodes(DEADLINE_S)
    try:
        yield request.param, cluster
    finally:
        cluster.shutdown()


@pytest.fixture(scope="module")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many key-value heads as an example has ranks."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", num_key_value_heads=4)


@pytest.fixture(autouse=True)
def facts_of_the_tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without vLLM the native engine's reader tells the facts of the one model that is served here for all. GPUs count as
    usable, though torch is built for CPUs."""

    def read(config: Config, folder: Path) -> ModelFacts:
        by_vllm = {"engine": "native", "tensor_parallel": 1} if config.target.engine == "vllm" else {}
        native = config.target.model_copy(update=by_vllm)
        return read_facts(config.model_copy(update={"target": native}), folder)

    monkeypatch.setattr("deploy.deployment.read_facts", read)
    monkeypatch.setattr("deploy.deployment.torch_has_cuda", lambda: True)


def served_here(name: str, cluster: Cluster, model: Path, state: Path) -> Config:
    """The example as it is, but for paths: a tiny model for every model, and neither secrets nor Redis."""
    config = load(EXAMPLES / f"{name}.yaml")
    tiny: dict[type, DrafterOptions] = {ModelOptions: ModelOptions(model=str(model))}
    if any(isinstance(drafter.options, HiddenStateOptions) for drafter in config.drafters):
        tiny |= {HiddenStateOptions: HiddenStateOptions(path=str(write_dspark(state.parent / "drafter", model)))}
    drafters = tuple(one.model_copy(update={"options": tiny.get(type(one.options), one.options)}) for one in config.drafters)
    where = {
        "ray_address": cluster.address,
        "ray_auth": "none",
        "token_file": None,
        "tls": None,
        "state": StateConfig(folder=state),
    }
    return config.model_copy(
        update={
            "model": ModelConfig(name=str(model), max_model_len=config.model.max_model_len),
            "drafters": drafters,
            "cluster": config.cluster.model_copy(update=where),
        }
    )


def test_an_example_starts(machines: tuple[str, Cluster], tiny_model_folder: Path, tmp_path: Path) -> None:
    name, cluster = machines
    config = served_here(name, cluster, tiny_model_folder, tmp_path / "state")
    with connect(config, tmp_path) as deployed:
        deployed.own()
        deployment = deployed.reserve(config, tiny_model_folder)
        check_reserved(deployment, MACHINES[name])
        asyncio.run(check_starts(deployment, tiny_model_folder))


def check_reserved(deployment: Deployment, inventory: Inventory) -> None:
    """Ray holds every group, on machines with the labels that the file asks for, and promises no GPU twice."""
    config, on_node = deployment.config, Counter[str]()
    tables = {name: placement_group_table(group) for name, group in deployment.groups.items()}
    assert {table["state"] for table in tables.values()} == {"CREATED"}
    assert len(tables) == config.target.replicas + len(config.drafters)
    for table in tables.values():
        for i, node in table["bundles_to_node_id"].items():
            on_node[node] += table["bundles"][i].get("GPU", 0)
    num_gpus = [sum(drafter.replicas * drafter.resources.gpus for drafter in config.drafters)]
    num_gpus.append(config.target.replicas * config.target.tensor_parallel * config.target.resources.gpus)
    assert sum(on_node.values()) == pytest.approx(sum(num_gpus))
    assert all(used <= max(node.num_gpus for node in inventory.nodes) for used in on_node.values())


async def check_starts(deployment: Deployment, model_folder: Path) -> None:
    """The first process of every group and the router: those on CPUs start, those on GPUs find no CUDA."""
    config, spawner = deployment.config, RaySpawner(deployment)
    model = ModelInfo("model", 257, 512, (256,), fingerprint(model_folder))
    started = [(await spawner.target("target-0"), config.target.device), (await spawner.control(ROUTER), "cpu")]
    for drafter in config.drafters:
        started.append((await spawner.drafter(drafter.name, drafter, model, ()), drafter.device))
    await asyncio.gather(*(check_start(process, device) for process, device in started))


async def check_start(process: Process, device: str) -> None:
    try:
        if device == "cpu":
            assert (await process.call("start")).pid > 0
        else:
            with pytest.raises(ProcessEnded, match=TOUCHES_CUDA):
                await process.call("start")
    finally:
        await process.kill()


def test_an_example_that_needs_one_gpu_more_is_refused(
    machines: tuple[str, Cluster], tiny_model_folder: Path, tmp_path: Path
) -> None:
    """Before anything is reserved."""
    name, cluster = machines
    config = served_here(name, cluster, tiny_model_folder, tmp_path / "state")
    more = {"replicas": config.target.replicas + 1} if config.target.device == "cuda" else {"device": "cuda"}
    asking = config.model_copy(update={"target": config.target.model_copy(update=more)})
    with connect(asking, tmp_path) as deployed:
        with pytest.raises(PlacementError, match=r"cannot be placed: .* [1-9] GPUs are missing"):
            deployed.reserve(asking, tiny_model_folder)
        assert all(group["state"] == "REMOVED" for group in placement_group_table().values())
