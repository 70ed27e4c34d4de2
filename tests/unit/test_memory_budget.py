"""From a configuration and the machines to tenants and limits."""

from pathlib import Path

import pytest

from actors.memory_budget import CONTROL_BYTES, memory_budget
from cluster.config import (
    Config,
    DrafterConfig,
    MemoryConfig,
    ModelConfig,
    ModelOptions,
    NgramOptions,
    Resources,
    TargetConfig,
)
from cluster.errors import InvalidField
from cluster.inventory import Inventory, Node
from cluster.placement import place
from cluster.resolve import resolve
from deploy.placement_groups import smallest_gpu
from drafters.footprint import CUDA_BYTES, footprint
from router.residency import GB, Stay

GPU_BYTES = 40 * GB


def budget_of(config: Config, *nodes: Node) -> tuple[dict[str, tuple[str, Stay, str | None]], dict[str, int]]:
    inventory = Inventory(nodes)
    config = resolve(config, inventory)
    budget = memory_budget(config, place(config, inventory), inventory)
    return {tenant.name: (tenant.device, tenant.stay, tenant.fallback) for tenant in budget.tenants}, budget.limits


def model_drafter(folder: Path, name: str, **options: object) -> DrafterConfig:
    return DrafterConfig.model_validate(
        {"name": name, "options": ModelOptions(model=str(folder), kv_cache_gb=0.01), **options}
    )


def test_drafters_share_the_gpus_that_targets_leave_and_may_fall_back_to_their_machine(tiny_model_folder: Path) -> None:
    drafters = (
        model_drafter(tiny_model_folder, "a", replicas=2),
        model_drafter(tiny_model_folder, "b", load="lazy"),
        DrafterConfig(name="ngram", options=NgramOptions()),
    )
    config = Config(model=ModelConfig(name=str(tiny_model_folder)), drafters=drafters)
    found, limits = budget_of(config, Node("n", 8, 2, memory_bytes=50 * GB, gpu_bytes=GPU_BYTES))
    gpu = ("n/gpu-1", Stay.START, "n/cpu")
    assert found == {
        "a": gpu,
        "a/1": gpu,
        "b": ("n/gpu-1", Stay.LAZY, "n/cpu"),
        "ngram": ("n/cpu", Stay.PINNED, None),
    }
    assert limits["n/gpu-1"] == int(0.9 * GPU_BYTES)
    assert limits["n/cpu"] == int(0.9 * 50 * GB) - CONTROL_BYTES, "the target is on a GPU"


def test_drafters_have_what_a_target_on_the_same_gpu_leaves(tiny_model_folder: Path) -> None:
    target = TargetConfig(device="cuda", resources=Resources(gpus=0.75))
    drafters = (model_drafter(tiny_model_folder, "a", device="cuda", resources={"gpus": 0.25}),)
    config = Config(model=ModelConfig(name=str(tiny_model_folder)), target=target, drafters=drafters)
    _, limits = budget_of(config, Node("n", 8, 1, gpu_bytes=GPU_BYTES))
    assert limits["n/gpu-0"] == int(0.9 * GPU_BYTES * 0.25)


def test_on_cpus_what_the_target_takes_is_taken_off_unless_the_file_names_the_limit(tiny_model_folder: Path) -> None:
    target = TargetConfig(device="cpu", kv_cache_gb=2)
    config = Config(model=ModelConfig(name=str(tiny_model_folder)), target=target)
    _, limits = budget_of(config, Node("n", 4, memory_bytes=20 * GB))
    assert 15 * GB - CONTROL_BYTES < limits["n/cpu"] < 16 * GB - CONTROL_BYTES
    named = config.model_copy(update={"memory": MemoryConfig(cpu_gb=3)})
    assert budget_of(named, Node("n", 4, memory_bytes=20 * GB))[1] == {"n/cpu": 3 * GB}
    assert budget_of(config, Node("n", 4))[1] == {}, "nobody knows what the machine has"


def test_a_drafter_that_fits_nowhere_ends_the_start_with_figures(tiny_model_folder: Path) -> None:
    drafter = model_drafter(tiny_model_folder, "a")
    memory = MemoryConfig(cpu_gb=0.1)
    config = Config(model=ModelConfig(name=str(tiny_model_folder)), drafters=(drafter,), memory=memory)
    with pytest.raises(InvalidField, match=r"takes \d\.\d\d GB, more than the 0\.10 GB for drafters on n/cpu.*got 'a'"):
        budget_of(config, Node("n", 4))


def test_a_drafter_whose_files_are_elsewhere_counts_nothing(tiny_model_folder: Path, tmp_path: Path) -> None:
    missing = model_drafter(tmp_path / "elsewhere", "a", load="lazy")
    config = Config(model=ModelConfig(name=str(tiny_model_folder)), drafters=(missing,), memory=MemoryConfig(cpu_gb=0.1))
    assert budget_of(config, Node("n", 4))[0] == {"a": ("n/cpu", Stay.LAZY, None)}


def test_a_gpu_holds_a_context_and_no_lists(tiny_model_folder: Path) -> None:
    drafter = model_drafter(tiny_model_folder, "a")
    assert footprint(drafter, "cuda", 100).process_bytes == CUDA_BYTES
    assert footprint(drafter, "cuda", 100).request_bytes == 0


def test_the_smallest_of_the_gpus_counts() -> None:
    assert smallest_gpu("81559\n40960\n[N/A]\n") == 40960 * 2**20
    assert smallest_gpu("") is None
