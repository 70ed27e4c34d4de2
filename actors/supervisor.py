"""Keeps the processes of a deployment running: start, health checks, restarts, quarantine, drain."""

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from actors import health
from actors.autoscaler import Autoscaler, Fleet, Machines, ScaleLog, no_machines
from actors.cluster_status import REPORT_DEADLINE_S, LastReports, cluster_status
from actors.drafter_loader import PERIOD_S, SILENT, DrafterLoader, MemoryBudget
from actors.processes import (
    AdapterRegistry,
    Directory,
    ManagedProcess,
    ProcessEnded,
    ProcessPool,
    ProcessState,
    RestartPolicy,
    Spawner,
    Tasks,
)
from actors.resizer import DRAIN_S, Resizer, first_drafters, first_targets
from actors.target import TargetInfo, TargetReport
from actors.worker import ProcessInfo
from cluster.client import ClusterStatus
from cluster.config import Config, DrafterConfig, PolicyConfig
from cluster.placement import drafter_name, target_name
from cluster.types import Adapter, ModelInfo
from router.scaling.report import FleetSize

logger = logging.getLogger(__name__)

# A pass over a long prompt may block a target's loop for seconds, and killing a target ends its streams.
TARGET_TIMEOUT_FACTOR = 10
DRAIN_POLL_S = 0.1
ABORTED_S = 3.0  # for the requests that gateways end; a target that hangs does not abort them
ROUTER, CHAINS = "router", "chain-scheduler"  # the processes that decide
SENT_S = 0.5  # from a gateway's abort to the client, through the proxy
DIRECTORY_WAIT_S = 60.0  # longest wait of one `directory` call


