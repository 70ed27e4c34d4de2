"""The supervisor over pretended processes: what it starts, when it replaces, whom it tells."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from actors.drafter import DrafterInfo
from actors.memory_budget import MemoryBudget
from actors.processes import Process, ProcessEnded, ProcessState
from actors.router import RouterInfo
from actors.supervisor import Supervisor
from actors.target import DrafterCounts, TargetInfo, TargetReport
from cluster.client import TargetStatus
from cluster.config import (
    Config,
    DrafterConfig,
    MemoryConfig,
    ModelOptions,
    NgramOptions,
    RouterConfig,
    SupervisionConfig,
    TargetConfig,
)
from cluster.errors import InvalidField
from cluster.types import ModelInfo
from deploy.api.settings import ApiSettings
from router.devices import Stay, Tenant

MODEL = ModelInfo("tiny", 100, 64, (0,), "fingerprint")
FAST = SupervisionConfig(
    health_period_ms=5,
    health_timeout_ms=50,
    start_timeout_s=0.5,
    restart_backoff_ms=1,
    max_restart_backoff_ms=5,
    quarantine_restarts=3,
    quarantine_s=600,
)


@dataclass(eq=False)
class PretendedProcess:
    """Answers until it is told to die or to fall silent."""

    name: str
    info: Any
    starts: bool = True
    silent: bool = False
    unread: float = 0.0
    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    report: TargetReport | None = None
    load_demand: dict[str, int] = field(default_factory=dict)
    _end: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def die(self, reason: str) -> None:
        if not self._end.done():
            self._end.set_result(reason)

    @property
    def alive(self) -> bool:
        return not self._end.done()

    async def ended(self) -> str:
        return await asyncio.shield(self._end)

    async def stalled_s(self) -> float:
        await self._answer()
        return self.unread

    async def call(self, method: str, *args: Any) -> Any:
        await self._answer()
        self.calls.append((method, args))
        return {"start": self.info, "report": self.report, "load_demand": self.load_demand}.get(method)

    async def kill(self) -> None:
        self.die("killed")

    async def _answer(self) -> None:
        if not self.alive:
            raise ProcessEnded(self._end.result())
        if self.silent:
            await asyncio.sleep(3600)
        if not self.starts:
            self.die("it would not start")
            raise ProcessEnded("it would not start")


@dataclass
class PretendedSpawner:
    lives: dict[str, list[PretendedProcess]] = field(default_factory=dict)
    stillborn: set[str] = field(default_factory=set)
    mute: set[str] = field(default_factory=set)

    async def target(self, name: str) -> Process:
        number = len(self.lives.get(name, []))
        process = self._born(name, TargetInfo(name, f"grpc://node:{number}", MODEL, 100 + number))
        process.report = TargetReport(
            TargetStatus(name, "ready", 1, 2, 10, 5, 30.0, 7.0), (DrafterCounts("ngram", 1, 40, 30, 0.002),), 6
        )
        return process

    async def drafter(self, name: str, config: DrafterConfig, model: ModelInfo, addresses: Sequence[str]) -> Process:
        assert model is MODEL
        assert addresses
        return self._born(name, DrafterInfo(name, 200))

    async def router(self) -> Process:
        return self._born("router", RouterInfo(300))

    async def end_drafter(self, name: str) -> None:
        if name in self.lives:
            await self.now(name).kill()

    def _born(self, name: str, info: Any) -> PretendedProcess:
        process = PretendedProcess(name, info, starts=name not in self.stillborn, silent=name in self.mute)
        self.lives.setdefault(name, []).append(process)
        return process

    def now(self, name: str) -> PretendedProcess:
        return self.lives[name][-1]


async def eventually(truth: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not truth():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@pytest.fixture
def spawner() -> PretendedSpawner:
    return PretendedSpawner()


@pytest.fixture
async def supervisor(spawner: PretendedSpawner) -> AsyncIterator[Supervisor]:
    drafters = (DrafterConfig(name="ngram", options=NgramOptions(), replicas=2),)
    config = Config(target=TargetConfig(replicas=2), drafters=drafters, supervision=FAST)
    supervisor = Supervisor(config, spawner)
    yield supervisor
    await supervisor.stop()
    assert not any(process.alive for lives in spawner.lives.values() for process in lives)


async def test_everything_starts_and_the_directory_names_all_targets(
    supervisor: Supervisor, spawner: PretendedSpawner
) -> None:
    supervisor.start()
    directory = await supervisor.ready()
    assert (directory.model, set(directory.addresses)) == (MODEL, {"grpc://node:0"})
    await eventually(lambda: set(supervisor.pids()) == {"target-0", "target-1", "ngram", "ngram/1", "router"})


async def test_a_drafter_that_dies_is_started_again_at_once(supervisor: Supervisor, spawner: PretendedSpawner) -> None:
    supervisor.start()
    await eventually(lambda: "ngram" in supervisor.pids())
    spawner.now("ngram").die("killed by signal 9")
    await eventually(lambda: len(spawner.lives["ngram"]) == 2 and "ngram" in supervisor.pids())
    status = await supervisor.status()
    assert [(d.name, d.state, d.num_restarts) for d in status.drafters] == [("ngram", "ready", 1), ("ngram/1", "ready", 0)]
    assert len(spawner.lives["target-0"]) == len(spawner.lives["ngram/1"]) == 1


@pytest.mark.parametrize("hang", ["the process", "its loop"])
async def test_a_drafter_that_hangs_is_killed_and_replaced(
    supervisor: Supervisor, spawner: PretendedSpawner, hang: str
) -> None:
    supervisor.start()
    await eventually(lambda: "ngram" in supervisor.pids())
    hung = spawner.now("ngram")
    if hang == "the process":
        hung.silent = True
    else:
        hung.unread = 60.0
    await eventually(lambda: not hung.alive and len(spawner.lives["ngram"]) == 2 and "ngram" in supervisor.pids())


async def test_a_busy_target_is_given_more_time_than_a_drafter(supervisor: Supervisor, spawner: PretendedSpawner) -> None:
    supervisor.start()
    await eventually(lambda: len(supervisor.pids()) == 5)
    for name in ("target-0", "ngram"):
        spawner.now(name).unread = 0.2  # four times the deadline of a drafter, less than half of a target's
    await eventually(lambda: len(spawner.lives["ngram"]) > 1)
    assert len(spawner.lives["target-0"]) == 1


async def test_a_drafter_that_keeps_failing_is_quarantined(supervisor: Supervisor, spawner: PretendedSpawner) -> None:
    spawner.stillborn.add("ngram")
    supervisor.start()
    await eventually(lambda: len(spawner.lives.get("ngram", [])) == FAST.quarantine_restarts)

    async def state() -> str:
        return (await supervisor.status()).drafters[0].state

    async with asyncio.timeout(10):
        while await state() != ProcessState.QUARANTINED:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    await eventually(lambda: "ngram/1" in supervisor.pids())  # others are not touched
    assert len(spawner.lives["ngram"]) == FAST.quarantine_restarts


async def test_a_target_that_does_not_start_fails_the_launch_with_its_reason(
    supervisor: Supervisor, spawner: PretendedSpawner
) -> None:
    spawner.stillborn.update({"target-0", "target-1"})
    supervisor.start()
    with pytest.raises(ProcessEnded, match=r"target-\d did not start: it would not start"):
        await supervisor.ready()


async def test_a_process_that_is_never_ready_is_given_up_after_the_start_deadline(
    supervisor: Supervisor, spawner: PretendedSpawner
) -> None:
    spawner.mute.update({"target-0", "target-1"})
    supervisor.start()
    with pytest.raises(ProcessEnded, match=r"not ready after 0\.5 s \(supervision\.start_timeout_s\)"):
        await supervisor.ready()


async def test_a_target_that_moved_is_told_to_drafters_and_gateways(
    supervisor: Supervisor, spawner: PretendedSpawner
) -> None:
    supervisor.start()
    await eventually(lambda: len(supervisor.pids()) == 5)
    before = await supervisor.ready()
    waiting = asyncio.create_task(supervisor.directory(before))
    spawner.now("target-1").die("node lost")
    after = await asyncio.wait_for(waiting, 10)
    assert after.addresses == ("grpc://node:0", "grpc://node:1")
    await eventually(lambda: ("set_addresses", (after.addresses,)) in spawner.now("ngram").calls)


async def test_a_supervisor_in_the_place_of_another_is_heard_by_gateways_once_it_knows_all_targets(
    supervisor: Supervisor, spawner: PretendedSpawner
) -> None:
    supervisor.start()
    known = await supervisor.ready()
    config = Config(target=TargetConfig(replicas=2), drafters=(), supervision=FAST)
    spawner.mute.add("target-1")
    successor = Supervisor(config, spawner)
    try:
        successor.start()
        waiting = asyncio.create_task(successor.directory(known))
        await eventually(lambda: "target-0" in successor.pids())
        assert not waiting.done()  # links to target-1 would be closed
        spawner.lives["target-1"][-1].silent = False
        spawner.lives["target-1"][-1].die("found dead")
        spawner.mute.clear()
        found = await asyncio.wait_for(waiting, 10)
        assert found.epoch != known.epoch  # so that equal versions are not taken for equal directories
    finally:
        await successor.stop()


async def test_a_drafter_that_is_ready_is_told_the_addresses_of_now(
    supervisor: Supervisor, spawner: PretendedSpawner
) -> None:
    supervisor.start()
    directory = await supervisor.ready()
    await eventually(lambda: "ngram" in supervisor.pids())
    spawner.now("ngram").die("crashed")
    await eventually(lambda: len(spawner.lives["ngram"]) == 2)
    await eventually(lambda: ("set_addresses", (directory.addresses,)) in spawner.now("ngram").calls)


async def test_a_target_that_hangs_does_not_hold_up_the_status_of_others(spawner: PretendedSpawner) -> None:
    patient = SupervisionConfig(health_period_ms=50_000, health_timeout_ms=60_000)
    supervisor = Supervisor(Config(target=TargetConfig(replicas=2), drafters=(), supervision=patient), spawner)
    supervisor.start()
    try:
        await supervisor.ready()
        hung = spawner.now("target-1")
        hung.silent = True
        # Less than the API waits.
        async with asyncio.timeout(ApiSettings().engine_timeout_s):
            status = await supervisor.status()
        assert [target.state for target in status.targets] == ["ready", "silent"]
        for name in ("target-0", "target-1"):
            spawner.now(name).report = TargetReport(TargetStatus(name, "draining", 0, 0, 10, 10, 0.0, 7.0))
        assert not await supervisor.drain(0.5)  # nobody knows what the silent one still does
    finally:
        spawner.now("target-1").silent = False
        await supervisor.stop()


async def test_targets_that_are_ready_serve_without_one_that_cannot_start(
    supervisor: Supervisor, spawner: PretendedSpawner
) -> None:
    spawner.mute.add("target-1")  # given up after its start deadline, when the other is ready
    supervisor.start()
    async with asyncio.timeout(10):
        directory = await supervisor.ready()
    assert directory.addresses == ("grpc://node:0",)
    assert supervisor.reasons()["target-1"] == "it was not ready after 0.5 s (supervision.start_timeout_s)"


async def test_the_reason_of_a_drafter_that_is_not_ready_is_in_the_status(
    supervisor: Supervisor, spawner: PretendedSpawner
) -> None:
    spawner.stillborn.add("ngram")
    supervisor.start()
    await eventually(lambda: "ngram" in supervisor.reasons() and "ngram/1" in supervisor.pids())
    refused, served = (await supervisor.status()).drafters
    assert (refused.reason, served.reason) == ("it would not start", None)


async def test_a_mistake_of_whoever_starts_processes_ends_nothing_for_good(
    supervisor: Supervisor, spawner: PretendedSpawner, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawn, failures = spawner.router, [KeyError("no such group")]

    async def router() -> Process:
        if failures:
            raise failures.pop()
        return await spawn()

    monkeypatch.setattr(spawner, "router", router)
    supervisor.start()
    await eventually(lambda: "router" in supervisor.pids())


async def test_a_router_that_was_restarted_learns_who_drains(supervisor: Supervisor, spawner: PretendedSpawner) -> None:
    supervisor.start()
    await eventually(lambda: "router" in supervisor.pids())
    await supervisor.set_draining("ngram", True)
    assert ("set_draining", (frozenset({"ngram"}),)) in spawner.now("router").calls
    spawner.now("router").die("crashed")
    await eventually(lambda: len(spawner.lives["router"]) == 2)
    await eventually(lambda: ("set_draining", (frozenset({"ngram"}),)) in spawner.now("router").calls)
    assert [d.state for d in (await supervisor.status()).drafters] == ["draining", "ready"]
    with pytest.raises(InvalidField, match=r"drafter: must be one of ngram, ngram/1, got 'nagram'"):
        await supervisor.set_draining("nagram", True)


async def test_status_sums_over_the_targets(supervisor: Supervisor) -> None:
    supervisor.start()
    await eventually(lambda: len(supervisor.pids()) == 5)
    status = await supervisor.status()
    assert (status.model, status.policy, status.table_version) == ("tiny", "hedge", 6)
    assert [target.num_waiting for target in status.targets] == [2, 2]
    ngram = status.drafters[0]
    assert (ngram.kind, ngram.num_requests, ngram.num_proposed, ngram.num_accepted) == ("ngram", 2, 80, 60)
    assert ngram.reply_ms == pytest.approx(2.0)


async def test_drain_waits_for_what_is_under_way_and_not_for_ever(supervisor: Supervisor, spawner: PretendedSpawner) -> None:
    supervisor.start()
    await eventually(lambda: len(supervisor.pids()) == 5)
    assert not await supervisor.drain(0.3)
    for name in ("target-0", "target-1"):
        assert ("drain", ()) in spawner.now(name).calls
        spawner.now(name).report = TargetReport(TargetStatus(name, "draining", 0, 0, 10, 10, 0.0, 7.0))
    assert await supervisor.drain(10)


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
        router=RouterConfig(slot_ms=10),
        memory=MemoryConfig(min_residence_s=0.02),
    )
    supervisor = Supervisor(config, spawner, HOMES)
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


async def test_targets_and_router_are_asked_for_the_status_at_the_same_time(
    supervisor: Supervisor, spawner: PretendedSpawner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answers when the other has been asked, too."""
    supervisor.start()
    await eventually(lambda: len(supervisor.pids()) == 5)
    both = asyncio.Barrier(2)

    def waiting(process: PretendedProcess, method: str) -> Callable[..., Any]:
        call = process.call

        async def answer(asked: str, *args: Any) -> Any:
            if asked == method:
                await both.wait()
            return await call(asked, *args)

        return answer

    for name, method in (("target-0", "report"), ("router", "notes")):
        process = spawner.now(name)
        monkeypatch.setattr(process, "call", waiting(process, method))
    assert [target.state for target in (await supervisor.status()).targets] == ["ready", "ready"]
