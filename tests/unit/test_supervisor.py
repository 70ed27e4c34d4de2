"""The supervisor over pretended processes: what it starts, when it replaces, whom it tells."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from actors import supervisor as supervisor_module
from actors.processes import Process, ProcessEnded, ProcessState
from actors.supervisor import CHAINS, Supervisor
from actors.target import DrafterCounts, TargetReport
from cluster.client import ChainStatus, TargetStatus
from cluster.config import Config, DrafterConfig, NgramOptions, SupervisionConfig, TargetConfig
from cluster.types import Adapter
from deploy.api.settings import ApiSettings
from router.scaling.report import FleetSize
from tests.support.supervision import FAST, MODEL, PretendedProcess, PretendedSpawner, eventually


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
    await eventually(lambda: set(supervisor.pids()) == {"target-0", "target-1", "ngram", "ngram/1", "router", CHAINS})


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
    await eventually(lambda: len(supervisor.pids()) == 6)
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
    await eventually(lambda: len(supervisor.pids()) == 6)
    before = await supervisor.ready()
    waiting = asyncio.create_task(supervisor.directory(before))
    spawner.now("target-1").die("node lost")
    after = await asyncio.wait_for(waiting, 10)
    assert after.addresses == ("grpc://node:0", "grpc://node:1")
    await eventually(lambda: ("set_addresses", (after.addresses,)) in spawner.now("ngram").calls)


async def test_gateways_hear_of_a_target_before_drafters_that_do_not_answer(
    spawner: PretendedSpawner, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = FAST.model_copy(update={"health_timeout_ms": 60_000, "start_timeout_s": 60.0})
    spawn, has_room = spawner.target, asyncio.Event()
    has_room.set()

    async def spawn_later(name: str) -> Process:
        await has_room.wait()
        return await spawn(name)

    monkeypatch.setattr(spawner, "target", spawn_later)
    supervisor = Supervisor(Config(target=TargetConfig(replicas=2), supervision=patient), spawner)
    try:
        supervisor.start()
        await eventually(lambda: {"target-0", "target-1", "router", "ngram"} <= set(supervisor.pids()))
        waiting = asyncio.create_task(supervisor.directory(await supervisor.ready()))
        spawner.now("ngram").silent = True
        has_room.clear()
        spawner.now("target-1").die("node lost")
        await eventually(lambda: supervisor.reasons() == {"target-1": "node lost"})
        for _ in range(100):
            await asyncio.sleep(0)
        has_room.set()
        assert len((await asyncio.wait_for(waiting, 5)).addresses) == 2
    finally:
        spawner.now("ngram").silent = False
        await supervisor.stop()


async def test_a_drafter_that_scales_is_removed_from_a_machine_that_drains_and_may_join_again(
    spawner: PretendedSpawner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.resizer.DRAFTER_DRAIN_S", 0.1)
    drafter = DrafterConfig(name="ngram", options=NgramOptions(), replicas=1, min_replicas=0, max_replicas=1)
    supervisor = Supervisor(Config(drafters=(drafter,), supervision=FAST), spawner)
    try:
        supervisor.start()
        await eventually(lambda: {"router", "ngram"} <= set(supervisor.pids()))
        await supervisor.leave_machines(frozenset({"ngram"}))
        assert ("set_draining", (frozenset({"ngram"}),)) in spawner.now("router").calls
        await eventually(lambda: spawner.given_back == ["drafter-ngram"])
        await supervisor.leave_machines(frozenset())
        supervisor.resize(FleetSize(1, {"ngram": 1}))
        await eventually(lambda: len(spawner.lives["ngram"]) == 2 and "ngram" in supervisor.pids())
        await supervisor.pool_changed()
        assert ("set_draining", (frozenset(),)) in spawner.now("router").calls[-2:]
    finally:
        await supervisor.stop()


async def test_a_supervisor_in_the_place_of_another_is_heard_by_gateways_once_it_knows_all_targets(
    supervisor: Supervisor, spawner: PretendedSpawner
) -> None:
    supervisor.start()
    adapter = Adapter("sql", "/sql", "key")
    known = (await supervisor.ready()).changed(model=replace(MODEL, adapters=(adapter,)))  # loaded while it served
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
        assert found.model == known.model
        waiting = asyncio.create_task(successor.directory(found))
        changed = await successor.swap_adapter(adapter, None)
        assert changed == await asyncio.wait_for(waiting, 10)
        assert changed.model == MODEL
        assert await successor.swap_adapter(adapter, None) is None
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
    patient = SupervisionConfig(health_timeout_ms=60_000)
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


async def test_one_ready_target_is_enough_where_not_every_one_is_waited_for(spawner: PretendedSpawner) -> None:
    """Also if another one fails before it."""
    spawn, has_room = spawner.target, asyncio.Event()
    spawner.stillborn = {"target-0"}

    async def spawn_later(name: str) -> Process:
        if name == "target-1":
            await has_room.wait()
        return await spawn(name)

    spawner.target = spawn_later  # type: ignore[method-assign]
    supervisor = Supervisor(Config(target=TargetConfig(replicas=2), drafters=(), supervision=FAST), spawner)
    try:
        waiting = asyncio.create_task(supervisor.ready(every=False))
        await eventually(lambda: "target-0" in supervisor.reasons())
        assert not waiting.done()
        with pytest.raises(ProcessEnded, match="target-0 did not start"):
            await supervisor.ready()
        has_room.set()
        assert (await asyncio.wait_for(waiting, 10)).addresses == ("grpc://node:0",)
        await supervisor.ready()
    finally:
        await supervisor.stop()


async def test_a_target_that_ends_while_its_report_is_read_counts_once(spawner: PretendedSpawner) -> None:
    supervisor = Supervisor(Config(target=TargetConfig(replicas=2), supervision=FAST), spawner)
    try:
        await supervisor.ready()
        await eventually(lambda: {"ngram", "router"} <= set(supervisor.pids()))
        reports = supervisor.reports

        async def ends_meanwhile() -> list[TargetReport]:
            found = await reports()
            spawner.stillborn = {"target-1"}
            spawner.now("target-1").die("killed")
            await eventually(lambda: "target-1" in supervisor.reasons())
            return found

        supervisor.reports = ends_meanwhile  # type: ignore[method-assign]
        status = await supervisor.status()
        assert next(one.num_proposed for one in status.drafters if one.name == "ngram") == 40 + 40
    finally:
        await supervisor.stop()


async def test_no_count_of_a_drafter_falls_when_a_target_is_silent_or_lost_or_leaves(spawner: PretendedSpawner) -> None:
    """A rate over a count that falls shows all that is left of it as new."""
    patient = FAST.model_copy(update={"health_timeout_ms": 500})
    target = TargetConfig(replicas=2, min_replicas=1, max_replicas=2)
    supervisor = Supervisor(Config(target=target, supervision=patient), spawner)

    async def num_proposed() -> int:
        return next(one.num_proposed for one in (await supervisor.status()).drafters if one.name == "ngram")

    try:
        await supervisor.ready()
        await eventually(lambda: {"ngram", "router"} <= set(supervisor.pids()))
        assert await num_proposed() == 40 + 40
        spawner.now("target-1").silent = True
        assert await num_proposed() == 80
        assert [target.num_waiting for target in (await supervisor.status()).targets] == [2, 2]
        spawner.now("target-1").silent = False
        spawner.now("target-1").die("killed")
        await eventually(lambda: len(spawner.lives["target-1"]) == 2 and "target-1" in supervisor.pids())
        assert await num_proposed() == 80 + 40
        idle = TargetStatus("target-1", "ready", 0, 0, 10, 10, 0.0, 0.0)
        spawner.now("target-1").report = TargetReport(idle, (DrafterCounts("ngram", 0, 50, 30, None),))
        assert await num_proposed() == 80 + 50
        supervisor.resize(FleetSize(1))
        await eventually(lambda: spawner.given_back == ["target-1"])
        assert await num_proposed() == 80 + 50
    finally:
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
    spawn, failures = spawner.control, [KeyError("no such group")]

    async def control(name: str) -> Process:
        if failures and name == "router":
            raise failures.pop()
        return await spawn(name)

    monkeypatch.setattr(spawner, "control", control)
    supervisor.start()
    await eventually(lambda: "router" in supervisor.pids())


async def test_a_router_that_was_restarted_learns_who_drains(supervisor: Supervisor, spawner: PretendedSpawner) -> None:
    supervisor.start()
    await eventually(lambda: "router" in supervisor.pids())
    await supervisor.leave_machines(frozenset({"ngram"}))
    assert ("set_draining", (frozenset({"ngram"}),)) in spawner.now("router").calls
    spawner.now("router").die("crashed")
    await eventually(lambda: len(spawner.lives["router"]) == 2)
    await eventually(lambda: ("set_draining", (frozenset({"ngram"}),)) in spawner.now("router").calls)
    assert [d.state for d in (await supervisor.status()).drafters] == ["draining", "ready"]


async def test_status_sums_over_the_targets(supervisor: Supervisor, spawner: PretendedSpawner) -> None:
    supervisor.start()
    await eventually(lambda: len(supervisor.pids()) == 6)
    spawner.now(CHAINS).report = (ChainStatus(("ngram",), 12.0),)
    status = await supervisor.status()
    assert (status.model, status.policy, status.table_version) == ("tiny", "epsilon-greedy", 6)
    assert [target.num_waiting for target in status.targets] == [2, 2]
    assert status.chains == (ChainStatus(("ngram",), 12.0),)
    ngram = status.drafters[0]
    assert (ngram.kind, ngram.num_requests, ngram.num_proposed, ngram.num_accepted) == ("ngram", 2, 80, 60)
    assert ngram.reply_ms == pytest.approx(2.0)


async def test_drain_waits_for_what_is_under_way_and_not_for_ever(
    supervisor: Supervisor, spawner: PretendedSpawner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "ABORTED_S", 0.1)
    monkeypatch.setattr(supervisor_module, "SENT_S", 0.0)
    known = await supervisor.ready()
    await eventually(lambda: len(supervisor.pids()) == 6)
    supervisor._pool.targets["target-1"].state = ProcessState.STARTING  # as a new supervisor finds it, which it may serve in
    assert not await supervisor.drain(0.3)
    assert (await supervisor.directory(known)).ends  # so that gateways end what is left
    for name in ("target-0", "target-1"):
        assert ("drain", ()) in spawner.now(name).calls
        spawner.now(name).report = TargetReport(TargetStatus(name, "draining", 0, 0, 10, 10, 0.0, 7.0))
    assert await supervisor.drain(10)


async def test_targets_and_router_are_asked_for_the_status_at_the_same_time(
    supervisor: Supervisor, spawner: PretendedSpawner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answers when the other has been asked, too."""
    supervisor.start()
    await eventually(lambda: len(supervisor.pids()) == 6)
    both = asyncio.Barrier(2)

    def waiting(process: PretendedProcess, method: str) -> Callable[..., Any]:
        call = process.call

        async def answer(asked: str, *args: Any) -> Any:
            if asked == method:
                await both.wait()
            return await call(asked, *args)

        return answer

    for name, method in (("target-0", "report"), ("router", "report")):
        process = spawner.now(name)
        monkeypatch.setattr(process, "call", waiting(process, method))
    assert [target.state for target in (await supervisor.status()).targets] == ["ready", "ready"]
