"""Drafters that are loaded when requests want them, within the memory of their devices."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from actors.drafter_loader import CONTROL_BYTES, MemoryBudget, memory_budget
from actors.supervisor import Supervisor
from actors.target import DrafterCounts
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
from cluster.placement import place
from cluster.resolve import Inventory, Node, resolve
from deploy.placement_groups import _gpu_bytes, smallest_gpu
from drafters.footprint import CUDA_BYTES, footprint
from router.residency import GB, Stay, Tenant
from tests.support.supervision import FAST, PretendedSpawner, eventually


@pytest.fixture
def spawner() -> PretendedSpawner:
    return PretendedSpawner()


SMALL, LARGE = (DrafterConfig(name=name, options=ModelOptions(model="/nowhere"), load="lazy") for name in ("small", "large"))
EAGER = DrafterConfig(name="eager", options=NgramOptions())


HOMES = MemoryBudget(
    (Tenant("small", "gpu", 6, Stay.LAZY), Tenant("large", "gpu", 6, Stay.LAZY), Tenant("eager", "cpu", 1, Stay.PINNED)),
    {"gpu": 10, "cpu": 10},
)


@pytest.fixture
async def lazy(spawner: PretendedSpawner) -> AsyncIterator[Supervisor]:
    """Two drafters that do not fit at once, and a third that is always there."""
    config = Config(drafters=(SMALL, LARGE, EAGER), supervision=FAST, memory=MemoryConfig(min_residence_s=0.02))
    supervisor = Supervisor(config, spawner, HOMES, load_period_s=0.01)
    yield supervisor
    await supervisor.stop()
    assert not any(process.alive for lives in spawner.lives.values() for process in lives)


def wanting(spawner: PretendedSpawner, followed: dict[str, int] | None = None, **named: int) -> None:
    """From now on so many requests name each drafter, and so many are with each."""
    counts = tuple(DrafterCounts(name, num, 0, 0, None) for name, num in (followed or {}).items())
    process = spawner.now("target-0")
    assert process.report is not None
    process.report = replace(process.report, drafters=counts, named=named)


async def states(supervisor: Supervisor) -> dict[str, str]:
    return {drafter.name: str(drafter.state) for drafter in (await supervisor.status()).drafters}


async def test_a_lazy_drafter_has_no_process_until_it_is_wanted(lazy: Supervisor, spawner: PretendedSpawner) -> None:
    lazy.start()
    await eventually(lambda: {"eager", "router"} <= set(lazy.pids()))
    assert await states(lazy) == {"small": "unloaded", "large": "unloaded", "eager": "ready"}
    assert "small" not in spawner.lives
    await eventually(lambda: ("set_offered", (frozenset({"small", "large"}), frozenset())) in spawner.now("router").calls)
    wanting(spawner, small=1)
    await eventually(lambda: "small" in lazy.pids())
    assert "large" not in spawner.lives


async def test_one_gives_way_to_the_other_when_it_is_idle_and_never_are_both_there(
    lazy: Supervisor, spawner: PretendedSpawner
) -> None:
    lazy.start()
    await eventually(lambda: "router" in lazy.pids())
    wanting(spawner, small=1)
    await eventually(lambda: "small" in lazy.pids())
    wanting(spawner, {"small": 1}, large=8)
    await eventually(lambda: ("set_draining", (frozenset({"small"}),)) in spawner.now("router").calls)
    assert "large" not in spawner.lives, "requests are with the small one"
    assert (await states(lazy))["small"] == "draining"
    wanting(spawner, {"small": 0}, large=8)
    await eventually(lambda: "large" in lazy.pids())
    assert not spawner.now("small").alive
    small, large, _ = (await lazy.status()).drafters
    assert (small.state, small.num_evictions, small.device, small.num_restarts) == ("unloaded", 1, None, 0)
    assert (large.num_loads, large.device, large.num_bytes) == (1, "gpu", 6)


async def test_what_the_router_wishes_for_is_loaded(lazy: Supervisor, spawner: PretendedSpawner) -> None:
    lazy.start()
    await eventually(lambda: "router" in lazy.pids())
    wanting(spawner)
    spawner.now("router").load_demand = {"large": 2}
    await eventually(lambda: "large" in lazy.pids())


async def test_a_lazy_drafter_that_cannot_be_loaded_is_put_aside_and_frees_its_room(
    lazy: Supervisor, spawner: PretendedSpawner
) -> None:
    spawner.stillborn.add("small")
    lazy.start()
    await eventually(lambda: "router" in lazy.pids())
    wanting(spawner, small=1)
    await eventually(lambda: len(spawner.lives.get("small", [])) == FAST.quarantine_restarts)
    await eventually(lambda: lazy.reasons().get("small") == "it would not start")
    wanting(spawner, large=1)
    await eventually(lambda: "large" in lazy.pids())
    assert (await states(lazy))["small"] == "quarantined"


async def test_what_is_decided_is_done_whatever_fails_meanwhile(
    lazy: Supervisor, spawner: PretendedSpawner, monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy.start()
    await eventually(lambda: "router" in lazy.pids())
    wanting(spawner, small=1)
    await eventually(lambda: "small" in lazy.pids())
    end, failures = spawner.end, [OSError("the GCS is away"), RuntimeError("and still is")]

    async def fails_at_first(group: str, give_back: bool = False) -> None:
        if failures:
            raise failures.pop()
        await end(group, give_back)

    monkeypatch.setattr(spawner, "end", fails_at_first)
    wanting(spawner, large=8)
    await eventually(lambda: "large" in lazy.pids())
    assert not failures
    assert not spawner.now("small").alive


async def test_nobody_is_taken_for_idle_while_a_target_is_silent(lazy: Supervisor, spawner: PretendedSpawner) -> None:
    lazy.start()
    await eventually(lambda: "router" in lazy.pids())
    wanting(spawner, small=1)
    await eventually(lambda: "small" in lazy.pids())
    process = spawner.now("target-0")
    assert process.report is not None
    process.report = replace(process.report, status=replace(process.report.status, state="silent"), named={"large": 9})
    num_calls = len(process.calls)
    await eventually(lambda: len(process.calls) > num_calls + 20)
    assert "large" not in spawner.lives


# ---- from a configuration and the machines to tenants and limits


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
    assert found == {"a": gpu, "a/1": gpu, "b": ("n/gpu-1", Stay.LAZY, "n/cpu"), "ngram": ("n/cpu", Stay.PINNED, None)}
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


def test_requests_that_no_kv_cache_holds_take_no_memory_of_drafters() -> None:
    model, inventory = ModelConfig(max_model_len=131_072), Inventory((Node("n", 4),))
    drafter = DrafterConfig(name="a", options=NgramOptions())
    config = resolve(Config(model=model, drafters=(drafter,), memory=MemoryConfig(cpu_gb=1)), inventory)
    with pytest.raises(InvalidField, match="takes 19"):
        memory_budget(config, place(config, inventory), inventory)
    assert memory_budget(config, place(config, inventory), inventory, 100_000).tenants[0].num_bytes < 0.2 * GB


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
    with mock.patch.dict("os.environ", CUDA_VISIBLE_DEVICES="1"), mock.patch("subprocess.run") as run:
        run.return_value.stdout = "24564\n"
        assert _gpu_bytes._function() == 24564 * 2**20
    assert run.call_args.args[0][:3] == ["nvidia-smi", "-i", "1"]
