"""The numbers of replicas follow what the targets report, and nothing that fails stops that."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from actors.autoscaler import Autoscaler, Fleet, LoadReports, ScaleLog
from actors.drafter_loader import SILENT
from actors.processes import ManagedProcess, ProcessPool, ProcessState, RestartPolicy
from actors.supervisor import Supervisor
from actors.target import DrafterCounts, TargetReport
from cluster.client import ScaleCounts, TargetStatus
from cluster.config import Config, DrafterConfig, NgramOptions, Resources, ScalingConfig, SloClass, SloConfig, TargetConfig
from cluster.counts import DraftingCounts, SloCounts
from cluster.strict_yaml import ConfigError, parse
from router.assignment import MemberCosts
from router.cost_model import TableCost
from router.scaling.configured import CostTables, fleet_scaler
from router.scaling.policy import FleetScaler
from router.scaling.report import FleetReport, FleetSize, Replicas, ServedCounts
from tests.support.supervision import FAST, PretendedProcess, PretendedSpawner, eventually

ONE_CORE = Resources(cpus=1, gpus=0, threads=1)
NGRAM = DrafterConfig(
    name="ngram", options=NgramOptions(), replicas=0, min_replicas=0, max_replicas=3, capacity=4, resources=ONE_CORE
)
CONFIG = Config(
    target=TargetConfig(replicas=1, max_replicas=3, max_num_sequences=4, resources=ONE_CORE),
    drafters=(NGRAM,),
    slo=SloConfig(classes={"chat": SloClass(ttft_ms=2000, tpot_ms=100)}, default="chat"),
    supervision=FAST,
    scaling=ScalingConfig(policy="outrider", target_start_s=10),
)
IDLE = TargetStatus("target-0", "ready", 0, 0, 1000, 1000, 0.0, 0.0)
COST = CostTables.of(TableCost((1, 64, 640), (0.010, 0.010, 0.100)), {"ngram": MemberCosts(((1, 0.0), (64, 0.0)))})
MACHINE = {"CPU": 8.5}


async def machine() -> Mapping[str, float]:
    return MACHINE


class Cluster:
    """`ScaledProcesses` that do at once what they are asked, unless a test breaks them."""

    def __init__(self, config: Config = CONFIG) -> None:
        self.config = config
        self.targets, self.drafters = 1, {"ngram": 0}
        self.running = self.waiting = 0
        self.served = ServedCounts()
        self.asked: list[FleetSize] = []
        self.broken = False
        self.now_s = 0.0
        pool = ProcessPool()
        process = PretendedProcess("target-0", None, cost_tables=COST)
        pool.targets["target-0"] = _member(process)
        self.scaler = Autoscaler(config, pool, self, machine)

    async def reports(self) -> Sequence[TargetReport]:
        status = replace(IDLE, num_running=self.running, num_waiting=self.waiting)
        rarely_right = DraftingCounts(acceptance=0.05)
        return [TargetReport(status, (DrafterCounts("ngram", 0, 0, 0, None, drafts=rarely_right),), served=self.served)]

    def fleet(self) -> Fleet:
        return Replicas(self.targets), {name: Replicas(num) for name, num in self.drafters.items()}

    def resize(self, size: FleetSize) -> FleetSize:
        self.asked.append(size)
        if self.broken:
            raise RuntimeError("no room")
        self.targets, self.drafters = size.num_targets, dict(size.num_drafters)
        return size

    async def play(self, seconds: int, running: int, waiting: int = 0, per_s: int = 0) -> None:
        self.running, self.waiting = running, waiting
        for _ in range(seconds):
            more = ServedCounts(per_s, 50 * per_s, per_s, 50 * per_s)
            self.served = self.served.plus(more)
            await self.scaler.step(self.now_s)
            self.now_s += 1.0


def _member(process: PretendedProcess) -> ManagedProcess:
    async def spawn() -> PretendedProcess:
        return process

    async def ready(member: ManagedProcess, info: object) -> None:
        """Nobody waits."""

    member = ManagedProcess(process.name, spawn, ready, RestartPolicy(FAST, may_quarantine=False))
    member.state, member.process = ProcessState.READY, process
    return member


# ---- the loop


async def test_a_burst_makes_targets_join_and_its_end_makes_them_leave() -> None:
    cluster = Cluster()
    await cluster.play(120, running=0)
    assert not cluster.asked  # the control: without load nothing happens
    await cluster.play(30, running=4, waiting=400, per_s=40)
    assert cluster.targets == 3  # and not more, whatever waits
    await cluster.play(1200, running=0)
    assert (cluster.targets, cluster.drafters) == (1, {"ngram": 0})


async def test_drafters_use_idle_cores_and_are_shed_before_requests() -> None:
    resources = {"CPU": 3.5}  # of which half a core is left to the control plane

    async def small() -> Mapping[str, float]:
        return resources

    cluster = Cluster()
    cluster.scaler = Autoscaler(CONFIG, cluster.scaler._pool, cluster, small)
    await cluster.play(120, running=1)
    assert (cluster.targets, cluster.drafters) == (1, {"ngram": 1})
    await cluster.play(10, running=12, waiting=40, per_s=20)
    assert (cluster.targets, cluster.drafters) == (3, {"ngram": 0})


async def test_machines_that_join_later_count() -> None:
    cores = {"CPU": 2.5}  # of which half a core is left to the control plane

    async def machines() -> Mapping[str, float]:
        return cores

    cluster = Cluster()
    cluster.scaler = Autoscaler(CONFIG, cluster.scaler._pool, cluster, machines)
    await cluster.play(30, running=12, waiting=400, per_s=40)
    assert cluster.targets == 2
    cores["CPU"] = 3.5
    await cluster.play(90, running=12, waiting=400, per_s=40)
    assert cluster.targets == 3


async def test_machines_that_cannot_be_read_stop_no_decision(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster()
    readings = [{"CPU": 3.5}]

    async def machines() -> Mapping[str, float]:
        return readings.pop()  # fails the second time

    cluster.scaler = Autoscaler(CONFIG, cluster.scaler._pool, cluster, machines)
    await cluster.play(70, running=0)
    assert "could not read the machines" in caplog.text
    await cluster.play(30, running=12, waiting=400, per_s=40)
    assert cluster.targets == 3


async def test_a_new_scaler_ends_nothing_before_it_has_watched_the_load() -> None:
    """As after a restart of the supervisor."""
    cluster = Cluster(CONFIG.model_copy(update={"scaling": CONFIG.scaling.model_copy(update={"hardware": "elastic"})}))
    cluster.targets, cluster.drafters = 3, {"ngram": 2}
    await cluster.play(30, running=0)
    assert (cluster.targets, cluster.drafters) == (3, {"ngram": 2})
    await cluster.play(630, running=0)
    assert (cluster.targets, cluster.drafters) == (1, {"ngram": 0})


def test_a_new_scaler_keeps_targets_beside_good_drafters() -> None:
    scaling = CONFIG.scaling.model_copy(update={"hardware": "elastic"})
    scaler = fleet_scaler(CONFIG.model_copy(update={"scaling": scaling}), COST, 32_000, {})
    fleet: Fleet = (Replicas(3), {"ngram": Replicas(3)})
    size = scaler.decide(FleetReport(0.0, *fleet, num_running=1, acceptance={"ngram": 0.95}))
    assert (size.num_targets, size.num_drafters) == (3, {"ngram": 3})


@pytest.mark.usefixtures("quick")
async def test_a_resize_that_fails_is_tried_again() -> None:
    cluster = Cluster()
    cluster.broken, cluster.running, cluster.waiting = True, 4, 400
    loop = asyncio.create_task(cluster.scaler.run())
    try:
        await eventually(lambda: len(cluster.asked) > 2)
        assert not loop.done()
        cluster.broken = False
        await eventually(lambda: cluster.targets == 3)
    finally:
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)


async def test_it_waits_for_a_target_that_tells_its_costs() -> None:
    cluster = Cluster()
    process = cluster.scaler._pool.targets["target-0"].process
    assert isinstance(process, PretendedProcess)
    process.cost_tables = None
    await cluster.play(10, running=4, waiting=400)
    assert not cluster.asked
    process.cost_tables = COST
    await cluster.play(1, running=4, waiting=400)
    assert cluster.targets == 3


# ---- what it reads


def _report(name: str = "target-0", arrived: int = 0, state: str = "ready", **slo: int) -> TargetReport:
    counts = ServedCounts(arrived, 10 * arrived, arrived, 20 * arrived)
    status = replace(IDLE, name=name, state=state, num_running=arrived, num_waiting=1, slo=(SloCounts("chat", **slo),))
    return TargetReport(status, served=counts)


FLEET: Fleet = (Replicas(1), {"ngram": Replicas()})


def test_counts_are_differences_over_all_targets() -> None:
    loads = LoadReports(CONFIG)
    first = loads.report(1.0, [_report(arrived=1000)], FLEET)
    assert first.num_arrived == 0  # what a target had served before this supervisor
    busier = _report(arrived=1003, num_answers=2, num_met=1, num_refused=4)
    later = loads.report(2.0, [busier, _report("target-1", 5)], FLEET)
    assert (later.num_arrived, later.num_prompt_tokens, later.num_output_tokens) == (3, 30, 60)
    assert (later.num_missed, later.num_running, later.num_waiting) == (5, 1008, 2)
    after = loads.report(3.0, [busier, _report("target-1", 7)], FLEET)
    assert (after.num_arrived, after.num_missed) == (2, 0)


def test_a_target_that_was_restarted_counts_from_zero() -> None:
    loads = LoadReports(CONFIG)
    loads.report(1.0, [_report(arrived=1000, num_refused=9)], FLEET)
    assert loads.report(2.0, [_report(arrived=2)], FLEET).num_arrived == 2


def test_no_count_is_negative_after_a_restart_whose_arrivals_hide_it() -> None:
    """More arrive at the new process within a period than had arrived at the old one."""
    loads = LoadReports(CONFIG)
    loads.report(1.0, [_report(arrived=3, num_answers=9, num_met=4)], FLEET)
    flood = replace(_report(arrived=7, num_answers=2, num_met=1), served=ServedCounts(num_arrived=7, num_prompt_tokens=70))
    report = loads.report(2.0, [flood], FLEET)
    counts = (report.num_arrived, report.num_prompt_tokens, report.num_ended, report.num_output_tokens, report.num_missed)
    assert counts == (7, 70, 0, 0, 1)


def test_a_silent_target_is_as_busy_as_it_was_and_a_lost_one_is_not() -> None:
    loads = LoadReports(CONFIG)
    loads.report(1.0, [_report(arrived=7)], FLEET)
    silent = TargetReport(replace(IDLE, state=SILENT))
    assert loads.report(2.0, [silent], FLEET).num_running == 7
    assert loads.report(3.0, [_report(arrived=9)], FLEET).num_arrived == 2
    down = TargetReport(replace(IDLE, state=ProcessState.DOWN))
    assert loads.report(4.0, [down], FLEET).num_running == 0


def test_the_acceptance_of_all_replicas_of_a_drafter_counts() -> None:
    drafters = tuple(
        DrafterCounts(name, 0, 0, 0, None, drafts=DraftingCounts(acceptance=share))
        for name, share in (("ngram", 0.4), ("ngram/1", 0.6), ("other", 0.9))
    )
    report = LoadReports(CONFIG).report(1.0, [replace(_report(), drafters=drafters)], FLEET)
    assert report.acceptance == {"ngram": pytest.approx(0.5)}


def test_costs_in_tables_are_the_costs() -> None:
    measured = TableCost((1, 16, 512), (0.010, 0.020, 0.200), per_context_s=1e-6)
    tables = CostTables.of(measured, {"ngram": MemberCosts(((1, 0.001), (64, 0.064)), catch_up_s=0.002)})
    for rows in (1, 16, 100, 512, 1024):
        assert tables.step_s(rows, 3000) == pytest.approx(measured.step_s(rows, 3000))
    assert tables.draft_s("ngram", 32, 8) == pytest.approx(0.032)
    assert tables.draft_s("other", 32, 8) is None


@pytest.mark.parametrize(("hardware", "num_drafters"), [("fixed", 1), ("elastic", 0)])
def test_idle_machines_draft_only_where_they_are_paid_anyway(hardware: str, num_drafters: int) -> None:
    scaling = ScalingConfig.model_validate(CONFIG.scaling.model_dump() | {"hardware": hardware})
    scaler = fleet_scaler(CONFIG.model_copy(update={"scaling": scaling}), COST, 32_000, MACHINE)
    size = FleetSize(1)
    for second in range(120):
        report = FleetReport(float(second), Replicas(1), {"ngram": Replicas()}, num_running=1)
        size = scaler.decide(report)
    assert (size.num_targets, size.num_drafters) == (1, {"ngram": num_drafters})


def test_drafters_that_never_end_leave_no_room_for_a_target() -> None:
    drafter = NGRAM.model_copy(update={"replicas": 1, "min_replicas": 1})
    config = CONFIG.model_copy(update={"drafters": (drafter,)})
    scaler = fleet_scaler(config, COST, 32_000, {"CPU": 3.5})  # of which half a core is left to the control plane
    fleet: Fleet = (Replicas(1), {"ngram": Replicas(1)})
    flood = FleetReport(0.0, *fleet, num_running=12, num_waiting=40, num_arrived=20, acceptance={"ngram": 0.05})
    size = scaler.decide(flood)
    assert (size.num_targets, size.num_drafters) == (2, {"ngram": 1})


# ---- events


def test_every_change_is_kept_with_its_reason() -> None:
    log = ScaleLog(lambda: 7.0)
    log.note((Replicas(1), {"ngram": Replicas(0)}), (Replicas(1, 1), {"ngram": Replicas(0)}), "need 1.4")
    log.note((Replicas(2), {"ngram": Replicas(0)}), (Replicas(1), {"ngram": Replicas(0, 2)}), "need 0.2")
    seen = [(one.at_s, one.name, one.num_before, one.num_after, one.reason) for one in log.events]
    assert seen == [(7.0, "target", 1, 2, "need 1.4"), (7.0, "target", 2, 1, "need 0.2"), (7.0, "ngram", 0, 2, "need 0.2")]
    assert log.counts == (ScaleCounts("target", 1, 1), ScaleCounts("ngram", 1, 0))


# ---- under the supervisor


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FleetScaler, "period_s", 0.001)


@pytest.mark.usefixtures("quick")
async def test_the_supervisor_runs_it_and_tells_what_it_did() -> None:
    spawner = PretendedSpawner(cost_tables=COST, num_waiting=400)
    supervisor = Supervisor(CONFIG, spawner, None, machine)
    try:
        await supervisor.ready()
        await eventually(lambda: {"target-0", "target-1", "target-2"} <= supervisor.pids().keys())
        status = await supervisor.status()
        first = status.scale_events[0]
        assert (first.name, first.num_before, first.num_after) == ("target", 1, 3)
        assert first.reason.startswith("need ")
        assert status.scale_counts[0] == ScaleCounts("target", 1, 0)
    finally:
        await supervisor.stop()


@pytest.mark.usefixtures("quick")
async def test_a_restarted_supervisor_scales_on_from_what_runs() -> None:
    spawner = PretendedSpawner(found=["target-0", "target-1", "router"], cost_tables=COST, num_waiting=400)
    supervisor = Supervisor(CONFIG, spawner, None, machine)
    try:
        await supervisor.ready()
        await eventually(lambda: {"target-0", "target-1", "target-2"} <= supervisor.pids().keys())
        first = (await supervisor.status()).scale_events[0]
        assert (first.name, first.num_before, first.num_after) == ("target", 2, 3)
    finally:
        await supervisor.stop()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("scaling: {policy: outrider}\ntarget: {max_replicas: 2}", "needs slo.default with ttft_ms and tpot_ms"),
        (
            "scaling: {policy: outrider}\ntarget: {max_replicas: 2}\nslo: {classes: {a: {ttft_ms: 500}}, default: a}",
            "needs slo.default with ttft_ms and tpot_ms",
        ),
        ("scaling: {policy: outrider}\nslo: {classes: {a: {ttft_ms: 500, tpot_ms: 50}}, default: a}", "needs max_replicas"),
    ],
)
def test_a_file_that_cannot_scale_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(text, Config, "test.yaml")
