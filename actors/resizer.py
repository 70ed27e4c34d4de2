"""Replicas of targets and drafters that join and leave while others serve.

A target that leaves accepts no more requests once another one is ready, and ends when its running ones have ended or after
``drain_s``. The requests of a drafter that leaves are given to others in the next slot. The resources of either are
given back.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import count, islice
from typing import Protocol

from actors import health
from actors.drafter_loader import SILENT
from actors.processes import ProcessPool
from actors.target import TargetReport
from cluster.config import Config, DrafterConfig, TargetConfig
from cluster.placement import TARGET_PREFIX, drafter_name, target_name
from router.assignment import drafter_of, member_name
from router.scaling.report import FleetSize, Replicas

logger = logging.getLogger(__name__)

POLL_S = 0.2
DRAIN_S = 60.0  # for the running requests of a target that leaves; what remains goes on at another target
DRAFTER_DRAIN_S = 5.0  # several slots of the router
RETRY_S = 2.0


class ResizedProcesses(Protocol):
    """The supervisor."""

    async def reports(self) -> Sequence[TargetReport]: ...

    def add_target(self, name: str) -> None: ...

    def add_drafter(self, name: str, config: DrafterConfig) -> None: ...

    async def remove(self, name: str) -> None:
        """Ends a target or drafter and gives back its resources; returns when it is gone."""

    async def members_changed(self) -> None:
        """Called when another one leaves."""


class Resizer:
    """Owns the set of replicas that leave. ``run``: keeps a task that removes one."""

    def __init__(
        self,
        config: Config,
        pool: ProcessPool,
        processes: ResizedProcesses,
        run: Callable[[str], None],
        drain_s: float = DRAIN_S,
    ) -> None:
        self._config, self._pool, self._processes, self._run = config, pool, processes, run
        self._drain_s = drain_s
        self.leaving: set[str] = set()

    def resize(self, size: FleetSize) -> FleetSize:
        """Begins to start and to end replicas until there are as many. Returns the size within the configured bounds.

        Drafters that ``size`` does not name stay as many as they are.
        """
        target, wanted = self._config.target, {}
        num_targets = min(max(size.num_targets, target.least), target.most)
        if target.scales:
            missing = self._fit(self._pool.targets, num_targets, map(target_name, count()))
            for name in missing:
                logger.info("the supervisor adds %s", name)
                self._processes.add_target(name)
        for drafter in self._config.drafters:
            if not drafter.scales:
                continue
            members = [name for name in self._pool.drafters if drafter_of(name) == drafter.name]
            num = size.num_drafters.get(drafter.name, sum(name not in self.leaving for name in members))
            wanted[drafter.name] = num = min(max(num, drafter.least), drafter.most)
            names = (member_name(drafter.name, replica) for replica in range(drafter.most))
            for name in self._fit(members, num, names):
                logger.info("the supervisor adds %s", name)
                self._processes.add_drafter(name, drafter)
        return FleetSize(num_targets, wanted, size.reason)

    def begin_leaving(self, name: str) -> None:
        logger.info("%s leaves and drains", name)
        self.leaving.add(name)
        self._run(name)

    def replicas(self) -> tuple[Replicas, Mapping[str, Replicas]]:
        """Targets, and by configured name the drafters that scale; those that leave do not count."""
        drafters = [drafter.name for drafter in self._config.drafters if drafter.scales]
        return self._counted(self._pool.targets), {
            name: self._counted(one for one in self._pool.drafters if drafter_of(one) == name) for name in drafters
        }

    async def leave(self, name: str) -> None:
        """Waits until nothing uses it any more, then removes it."""
        while name in self.leaving:
            try:
                await self._remove(name)
            except Exception:
                # Whatever failed: until it is gone, it holds its resources, and none of its name can join.
                logger.exception("%s could not be removed; next attempt in %g s", name, RETRY_S)
                await asyncio.sleep(RETRY_S)

    async def _remove(self, name: str) -> None:
        await self._processes.members_changed()
        if name in self._pool.targets:
            await self._drained(name)
        else:
            await self._unused(name)
        await self._processes.remove(name)
        self.leaving.discard(name)
        await self._processes.members_changed()

    def _fit(self, members: Iterable[str], num: int, names: Iterable[str]) -> list[str]:
        """Lets surplus members leave, or returns the names of missing ones."""
        staying = [name for name in members if name not in self.leaving]
        if len(staying) < num:
            free = (name for name in names if name not in self._pool.targets and name not in self._pool.drafters)
            return list(islice(free, num - len(staying)))
        # Those that are not ready leave first, then the newest. The router has its place beside the first target.
        order = sorted(staying, key=lambda name: (name == target_name(0), self._is_ready(name), -_replica(name)))
        for name in order[: len(staying) - num]:
            self.begin_leaving(name)
        return []

    def _is_ready(self, name: str) -> bool:
        return (self._pool.targets.get(name) or self._pool.drafters[name]).ready is not None

    def _counted(self, names: Iterable[str]) -> Replicas:
        staying = [name for name in names if name not in self.leaving]
        num_ready = sum(self._is_ready(name) for name in staying)
        return Replicas(num_ready, len(staying) - num_ready)

    async def _drained(self, name: str) -> None:
        """Waits until the target has no requests, has ended, or its time is over, which passes only while another one
        serves. Without another one it serves on."""
        end_s, num_idle = None, 0
        while (process := self._pool.targets[name].ready) is not None:
            is_idle = False
            serves_on = not any(self._is_ready(other) for other in self._pool.targets if other not in self.leaving)
            # In each turn, since an answer may be lost, and an earlier supervisor may have asked.
            await health.ask(process, self._config.supervision, "drain", not serves_on)
            if serves_on:
                end_s = None
            else:
                end_s = end_s or time.monotonic() + self._drain_s
                statuses = [report.status for report in await self._processes.reports() if report.status.name == name]
                is_idle = not any(one.num_running + one.num_waiting or one.state == SILENT for one in statuses)
            num_idle = num_idle + 1 if is_idle else 0
            if num_idle > 1:  # what was sent before its gateway knew has been refused by now
                return
            if end_s is not None and time.monotonic() > end_s:
                logger.warning("%s still has requests after %g s", name, self._drain_s)
                return
            await asyncio.sleep(POLL_S)

    async def _unused(self, name: str) -> None:
        """Waits until no target drafts with it, or DRAFTER_DRAIN_S."""
        end_s = time.monotonic() + DRAFTER_DRAIN_S
        while self._pool.drafters[name].ready is not None and time.monotonic() < end_s:
            counts = [one for report in await self._processes.reports() for one in report.drafters if one.name == name]
            if not any(one.num_requests for one in counts):
                return
            await asyncio.sleep(POLL_S)


def _replica(name: str) -> int:
    number = name.removeprefix(TARGET_PREFIX).rpartition("/")[2]
    return int(number) if number.isdigit() else 0


def first_targets(config: TargetConfig, running: Collection[str]) -> list[str]:
    """Those to begin with: of an earlier supervisor, which may have added and removed some, else as configured."""
    configured = [target_name(replica) for replica in range(config.replicas)]
    if not config.scales or not (found := [name for name in running if _is_target(name)]):
        return configured
    return sorted({*found, *(target_name(replica) for replica in range(config.least))}, key=_replica)


def first_drafters(config: Config, running: Collection[str]) -> dict[str, DrafterConfig]:
    """As `first_targets`, every member of the pool."""
    is_found = any(map(_is_target, running))
    members = {}
    for drafter in config.drafters:
        for replica in range(drafter.most):
            name = member_name(drafter.name, replica)
            if drafter_name(name) in running if is_found and drafter.scales else replica < drafter.replicas:
                members[name] = drafter
    return members


def _is_target(name: str) -> bool:
    return name.startswith(TARGET_PREFIX) and name.removeprefix(TARGET_PREFIX).isdigit()
