"""Keeps the processes of a deployment alive: start, health, restart, quarantine, drain. `Spawner` is Ray's part."""

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from typing import Any

from actors.cluster_status import cluster_status
from actors.drafter import DrafterInfo
from actors.drafter_loader import SILENT, DrafterLoader
from actors.health import ask, started, watched
from actors.memory_budget import MemoryBudget
from actors.processes import Directory, ManagedProcess, Process, ProcessEnded, ProcessPool, ProcessState, Spawner
from actors.restarts import RestartPolicy
from actors.target import TargetInfo, TargetReport
from cluster.client import ClusterStatus, TargetStatus
from cluster.config import Config
from cluster.errors import InvalidField
from cluster.types import ModelInfo
from router.assignment import member_name

logger = logging.getLogger(__name__)

# A pass over a long prompt may keep a busy target from its mail for seconds, and killing it ends streams: more patience.
TARGET_PATIENCE = 10
DRAIN_POLL_S = 0.1
DIRECTORY_WAIT_S = 60.0  # of one question where the targets are
# Whoever asks for the status waits 2 s at most, so that one target that hangs must not take longer to be left out.
REPORT_DEADLINE_S = 1.0


class Supervisor:
    """One task per member, which starts it, watches it, and starts it again. Used from one event loop."""

    def __init__(self, config: Config, spawner: Spawner, budget: MemoryBudget | None = None) -> None:
        """``budget``: of the drafters that share devices; the others are simply kept alive."""
        self._config = config
        self._keeper = DrafterLoader(budget or MemoryBudget(), config.memory.min_residence_s)
        self._spawner = spawner
        self._pool = ProcessPool()
        self._kinds = {member_name(d.name, i): d for d in config.drafters for i in range(d.replicas)}
        self._tasks: set[asyncio.Task[None]] = set()
        self._addresses: dict[str, str] = {}
        self._directory = Directory(secrets.token_hex(8))
        self._unsettled: set[str] = set()  # targets of which is not known yet whether they can start
        self._changed = asyncio.Condition()
        self._draining: set[str] = set()
        self._failed_start: str | None = None  # of the first target that ended before any was ready
        self._stopping = False

    # ---- what the deployment asks

    def start(self) -> None:
        """Begins with the targets; drafters and router follow as soon as one of them is ready."""
        for replica in range(self._config.target.replicas):
            name = f"target-{replica}"
            member = ManagedProcess(
                name,
                lambda name=name: self._spawner.target(name),  # type: ignore[misc]
                self._target_ready,
                RestartPolicy(self._config.supervision, may_quarantine=False),
                patience=TARGET_PATIENCE,
            )
            self._pool.targets[name] = member
            self._unsettled.add(name)
            self._begin(member)

    async def ready(self) -> Directory:
        """Waits until every target is ready or has failed to start, which is bounded by the deadline of a start.

        Those that failed go on being started; ``reasons`` tells about them.

        Raises:
            ProcessEnded: a target ended before any was ready; says why.
        """
        while self._unsettled or self._failed_start is not None:
            if self._failed_start is not None:
                raise ProcessEnded(self._failed_start)
            await self._wait_change()
        return self._directory

    async def directory(self, known: Directory) -> Directory:
        """Waits until there is another directory than ``known``, and returns it; after DIRECTORY_WAIT_S ``known`` itself, so
        that a call whose caller has died ends.

        A supervisor that takes the place of another tells none before it has found all targets again: links to those
        left out would be closed.
        """
        try:
            async with asyncio.timeout(DIRECTORY_WAIT_S):
                while self._unsettled or self._directory.model is None or self._directory == known:
                    await self._wait_change()
        except TimeoutError:
            return known
        return self._directory

    def reasons(self) -> dict[str, str]:
        """Why members are not ready, of those that have failed."""
        return {m.name: m.reason for m in self._pool.all() if m.reason is not None and m.state is not ProcessState.READY}

    async def status(self) -> ClusterStatus:
        """Of everything, as far as it answers within the health deadline."""
        reports, notes = await asyncio.gather(self.reports(), self._notes())
        model = self._directory.model
        name = model.name if model is not None else self._config.model.name
        drafters, models = self._pool.drafters, self._keeper.models
        return cluster_status(self._config, name, reports, self._kinds, drafters, models, self._draining, notes)

    async def _notes(self) -> tuple[str, ...]:
        router = self._pool.router
        if router is None or router.process is None or router.state is not ProcessState.READY:
            return ()
        return await self._ask(router.process, "notes", deadline_s=REPORT_DEADLINE_S) or ()

    def pids(self) -> dict[str, int]:
        """Of the processes that are ready, by member."""
        return {
            m.name: m.pid
            for m in self._pool.all()
            if m.pid is not None and m.state in (ProcessState.READY, ProcessState.DRAINING)
        }

    async def set_draining(self, name: str, draining: bool) -> None:
        """A draining drafter is given no more requests, and those it has go elsewhere with the next slot.

        Raises:
            InvalidField: there is no such drafter.
        """
        if name not in self._kinds:
            raise InvalidField("drafter", name, f"must be one of {', '.join(self._kinds) or 'none: the pool is empty'}")
        (self._draining.add if draining else self._draining.discard)(name)
        await self._tell_router()
        await self._notify()

    async def drain(self, deadline_s: float) -> bool:
        """Targets take no more requests. Returns whether all that were under way ended within the deadline."""
        targets = [m.process for m in self._pool.targets.values() if m.process is not None]
        end_s = time.monotonic() + deadline_s
        await asyncio.gather(*(self._ask(process, "drain", deadline_s=deadline_s) for process in targets))
        while time.monotonic() < end_s:
            statuses = [report.status for report in await self.reports()]
            if not any(s.num_running + s.num_waiting or s.state == SILENT for s in statuses):
                return True
            await asyncio.sleep(DRAIN_POLL_S)
        return False

    async def stop(self) -> None:
        """Ends all members: politely, then by force."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._end(member) for member in self._pool.all()))

    # ---- one member

    def _begin(self, member: ManagedProcess) -> None:
        member.task = self._own(self._keep(member), f"keep {member.name}")

    async def _keep(self, member: ManagedProcess) -> None:
        while not self._stopping and self._keeper.has_place(member.name):
            await asyncio.sleep(max(0.0, member.start_at_s - time.monotonic()))
            member.state = ProcessState.STARTING
            await self._notify()
            try:
                process = member.process = await member.spawn()
                await self._has_begun(member, await started(process, self._config.supervision.start_timeout_s))
                reason = await watched(process, self._config.supervision, member.patience)
            except ProcessEnded as ended:
                reason = str(ended)
            except Exception as error:
                # Owned here: whatever it was, this member is started again like after any other end.
                logger.exception("%s: unexpected", member.name)
                reason = f"{type(error).__name__}: {error}"
            await self._failed(member, reason)

    async def _has_begun(self, member: ManagedProcess, info: Any) -> None:
        member.pid = info.pid
        member.state = ProcessState.READY
        member.reason = None
        logger.info("%s is ready (process %d)", member.name, info.pid)
        await member.on_ready(member, info)
        await self._notify()

    async def _failed(self, member: ManagedProcess, reason: str) -> None:
        if member.process is not None:
            try:
                await member.process.kill()
            except Exception:
                # Owned here, as above: one that cannot be killed is found again, and killed again, by its next start.
                logger.exception("%s could not be killed", member.name)
        restart = member.restarts.failed(time.monotonic())
        member.process = member.pid = None
        member.reason = reason
        if self._directory.model is None and self._failed_start is None:
            self._failed_start = f"{member.name} did not start: {reason}"
        member.start_at_s = restart.at_s
        member.state = ProcessState.QUARANTINED if restart.quarantined else ProcessState.DOWN
        if self._keeper.keeps(member.name) and self._kinds[member.name].load == "lazy":
            self._keeper.models.failed(member.name, restart.at_s)  # loaded again when it is wanted again, and not before
        pause_s = restart.at_s - time.monotonic()
        logger.warning(
            "%s is down: %s; %s in %.1f s",
            member.name, reason, "out of quarantine" if restart.quarantined else "next start", max(0.0, pause_s),
        )  # fmt: skip
        if member.name in self._unsettled:
            self._unsettled.discard(member.name)
            await self._tell_drafters()
        await self._notify()

    # ---- who depends on whom

    async def _target_ready(self, member: ManagedProcess, info: TargetInfo) -> None:
        self._addresses[info.name] = info.address
        addresses = tuple(self._addresses[name] for name in sorted(self._addresses))
        self._directory = replace(
            self._directory, version=self._directory.version + 1, model=info.model, addresses=addresses
        )
        self._unsettled.discard(member.name)
        await self._tell_drafters()
        if self._pool.router is None:
            self._start_followers(info.model)

    def _start_followers(self, model: ModelInfo) -> None:
        self._keeper.models.start(time.monotonic())
        for name, config in self._kinds.items():
            if config.is_companion:
                continue  # lives and dies with each target
            member = ManagedProcess(
                name,
                lambda name=name, config=config: self._spawner.drafter(  # type: ignore[misc]
                    name, self._keeper.where_it_is(name, config), model, self._directory.addresses
                ),
                self._drafter_ready,
                RestartPolicy(self._config.supervision, may_quarantine=True),
            )
            self._pool.drafters[name] = member
            if self._keeper.has_place(name):
                self._begin(member)
            else:
                member.state = ProcessState.UNLOADED
        self._pool.router = ManagedProcess(
            "router",
            self._spawner.router,
            self._router_ready,
            RestartPolicy(self._config.supervision, may_quarantine=False),
        )
        self._begin(self._pool.router)
        if self._keeper.models.tenants:
            self._own(self._keeper.run(self, self._config.router.slot_ms / 1e3), "keep the models")

    async def _drafter_ready(self, member: ManagedProcess, info: DrafterInfo) -> None:
        """It may be one of a supervisor before this, and know addresses of then."""
        if not self._unsettled and member.process is not None:
            await self._ask(member.process, "want", self._directory.addresses)

    async def _tell_drafters(self) -> None:
        """Not before all targets were found again: links to those left out would be closed."""
        if self._unsettled:
            return
        for drafter in self._pool.drafters.values():
            if drafter.process is not None:
                await self._ask(drafter.process, "want", self._directory.addresses)

    async def _router_ready(self, member: ManagedProcess, info: Any) -> None:
        await self._tell_router()

    async def _tell_router(self) -> None:
        router = self._pool.router
        if router is not None and router.process is not None and router.state is ProcessState.READY:
            models = self._keeper.models
            await self._ask(router.process, "set_draining", frozenset(self._draining) | models.retiring)
            if models.tenants:
                offered = models.offered(time.monotonic()) - self._draining
                await self._ask(router.process, "set_offered", offered, models.on_fallback)

    # ---- who is in memory: `actors.drafter_loader.LoadedDrafters`

    async def reports(self) -> list[TargetReport]:
        return await asyncio.gather(*(self._report(member) for member in self._pool.targets.values()))

    async def load_demand(self) -> Mapping[str, int]:
        router = self._pool.router
        if router is None or router.process is None or router.state is not ProcessState.READY:
            return {}
        return await self._ask(router.process, "load_demand") or {}

    def load(self, name: str) -> None:
        self._begin(self._pool.drafters[name])

    async def unload(self, name: str) -> None:
        member = self._pool.drafters[name]
        if member.task is not None:
            member.task.cancel()
            await asyncio.gather(member.task, return_exceptions=True)
        await self._end(member)
        await self._spawner.end_drafter(name)  # its task may have been about to start one
        member.state, member.pid, member.reason = ProcessState.UNLOADED, None, None

    async def pool_changed(self) -> None:
        await self._tell_router()
        await self._notify()

    # ---- small things

    async def _report(self, member: ManagedProcess) -> TargetReport:
        silent = TargetReport(TargetStatus(member.name, member.state, 0, 0, 0, 0, 0.0, 0.0))
        if member.process is None or member.state is not ProcessState.READY:
            return silent
        report: TargetReport | None = await self._ask(member.process, "report", deadline_s=REPORT_DEADLINE_S)
        return report or TargetReport(replace(silent.status, state=SILENT))

    async def _ask(self, process: Process, method: str, *args: Any, deadline_s: float = math.inf) -> Any:
        return await ask(process, self._config.supervision, method, *args, deadline_s=deadline_s)

    async def _end(self, member: ManagedProcess) -> None:
        process, member.process = member.process, None
        member.state = ProcessState.DOWN
        if process is not None:
            await self._ask(process, "stop")
            await process.kill()

    def _own(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Tasks of this object never end but by `stop`; one that does has met a mistake in this file, and says so."""
        task = asyncio.ensure_future(work)
        task.set_name(name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s failed", task.get_name(), exc_info=error)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _wait_change(self) -> None:
        async with self._changed:
            await self._changed.wait()
