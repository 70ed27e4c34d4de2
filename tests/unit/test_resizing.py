"""Replicas that join and leave under a supervisor over pretended processes."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
from ray.exceptions import RayTaskError

from actors import ray_groups, resizer
from actors.drafter_loader import SILENT
from actors.ray_pool import Deployment, PoolSupervisor
from actors.supervisor import CHAINS, Supervisor
from actors.target import DrafterCounts, TargetReport
from cluster.client import TargetStatus
from cluster.config import Config, DrafterConfig, NgramOptions, ScalingConfig, TargetConfig
from cluster.errors import InvalidField
from cluster.strict_yaml import ConfigError, parse
from deploy.local_ray import LaunchError
from deploy.scale import parse_drafters, scale
from router.scaling.report import FleetSize
from tests.support.supervision import FAST, PretendedSpawner, eventually

NGRAM = DrafterConfig(name="ngram", options=NgramOptions(), replicas=0, min_replicas=0, max_replicas=3)
CONFIG = Config(target=TargetConfig(replicas=1, max_replicas=3), drafters=(NGRAM,), supervision=FAST)
PATIENT = CONFIG.model_copy(update={"supervision": FAST.model_copy(update={"start_timeout_s": 600.0})})
IDLE = TargetStatus("", "ready", 0, 0, 10, 10, 0.0, 0.0)


@pytest.fixture
def spawner() -> PretendedSpawner:
    return PretendedSpawner()


@pytest.fixture
async def supervisor(spawner: PretendedSpawner) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(CONFIG, spawner)
    supervisor.start()
    await eventually(lambda: set(supervisor.pids()) == {"target-0", "router", CHAINS})
    yield supervisor
    await supervisor.stop()
    assert not any(process.alive for lives in spawner.lives.values() for process in lives)


def _report(spawner: PretendedSpawner, name: str, num_running: int, num_drafted: int = 0) -> None:
    counts = (DrafterCounts("ngram/1", num_drafted, 0, 0, None),)
    spawner.now(name).report = TargetReport(replace(IDLE, name=name, num_running=num_running), counts)


async def test_replicas_join_within_their_bounds(supervisor: Supervisor, spawner: PretendedSpawner) -> None:
    wanted = supervisor.resize(FleetSize(9, {"ngram": 9}))
    assert (wanted.num_targets, wanted.num_drafters) == (3, {"ngram": 3})
    everyone = {"target-0", "target-1", "target-2", "ngram", "ngram/1", "ngram/2", "router", CHAINS}
    await eventually(lambda: set(supervisor.pids()) == everyone)
    names = ("target-0", "target-1", "target-2")
    await eventually(lambda: ("set_targets", (names,)) in spawner.now("router").calls)
    assert not spawner.given_back


@pytest.mark.parametrize("scales", [True, False])
async def test_a_target_on_a_machine_that_drains_gets_requests_last(spawner: PretendedSpawner, scales: bool) -> None:
    """Where replicas scale, it is removed, and another one may join elsewhere."""
    target = TargetConfig(replicas=2, max_replicas=3) if scales else TargetConfig(replicas=2)
    supervisor = Supervisor(CONFIG.model_copy(update={"target": target}), spawner)
    try:
        supervisor.start()
        await eventually(lambda: {"target-0", "target-1", "router"} <= set(supervisor.pids()))
        known = await supervisor.ready()
        _report(spawner, "target-1", num_running=1)
        await supervisor.leave_machines(frozenset({"target-1"}))
        leaving = await supervisor.directory(known)
        assert (leaving.leaving, leaving.addresses) == (("target-1",), known.addresses)
        assert [one.state for one in (await supervisor.status()).targets] == ["ready", "draining"]
        if scales:
            await eventually(lambda: ("drain", (True,)) in spawner.now("target-1").calls)
            _report(spawner, "target-1", num_running=0)
            await eventually(lambda: spawner.given_back == ["target-1"])
        await supervisor.leave_machines(frozenset())
        assert not (await supervisor.directory(leaving)).leaving
        assert ("target-1" in supervisor.pids()) is not scales
    finally:
        await supervisor.stop()


async def test_a_target_that_leaves_ends_when_its_requests_have(supervisor: Supervisor, spawner: PretendedSpawner) -> None:
    supervisor.resize(FleetSize(2))
    await eventually(lambda: "target-1" in supervisor.pids())
    known = await supervisor.ready()
    _report(spawner, "target-1", num_running=1)
    supervisor.resize(FleetSize(1))
    leaving = await supervisor.directory(known)
    assert (leaving.leaving, leaving.addresses) == (("target-1",), known.addresses)
    await eventually(lambda: ("drain", (True,)) in spawner.now("target-1").calls)
    assert spawner.now("target-1").alive
    _report(spawner, "target-1", num_running=0)
    await eventually(lambda: spawner.given_back == ["target-1"])
    await eventually(lambda: set(supervisor.pids()) == {"target-0", "router", CHAINS})
    assert [target.name for target in (await supervisor.status()).targets] == ["target-0"]
    assert len(spawner.lives["target-1"]) == 1


async def test_a_target_whose_requests_last_ends_at_its_deadline(spawner: PretendedSpawner) -> None:
    supervisor = Supervisor(CONFIG, spawner, drain_s=0.1)
    try:
        await supervisor.ready()
        supervisor.resize(FleetSize(2))
        await eventually(lambda: "target-1" in supervisor.pids())
        supervisor.resize(FleetSize(1))
        await eventually(lambda: spawner.given_back == ["target-1"])
        assert not spawner.now("target-1").alive
    finally:
        await supervisor.stop()


async def test_a_drafter_that_leaves_is_left_by_its_requests_first(
    supervisor: Supervisor, spawner: PretendedSpawner
) -> None:
    supervisor.resize(FleetSize(1, {"ngram": 2}))
    await eventually(lambda: {"ngram", "ngram/1"} <= supervisor.pids().keys())
    _report(spawner, "target-0", num_running=1, num_drafted=1)
    supervisor.resize(FleetSize(1, {"ngram": 1}))
    await eventually(lambda: ("set_draining", (frozenset({"ngram/1"}),)) in spawner.now("router").calls)
    assert spawner.now("ngram/1").alive
    _report(spawner, "target-0", num_running=1, num_drafted=0)
    await eventually(lambda: spawner.given_back == ["drafter-ngram/1"])
    supervisor.resize(FleetSize(1, {"ngram": 0}))  # to zero
    await eventually(lambda: set(supervisor.pids()) == {"target-0", "router", CHAINS})
    assert not (await supervisor.status()).drafters


async def test_a_target_that_dies_while_it_leaves_is_not_started_again(
    supervisor: Supervisor, spawner: PretendedSpawner
) -> None:
    supervisor.resize(FleetSize(2))
    await eventually(lambda: "target-1" in supervisor.pids())
    supervisor.resize(FleetSize(1))
    await eventually(lambda: ("drain", (True,)) in spawner.now("target-1").calls)
    spawner.now("target-1").die("killed")
    await eventually(lambda: spawner.given_back == ["target-1"])
    assert len(spawner.lives["target-1"]) == 1


async def test_a_removal_that_fails_is_tried_again(
    supervisor: Supervisor, spawner: PretendedSpawner, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor.resize(FleetSize(2))
    await eventually(lambda: "target-1" in supervisor.pids())
    end, num_failures = spawner.end, 2

    async def fails_at_first(group: str, give_back: bool = False) -> None:
        nonlocal num_failures
        if num_failures:
            num_failures -= 1
            raise ConnectionError("Ray does not answer")
        await end(group, give_back)

    monkeypatch.setattr(spawner, "end", fails_at_first)
    monkeypatch.setattr(resizer, "RETRY_S", 0.01)
    _report(spawner, "target-1", num_running=0)
    supervisor.resize(FleetSize(1))
    await eventually(lambda: spawner.given_back == ["target-1"])
    await eventually(lambda: not supervisor._resizer.leaving)
    supervisor.resize(FleetSize(2))
    await eventually(lambda: "target-1" in supervisor.pids())


async def test_a_supervisor_in_the_place_of_another_goes_on_with_what_runs(spawner: PretendedSpawner) -> None:
    spawner.found = ["target-0", "target-0/1", "target-2", "drafter-ngram/1", "router"]
    supervisor = Supervisor(CONFIG, spawner)
    try:
        await supervisor.ready()
        await eventually(lambda: set(supervisor.pids()) == {"target-0", "target-2", "ngram/1", "router", CHAINS})
    finally:
        await supervisor.stop()


async def test_a_restarted_supervisor_takes_over_what_runs_before_it_resizes(spawner: PretendedSpawner) -> None:
    spawner.found = ["target-0", "target-1", "drafter-ngram", "router"]
    supervisor = Supervisor(CONFIG, spawner)
    try:
        supervisor.resize(FleetSize(3))
        await eventually(lambda: set(supervisor.pids()) == {"target-0", "target-1", "target-2", "ngram", "router", CHAINS})
    finally:
        await supervisor.stop()


async def test_a_target_that_was_joining_joins_under_a_restarted_supervisor(spawner: PretendedSpawner) -> None:
    spawner.found, spawner.reserved, spawner.mute = ["target-0", "supervisor"], ["target-0", "target-1"], {"target-1"}
    supervisor = Supervisor(PATIENT, spawner)
    try:
        async with asyncio.timeout(10):
            assert (await supervisor.ready()).addresses == ("grpc://node:0",), "nobody waits for it"
        assert spawner.now("target-1").alive
    finally:
        await supervisor.stop()


async def test_a_target_goes_on_leaving_under_a_restarted_supervisor(spawner: PretendedSpawner) -> None:
    spawner.found = ["target-0", "target-1", "router"]
    spawner.draining = {"target-1"}
    supervisor = Supervisor(CONFIG, spawner)
    try:
        await supervisor.ready()
        assert supervisor._resizer.leaving == {"target-1"}
        _report(spawner, "target-1", num_running=0)
        await eventually(lambda: spawner.given_back == ["target-1"])
        assert set(supervisor.pids()) == {"target-0", "router", CHAINS}
    finally:
        await supervisor.stop()


async def test_a_target_that_leaves_before_it_is_ready_does_not_block_the_start(spawner: PretendedSpawner) -> None:
    spawner.mute = {"target-1"}
    config = CONFIG.model_copy(
        update={
            "target": TargetConfig(replicas=2, min_replicas=1, max_replicas=3),
            "supervision": FAST.model_copy(update={"start_timeout_s": 600.0}),
        }
    )
    supervisor = Supervisor(config, spawner)
    try:
        supervisor.start()
        await eventually(lambda: {"target-0", "router", CHAINS} <= supervisor.pids().keys())
        supervisor.resize(FleetSize(1))
        async with asyncio.timeout(10):
            assert (await supervisor.ready()).addresses == ("grpc://node:0",)
        assert spawner.given_back == ["target-1"]
    finally:
        await supervisor.stop()


async def test_a_silent_target_is_not_idle(supervisor: Supervisor, spawner: PretendedSpawner) -> None:
    silent, idle = (TargetReport(replace(IDLE, name="target-1", state=state)) for state in (SILENT, "ready"))
    supervisor.resize(FleetSize(2))
    await eventually(lambda: "target-1" in supervisor.pids())
    spawner.now("target-1").report = silent
    supervisor.resize(FleetSize(1))
    await eventually(lambda: [name for name, _ in spawner.now("target-1").calls].count("drain") > 2)
    assert not spawner.given_back
    spawner.now("target-1").report = idle
    await eventually(lambda: spawner.given_back == ["target-1"])


async def test_the_last_ready_target_serves_until_another_is_ready(spawner: PretendedSpawner) -> None:
    supervisor = Supervisor(CONFIG, spawner)
    try:
        await supervisor.ready()
        supervisor.resize(FleetSize(2))
        await eventually(lambda: "target-1" in supervisor.pids())
        _report(spawner, "target-1", num_running=0)
        spawner.mute = {"target-0"}
        spawner.now("target-0").die("killed")
        await eventually(lambda: len(spawner.lives["target-0"]) == 2)
        known = await supervisor.ready()
        supervisor.resize(FleetSize(1))
        assert (await supervisor.directory(known)).leaving == ("target-1",)
        for _ in range(100):
            await asyncio.sleep(0)
        assert ("drain", (True,)) not in spawner.now("target-1").calls
        spawner.mute = set()
        await eventually(lambda: spawner.given_back == ["target-1"])
        assert ("drain", (True,)) in spawner.now("target-1").calls
    finally:
        await supervisor.stop()


async def test_a_draining_target_that_a_new_supervisor_finds_alone_accepts_requests_again(spawner: PretendedSpawner) -> None:
    spawner.found, spawner.draining, spawner.stillborn = ["target-1"], {"target-1"}, {"target-0"}
    successor = Supervisor(CONFIG, spawner)
    try:
        successor.start()
        await eventually(lambda: "target-1" in successor.pids())
        await eventually(lambda: ("drain", (False,)) in spawner.now("target-1").calls)
        assert ("drain", (True,)) not in spawner.now("target-1").calls
    finally:
        await successor.stop()


async def test_a_target_that_serves_alone_outlives_the_deadline_of_its_leave(
    spawner: PretendedSpawner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one whose requests last, and which the other, lost meanwhile, leaves alone: it accepts requests again."""
    monkeypatch.setattr(resizer, "POLL_S", 0.002)
    supervisor = Supervisor(CONFIG, spawner, drain_s=0.5)
    try:
        await supervisor.ready()
        supervisor.resize(FleetSize(2))
        await eventually(lambda: "target-1" in supervisor.pids())
        leaving = spawner.now("target-1")
        _report(spawner, "target-1", num_running=1)
        supervisor.resize(FleetSize(1))
        await eventually(lambda: ("drain", (True,)) in leaving.calls)
        spawner.stillborn = {"target-0"}
        spawner.now("target-0").die("its node is lost")
        await eventually(lambda: ("drain", (False,)) in leaving.calls)
        num_drained = leaving.calls.count(("drain", (True,)))
        await asyncio.sleep(1.5)  # three deadlines
        assert leaving.alive
        assert leaving.calls.count(("drain", (True,))) == num_drained
        spawner.stillborn = set()
        await eventually(lambda: spawner.given_back == ["target-1"])
    finally:
        await supervisor.stop()