class Supervisor:
    """One task per process starts it, watches it, and restarts it. Used from one event loop.

    Args:
        budget: of the drafters that share devices; other drafters are always kept running.
        machines: their resources; only needed with `scaling.policy`.
    """

    def __init__(
        self,
        config: Config,
        spawner: Spawner,
        budget: MemoryBudget | None = None,
        machines: Machines = no_machines,
        load_period_s: float = PERIOD_S,
        drain_s: float = DRAIN_S,
    ) -> None:
        self._config = config
        self._loader = DrafterLoader(budget or MemoryBudget(), config.memory.min_residence_s, load_period_s)
        self._spawner = spawner
        self._pool = ProcessPool()
        self._last_reports = LastReports()
        self._drafters: dict[str, DrafterConfig] = {}  # every member of the pool
        self._resizer = Resizer(config, self._pool, self, self._leave, drain_s)
        self._scaled = ScaleLog()
        self._autoscaler = Autoscaler(config, self._pool, self, machines)
        self._tasks = Tasks()
        self._addresses: dict[str, str] = {}
        self._directory = Directory(secrets.token_hex(8))
        self._adapters = AdapterRegistry()
        self._starting_targets: set[str] = set()  # neither ready nor failed yet
        self._changed = asyncio.Condition()
        self._draining: frozenset[str] = frozenset()  # on machines that drain
        self._failed_start: str | None = None  # of the first target that ended before any was ready
        self._stopping = False

    # ---- called by the deployment

    def start(self) -> None:
        """Starts the targets; drafters and router follow as soon as one is ready. Idempotent."""
        if self._pool.targets:
            return
        running = self._spawner.running()
        names = first_targets(self._config.target, running)
        found = [name for name in names if running.get(name)]
        self._starting_targets.update(found or names)  # others were joining, and nothing waits for them
        for name in names:
            self.add_target(name)
        self._drafters |= first_drafters(self._config, running)

    async def ready(self, every: bool = True) -> Directory:
        """Waits until every target, or one, is ready or has failed to start; ``reasons`` says why.

        Raises:
            ProcessEnded: a target ended before any was ready.
        """
        self.start()
        while self._starting_targets and (self._failed_start if every else self._directory.model) is None:
            await self._wait_change()
        if self._failed_start is not None and self._directory.model is None:
            raise ProcessEnded(self._failed_start)
        return self._directory

    async def directory(self, known: Directory) -> Directory:
        """Waits for a directory other than ``known``; returns ``known`` after DIRECTORY_WAIT_S.

        A restarted supervisor returns none before it has found all targets again: callers would close the other links.
        """
        self.start()
        await self._notify(self._adapters.recalled(self._directory, known))
        try:
            async with asyncio.timeout(DIRECTORY_WAIT_S):
                while self._starting_targets or self._directory.model is None or self._directory == known:
                    await self._wait_change()
        except TimeoutError:
            return known
        return self._directory

    async def swap_adapter(self, old: Adapter | None, new: Adapter | None) -> Directory | None:
        """As ``AdapterRegistry.swapped``."""
        changed = self._adapters.swapped(self._directory, old, new)
        await self._notify(changed)
        return changed

    def reasons(self) -> dict[str, str]:
        """Why failed processes are not ready, by name."""
        return {m.name: m.reason for m in self._pool.all() if m.reason is not None and m.state is not ProcessState.READY}

    async def status(self) -> ClusterStatus:
        """Processes that do not answer within their deadline count as silent."""
        self.start()
        reports, router, chains = await asyncio.gather(
            self.reports(),
            self._ask(self._pool.control.get(ROUTER), "report", deadline_s=REPORT_DEADLINE_S),
            self._ask(self._pool.control.get(CHAINS), "report", deadline_s=REPORT_DEADLINE_S),
        )
        model = self._directory.model
        name = model.name if model is not None else self._config.model.public_names[0]
        drafters, models = self._pool.drafters, self._loader.models
        leaving = self._draining | self._resizer.leaving
        reports = [self._last_reports.counted(report) for report in reports]
        ended, known = self._last_reports.ended, self._drafters
        scaled = self._scaled
        return cluster_status(self._config, name, reports, ended, known, drafters, models, leaving, router, chains, scaled)

    async def try_policy(self, policy: PolicyConfig | None, for_s: float) -> bool:
        """As `actors.router.RouterActor.try_policy`; False: there is no router now."""
        return await self._ask(self._pool.control.get(ROUTER), "try_policy", policy, for_s) is not None

    async def is_cut_off(self) -> bool:
        """Whether the head of the cluster is out of reach."""
        return False

    def pids(self) -> dict[str, int]:
        """Process ids of the ready processes, by name."""
        return {m.name: m.pid for m in self._pool.all() if m.pid is not None and m.ready}

    async def leave_machines(self, names: frozenset[str]) -> None:
        """``names``: all members on machines that drain. Requests go to others, if there are any. Those whose numbers scale
        are removed when they are idle, so that others may join elsewhere."""
        if names == self._draining:
            return
        new, self._draining = names - self._draining - self._resizer.leaving, names
        await self.members_changed()
        for name in new:
            target, drafter = self._pool.targets.get(name), self._drafters.get(name)
            if (target and self._config.target.scales and name != target_name(0)) or (drafter and drafter.scales):
                self._resizer.begin_leaving(name)

    async def drain(self, deadline_s: float) -> bool:
        """Targets accept no more requests. Returns whether all running ones ended within the deadline; gateways end the
        others with an error, which has been sent when this returns."""
        end_s = time.monotonic() + deadline_s
        drained = partial(health.ask, config=self._config.supervision, method="drain", deadline_s=deadline_s)
        await asyncio.gather(*(drained(target.process) for target in self._pool.targets.values()))  # also those that start
        if await self._idle_by(end_s):
            return True
        await self._notify(self._directory.changed(ends=True))
        await self._idle_by(time.monotonic() + ABORTED_S)
        await asyncio.sleep(SENT_S)
        return False

    async def _idle_by(self, end_s: float) -> bool:
        """Waits until the targets have no requests. False: not by then."""
        while time.monotonic() < end_s:
            statuses = [report.status for report in await self.reports()]
            if not any(s.num_running + s.num_waiting or s.state == SILENT for s in statuses):
                return True
            await asyncio.sleep(DRAIN_POLL_S)
        return False

    async def num_requests(self) -> int:
        """Requests that run or wait in the targets that answer."""
        statuses = [report.status for report in await self.reports()]
        return sum(status.num_running + status.num_waiting for status in statuses)

    async def stop(self) -> None:
        self._stopping = True
        await self._tasks.cancel()
        await asyncio.gather(*(self._end(member) for member in self._pool.all()))

    # ---- one process

    def _supervise(self, member: ManagedProcess) -> None:
        member.task = self._tasks.start(self._keep_running(member), f"supervise {member.name}")

    async def _keep_running(self, member: ManagedProcess) -> None:
        while not self._stopping and self._loader.may_run(member.name) and member.name not in self._resizer.leaving:
            await asyncio.sleep(max(0.0, member.start_at_s - time.monotonic()))
            member.state = ProcessState.STARTING
            await self._notify()
            try:
                process = member.process = await member.spawn()
                await self._started(member, await health.start(process, self._config.supervision.start_timeout_s))
                reason = await health.wait_failure(process, self._config.supervision, member.timeout_factor, self.is_cut_off)
            except ProcessEnded as ended:
                reason = str(ended)
            except Exception as error:
                # Whatever failed, the process is restarted as after any other end.
                logger.exception("the supervisor failed to watch %s: unexpected error", member.name)
                reason = f"{type(error).__name__}: {error}"
            await self._failed(member, reason)

    async def _started(self, member: ManagedProcess, info: Any) -> None:
        member.state, member.pid, member.reason = ProcessState.READY, info.pid, None
        logger.info("%s is ready (process %d)", member.name, info.pid)
        await member.on_ready(member, info)
        await self._notify()

    async def _failed(self, member: ManagedProcess, reason: str) -> None:
        if member.process is not None:
            try:
                await member.process.kill()
            except Exception:
                # The next spawn finds a process that survived, and its failure kills it again.
                logger.exception("%s could not be killed", member.name)
        self._last_reports.end(member.name)
        restart = member.restarts.failed(time.monotonic())
        member.process = member.pid = None
        member.reason = reason
        if self._directory.model is None and self._failed_start is None:
            self._failed_start = f"{member.name} did not start: {reason}"
        member.start_at_s = restart.at_s
        member.state = ProcessState.QUARANTINED if restart.quarantined else ProcessState.DOWN
        if self._loader.manages(member.name) and self._drafters[member.name].load == "lazy":
            self._loader.models.failed(member.name, restart.at_s)  # loaded again on demand only
        pause_s = max(0.0, restart.at_s - time.monotonic())
        until = "quarantined for" if restart.quarantined else "next start in"
        logger.warning("%s is down: %s; %s %.1f s", member.name, reason, until, pause_s)
        if member.name in self._starting_targets:
            self._starting_targets.discard(member.name)
            await self._send_addresses()
        await self._notify()

    # ---- dependencies between processes

    async def _target_ready(self, member: ManagedProcess, info: TargetInfo) -> None:
        self._addresses[info.name] = info.address
        self._starting_targets.discard(member.name)
        self._failed_start = None
        if info.draining and self._config.target.scales and member.name not in (target_name(0), *self._resizer.leaving):
            self._resizer.begin_leaving(member.name)  # as an earlier supervisor had begun
        await self.members_changed(info.model)
        if not self._pool.control:
            self._start_pool(info.model)

    def _start_pool(self, model: ModelInfo) -> None:
        """Starts the drafters and what decides about them."""
        self._loader.models.start(time.monotonic())
        for name, config in self._drafters.items():
            if not config.is_colocated:  # else it runs in each target's process
                self._start_drafter(name, config, model)
        for name in (CHAINS, ROUTER):
            restarts = RestartPolicy(self._config.supervision, may_quarantine=False)
            spawn = partial(self._spawner.control, name)
            self._pool.control[name] = ManagedProcess(name, spawn, self._control_ready, restarts)
            self._supervise(self._pool.control[name])
        if self._config.scaling.policy != "none":
            self._tasks.start(self._autoscaler.run(), "autoscaling")
        if self._loader.models.tenants:
            self._tasks.start(self._loader.run(self), "load and evict drafters")

    def _start_drafter(self, name: str, config: DrafterConfig, model: ModelInfo) -> None:
        member = ManagedProcess(
            name,
            lambda: self._spawner.drafter(name, self._loader.placed(name, config), model, self._directory.addresses),
            self._drafter_ready,
            RestartPolicy(self._config.supervision, may_quarantine=True),
        )
        self._pool.drafters[name] = member
        if self._loader.may_run(name):
            self._supervise(member)
        else:
            member.state = ProcessState.UNLOADED

    async def _drafter_ready(self, member: ManagedProcess, info: ProcessInfo) -> None:
        """A drafter that an earlier supervisor started may have outdated addresses."""
        if not self._starting_targets:
            await self._ask(member, "set_addresses", self._directory.addresses)

    async def members_changed(self, model: ModelInfo | None = None) -> None:
        """Tells drafters, router and gateways which targets there are, and which of them leave. ``model``: by default the
        last one."""
        addresses = tuple(self._addresses[name] for name in sorted(self._addresses))
        leaving = tuple(sorted((self._resizer.leaving | self._draining) & self._addresses.keys()))
        applied = self._adapters.applied(model or self._directory.model)
        directory = self._directory.changed(model=applied, addresses=addresses, leaving=leaving)
        await self._notify(directory)  # gateways first: drafters that do not answer take their deadline
        await self._send_addresses()
        await self._update_router()

    async def _send_addresses(self) -> None:
        """To the drafters, once all targets were found again: they close links to targets that are left out."""
        if not self._starting_targets:  # one that starts is told when it is ready
            addresses = self._directory.addresses
            await asyncio.gather(*(self._ask(member, "set_addresses", addresses) for member in self._pool.drafters.values()))

    async def _control_ready(self, member: ManagedProcess, info: Any) -> None:
        await self._update_router()

    async def _update_router(self) -> None:
        models = self._loader.models
        if self._config.target.scales:
            await self._ask(self._pool.control.get(ROUTER), "set_targets", tuple(self._pool.targets))
        await self._ask(
            self._pool.control.get(ROUTER), "set_draining", self._draining | self._resizer.leaving | models.retiring
        )
        if models.tenants:
            offered = models.offered(time.monotonic()) - self._draining
            await self._ask(self._pool.control.get(ROUTER), "set_offered", offered, models.on_fallback)

    # ---- `actors.drafter_loader.DrafterProcesses`

    async def reports(self) -> list[TargetReport]:
        supervision = self._config.supervision
        return await asyncio.gather(*(self._last_reports.ask(member, supervision) for member in self._pool.targets.values()))

    async def load_demand(self) -> Mapping[str, int]:
        return await self._ask(self._pool.control.get(ROUTER), "load_demand") or {}

    def load(self, name: str) -> None:
        self._supervise(self._pool.drafters[name])

    async def unload(self, name: str) -> None:
        member = self._pool.drafters[name]
        await self._end(member)
        await self._spawner.end(drafter_name(name))  # its task may have just spawned one
        member.state, member.pid, member.reason = ProcessState.UNLOADED, None, None

    async def pool_changed(self) -> None:
        await self._update_router()
        await self._notify()

    # ---- `actors.resizer.ResizedProcesses` and `actors.autoscaler.ScaledProcesses`

    def add_target(self, name: str) -> None:
        restarts = RestartPolicy(self._config.supervision, may_quarantine=False)
        spawn = partial(self._spawner.target, name)
        member = ManagedProcess(name, spawn, self._target_ready, restarts, TARGET_TIMEOUT_FACTOR)
        self._pool.targets[name] = member
        self._supervise(member)

    def add_drafter(self, name: str, config: DrafterConfig) -> None:
        """Without effect before the first target is ready: the pool starts then."""
        self._drafters[name] = config
        if self._pool.control and self._directory.model is not None:
            self._start_drafter(name, config, self._directory.model)

    async def remove(self, name: str) -> None:
        is_target = name in self._pool.targets
        member = (self._pool.targets if is_target else self._pool.drafters)[name]
        await self._end(member)
        self._last_reports.end(name)
        await self._spawner.end(name if is_target else drafter_name(name), give_back=True)
        if is_target:
            del self._pool.targets[name]
            self._addresses.pop(name, None)
            self._starting_targets.discard(name)
        else:
            del self._pool.drafters[name], self._drafters[name]

    def resize(self, size: FleetSize) -> FleetSize:
        """Begins to start or end replicas; returns what is wanted now, within the bounds of the configuration."""
        self.start()  # a restarted supervisor takes over what runs first
        before = self.fleet()
        wanted = self._resizer.resize(size)
        self._scaled.note(before, self.fleet(), size.reason or "asked by an operator")
        return wanted

    def fleet(self) -> Fleet:
        return self._resizer.replicas()

    def _leave(self, name: str) -> None:
        self._tasks.start(self._resizer.leave(name), f"remove {name}")

    # ---- helpers

    async def _ask(self, member: ManagedProcess | None, method: str, *args: Any, deadline_s: float = math.inf) -> Any:
        """The answer, or None from one that is not ready."""
        ready = None if member is None else member.ready
        return await health.ask(ready, self._config.supervision, method, *args, deadline_s=deadline_s)

    async def _end(self, member: ManagedProcess) -> None:
        """Also the task that would start it again."""
        if member.task is not None:
            member.task.cancel()
            await asyncio.gather(member.task, return_exceptions=True)
        process, member.process = member.process, None
        member.state = ProcessState.DOWN
        if process is not None:
            await health.ask(process, self._config.supervision, "stop")
            await process.kill()

    async def _notify(self, directory: Directory | None = None) -> None:
        """``directory``: a new one."""
        self._directory = directory or self._directory
        async with self._changed:
            self._changed.notify_all()

    async def _wait_change(self) -> None:
        async with self._changed:
            await self._changed.wait()
