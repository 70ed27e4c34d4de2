"""Moves drafters in and out of memory as a `ModelPool` decides. `LoadedDrafters` is the supervisor's part."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from actors.memory_budget import MemoryBudget
from actors.target import TargetReport
from cluster.config import DrafterConfig
from router.residency import LoadDemand, ModelPool, Moves

logger = logging.getLogger(__name__)

SILENT = "silent"  # the state of a target that should be ready and tells nothing


class LoadedDrafters(Protocol):
    """Who has the processes."""

    async def reports(self) -> Sequence[TargetReport]: ...

    async def load_demand(self) -> Mapping[str, int]:
        """How many requests the router would give to each drafter that is not in memory."""

    def load(self, name: str) -> None:
        """Begins to start a drafter's process, which is kept alive from now on. Waits for nothing."""

    async def unload(self, name: str) -> None:
        """Ends a drafter's process, also one that somebody else started; returns when it is gone."""

    async def pool_changed(self) -> None:
        """Others are offered, or on their fallback, or to be given no requests."""


class DrafterLoader:
    """Of one deployment. Drafters that have no home are none of its business."""

    def __init__(self, budget: MemoryBudget, min_residence_s: float) -> None:
        self.models = ModelPool(budget.tenants, budget.limits, min_residence_s)
        self._told: tuple[object, ...] = ()

    def keeps(self, name: str) -> bool:
        return name in self.models.num_loads

    def has_place(self, name: str) -> bool:
        return not self.keeps(name) or name in self.models.resident

    def where_it_is(self, name: str, config: DrafterConfig) -> DrafterConfig:
        """The configuration by which it is made: on a CPU, if it fell back to one."""
        return config.model_copy(update={"device": "cpu"}) if name in self.models.on_fallback else config

    async def run(self, members: LoadedDrafters, period_s: float) -> None:
        """Looks, again and again, who is wanted. For ever."""
        for name in [name for name in self.models.num_loads if not self.has_place(name)]:
            await members.unload(name)  # a supervisor before this one may have left it running
        while True:
            await asyncio.sleep(period_s)
            if not self.models.is_settled:
                await self.look(members)

    async def look(self, members: LoadedDrafters) -> None:
        reports = await members.reports()
        if any(report.status.state == SILENT for report in reports):
            return  # it does not tell what it does, so that nobody may be taken for idle
        wanting, with_them = Counter(dict(await members.load_demand())), Counter[str]()
        for report in reports:
            wanting.update(report.named)
            with_them.update({one.name: one.num_requests for one in report.drafters})
        demands = {name: LoadDemand(with_them[name], wanting[name]) for name in self.models.num_loads}
        await self._move(members, self.models.look(demands, time.monotonic()))

    async def _move(self, members: LoadedDrafters, moves: Moves) -> None:
        for name in moves.evict:
            logger.info("%s gives way to others, and leaves memory", name)
            await members.unload(name)
        for name, device in moves.load:
            logger.info("%s is wanted, and is loaded on %s", name, device)
            members.load(name)
        told = (self.models.retiring, self.models.offered(time.monotonic()), self.models.on_fallback)
        if moves or told != self._told:
            self._told = told
            await members.pool_changed()
