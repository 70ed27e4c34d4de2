"""The loop that lets the numbers of replicas follow the load, and the record of every change of them.

It reads what the targets report, asks the pure decision of `router/scaling`, and hands the result to the resizer. What it
knows of the load is lost with its supervisor; the replicas are not, and none ends before the load was watched for a while.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Protocol

from actors import health
from actors.drafter_loader import SILENT
from actors.processes import ProcessPool, ProcessState
from actors.target import TargetReport
from cluster.client import ScaleCounts, ScaleEvent
from cluster.config import Config
from cluster.counts import merged
from router.assignment import drafter_of
from router.scaling.configured import CostTables, fleet_limits, fleet_scaler
from router.scaling.policy import FleetScaler
from router.scaling.report import NOTHING_SERVED, FleetReport, FleetSize, Replicas

logger = logging.getLogger(__name__)

TARGET = "target"  # name of the targets in events
MAX_EVENTS = 20
MACHINES_S = 60.0  # between readings of the machines
READ_S = 5.0  # for one

Fleet = tuple[Replicas, Mapping[str, Replicas]]
Machines = Callable[[], Awaitable[Mapping[str, float]]]  # their resources in all, by Ray's names


async def no_machines() -> Mapping[str, float]:
    return {}


class ScaledProcesses(Protocol):
    """The supervisor."""

    async def reports(self) -> Sequence[TargetReport]: ...

    def fleet(self) -> Fleet:
        """Targets, and by configured name the drafters that scale."""

    def resize(self, size: FleetSize) -> FleetSize: ...


class ScaleLog:
    """Changes of the wanted numbers of replicas, whoever asked."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._events: deque[ScaleEvent] = deque(maxlen=MAX_EVENTS)
        self._counts: dict[str, ScaleCounts] = {}

    @property
    def events(self) -> tuple[ScaleEvent, ...]:
        return tuple(self._events)

    @property
    def counts(self) -> tuple[ScaleCounts, ...]:
        return tuple(self._counts.values())

    def note(self, before: Fleet, after: Fleet, reason: str) -> None:
        """``reason``: for people."""
        earlier, now = ({TARGET: fleet[0], **fleet[1]} for fleet in (before, after))
        for name, replicas in now.items():
            num_before, num_after = earlier[name].num_wanted, replicas.num_wanted
            if num_before == num_after:
                continue
            logger.info("the autoscaler sets %s from %d to %d replicas: %s", name, num_before, num_after, reason)
            self._events.append(ScaleEvent(self._clock(), name, num_before, num_after, reason))
            counts = self._counts.get(name, ScaleCounts(name))
            up = num_after > num_before
            self._counts[name] = replace(counts, num_up=counts.num_up + up, num_down=counts.num_down + (not up))


class LoadReports:
    """Differences of the targets' counts. The last report of a silent target counts until it speaks or is gone."""

    def __init__(self, config: Config) -> None:
        self._max_num_sequences = config.target.max_num_sequences
        self._last: dict[str, TargetReport] = {}

    def report(self, now_s: float, reports: Sequence[TargetReport], fleet: Fleet) -> FleetReport:
        known, self._last = self._last, {}
        served, num_missed = NOTHING_SERVED, 0
        for one in reports:
            name = one.status.name
            if one.status.state not in (ProcessState.READY, ProcessState.DRAINING):
                if one.status.state == SILENT and name in known:
                    self._last[name] = known[name]
                continue
            self._last[name] = one
            before = known.get(name, one)  # of one that is new here only what comes from now on
            if _any_falls(before, one):  # another process of that name, whose counts began at 0
                before = TargetReport(replace(one.status, slo=()))
            served = served.plus(one.served.minus(before.served))
            num_missed += _num_missed(one) - _num_missed(before)
        latest = list(self._last.values())
        num_running = sum(one.status.num_running for one in latest)
        num_places = max(1, fleet[0].num_ready) * self._max_num_sequences
        drafters = [counts for one in latest for counts in one.drafters]
        acceptance = {}
        for name in fleet[1]:
            counts = merged([one.drafts for one in drafters if drafter_of(one.name) == name])
            if counts.acceptance is not None:
                acceptance[name] = counts.acceptance
        return FleetReport(
            now_s,
            *fleet,
            num_waiting=sum(one.status.num_waiting for one in latest),
            num_running=num_running,
            busy=min(1.0, num_running / num_places),
            num_arrived=served.num_arrived,
            num_prompt_tokens=served.num_prompt_tokens,
            num_missed=num_missed,
            num_ended=served.num_ended,
            num_output_tokens=served.num_output_tokens,
            acceptance=acceptance,
        )


class Autoscaler:
    """Used from the supervisor's event loop."""

    def __init__(
        self,
        config: Config,
        pool: ProcessPool,
        processes: ScaledProcesses,
        machines: Machines,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._pool, self._processes, self._machines = config, pool, processes, machines
        self._clock = clock
        self._loads = LoadReports(config)
        self._scaler: FleetScaler | None = None  # None: no target has told its costs yet
        self._machines_s = 0.0  # when the machines are read next: they may be lost, and others may join

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self.step(self._clock())
            except Exception:
                # Whatever failed, nothing was half decided: the next period decides anew.
                logger.exception("the autoscaler leaves the numbers of replicas as they are: unexpected error")
            await asyncio.sleep(FleetScaler.period_s)

    async def step(self, now_s: float) -> None:
        """Reads the load, and resizes if other numbers are wanted."""
        reports = await self._processes.reports()
        if self._scaler is None:
            self._scaler = await self._make_scaler(reports)
            if self._scaler is None:
                return
            self._machines_s = now_s + MACHINES_S
        elif self._config.scaling.hardware == "fixed" and now_s >= self._machines_s:
            self._machines_s = now_s + MACHINES_S
            await self._follow_machines(self._scaler)
        targets, drafters = fleet = self._processes.fleet()
        size = self._scaler.decide(self._loads.report(now_s, reports, fleet))
        wanted = {name: size.num_drafters.get(name, 0) for name in drafters}
        if size.num_targets != targets.num_wanted or any(wanted[n] != one.num_wanted for n, one in drafters.items()):
            self._processes.resize(FleetSize(size.num_targets, wanted, size.reason))

    async def _follow_machines(self, scaler: FleetScaler) -> None:
        try:
            async with asyncio.timeout(READ_S):
                scaler.limits = fleet_limits(self._config, await self._machines())
        except Exception:
            # Whatever failed, the last limits are a better guess than none.
            logger.exception("the autoscaler could not read the machines, the last ones count")

    async def _make_scaler(self, reports: Sequence[TargetReport]) -> FleetScaler | None:
        for report in reports:
            member = self._pool.targets.get(report.status.name)
            ready = None if member is None else member.ready
            costs: CostTables | None = await health.ask(ready, self._config.supervision, "cost_tables")
            if costs is not None and report.status.num_blocks:
                kv_tokens = report.status.num_blocks * self._config.target.block_len
                return fleet_scaler(self._config, costs, kv_tokens, await self._machines())
        return None


def _num_missed(report: TargetReport) -> int:
    return sum(one.num_answers - one.num_met + one.num_refused for one in report.status.slo)


def _any_falls(before: TargetReport, now: TargetReport) -> bool:
    """Of counts that only rise while a process lives."""
    added: list[int] = [*astuple(now.served.minus(before.served)), _num_missed(now) - _num_missed(before)]
    return min(added) < 0
