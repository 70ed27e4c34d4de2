"""Drafters that are loaded when requests want them, within the memory of their devices."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from actors.memory_budget import MemoryBudget
from actors.supervisor import Supervisor
from actors.target import DrafterCounts
from cluster.config import (
    Config,
    DrafterConfig,
    MemoryConfig,
    ModelOptions,
    NgramOptions,
)
from router.residency import Stay, Tenant
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
    config = Config(
        drafters=(SMALL, LARGE, EAGER),
        supervision=FAST,
        memory=MemoryConfig(min_residence_s=0.02),
    )
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