@pytest.mark.parametrize("is_known", [False, True])
async def test_a_group_without_a_place_is_given_back(is_known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replica may leave while Ray still looks for room."""
    made: object = object()
    removed: list[object] = []
    groups = ray_groups.Groups({"target-1": made} if is_known else {}, detached=True)  # type: ignore[dict-item]

    def find(name: str) -> object:
        if name != "target-1":
            raise ValueError(name)
        return made

    monkeypatch.setattr(ray_groups, "get_placement_group", find)
    monkeypatch.setattr(ray_groups, "remove_placement_group", removed.append)
    groups.give_back("target-1")
    groups.give_back("target-2")
    assert removed == [made]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("target: {replicas: 2, max_replicas: 1}", "replicas must lie between"),
        ("target: {min_replicas: 2}", "replicas must lie between"),
        ("drafters: [{name: a, replicas: 0, options: {kind: ngram}}]", "max_replicas must be set"),
        ("drafters: [{name: a, load: lazy, max_replicas: 2, options: {kind: ngram}}]", "must be equal"),
    ],
)
def test_bounds_that_cannot_hold_are_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(text, Config, "test.yaml")


def test_the_command_names_drafters_by_number_and_needs_an_address() -> None:
    assert parse_drafters(["ngram=2", "suffix=0"]) == {"ngram": 2, "suffix": 0}
    with pytest.raises(InvalidField, match="must be NAME=NUMBER"):
        parse_drafters(["ngram"])
    with pytest.raises(LaunchError, match=r"cluster\.ray_address must name"):
        scale(CONFIG, 2, {})


@pytest.mark.parametrize(
    ("running", "said"),
    [
        ({"scaling": ScalingConfig(policy="outrider")}, "scaling.policy: decides the numbers of the running deployment"),
        ({"drafters": ()}, "drafter: must be one that has max_replicas in the running deployment: there is none"),
    ],
)
def test_the_running_deployment_decides_whether_the_command_may(
    running: dict[str, object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of the command allows it in each case."""
    joined = CONFIG.model_copy(update={"cluster": CONFIG.cluster.model_copy(update={"ray_address": "10.0.0.1:6379"})})
    supervisor = PoolSupervisor(Deployment(CONFIG.model_copy(update=running), {}, "/folder", "token"))

    class Handle:
        """Of an actor whose errors Ray wraps."""

        @property
        def scale(self) -> "Handle":
            return self

        def remote(self, size: FleetSize) -> FleetSize:
            try:
                return supervisor.scale(size)
            except InvalidField as error:
                raise RayTaskError("scale", "", error).as_instanceof_cause() from None

    fake = SimpleNamespace(
        init=lambda **_: None, shutdown=lambda: None, get_actor=lambda _: Handle(), get=lambda answer, timeout: answer
    )
    monkeypatch.setattr("deploy.scale.ray", fake)
    with pytest.raises(InvalidField) as raised:
        scale(joined, 2, {"ngram": 1})
    assert str(raised.value).startswith(said)
    assert not isinstance(raised.value, RayTaskError)
