"""Loads and evicts drafters as a `ModelPool` decides."""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from actors.memory_budget import MemoryBudget
from actors.target import TargetReport
from cluster.config import DrafterConfig
from router.residency import LoadDemand, ModelPool

logger = logging.getLogger(__name__)

PERIOD_S = 0.25  # a load takes longer

SILENT = "silent"  # state of a target that should be ready and does not answer


class DrafterProcesses(Protocol):
    """The supervisor."""

    async def reports(self) -> Sequence[TargetReport]: ...

    async def load_demand(self) -> Mapping[str, int]:
        """How many requests the router would give to each drafter that is not in memory."""

    def load(self, name: str) -> None:
        """Starts a drafter's process and keeps it running. Does not wait."""

    async def unload(self, name: str) -> None:
        """Ends a drafter's process, also one that an earlier supervisor started; returns when it is dead."""

    async def pool_changed(self) -> None:
        """Called when other drafters are available, on their fallback device, or retiring."""


class DrafterLoader:
    """Manages the drafters that are tenants of the budget; other drafters are always kept running."""

    def __init__(self, budget: MemoryBudget, min_residence_s: float, period_s: float = PERIOD_S) -> None:
        self._period_s = period_s
        self.models = ModelPool(budget.tenants, budget.limits, min_residence_s)
        self._published: tuple[object, ...] = ()
        self._evict: deque[str] = deque()  # decided, and not done yet
        self._load: deque[tuple[str, str]] = deque()

    def manages(self, name: str) -> bool:
        return name in self.models.num_loads

    def may_run(self, name: str) -> bool:
        return not self.manages(name) or name in self.models.resident

    def placed(self, name: str, config: DrafterConfig) -> DrafterConfig:
        """The drafter's configuration on the device it is loaded on: a CPU for one on its fallback."""
        return config.model_copy(update={"device": "cpu"}) if name in self.models.on_fallback else config

    async def run(self, processes: DrafterProcesses) -> None:
        """Evaluates the demand every period, for ever."""
        # An earlier supervisor may have left them running.
        self._evict.extend(name for name in self.models.num_loads if not self.may_run(name))
        while True:
            try:
                await self._carry_out(processes)
                if not self.models.is_settled:
                    await self._update(processes)
            except Exception:
                # Whatever failed, what is decided is done in a later period: without this task nothing would be.
                logger.exception("the supervisor loaded and evicted no drafters in this period: unexpected error")
            await asyncio.sleep(self._period_s)

    async def _carry_out(self, processes: DrafterProcesses) -> None:
        while self._evict:
            logger.info("the supervisor evicts %s from memory", self._evict[0])
            await processes.unload(self._evict[0])
            self._evict.popleft()
        while self._load:
            name, device = self._load[0]
            logger.info("the supervisor loads %s on %s", name, device)
            processes.load(name)
            self._load.popleft()

    async def _update(self, processes: DrafterProcesses) -> None:
        reports = await processes.reports()
        if any(report.status.state == SILENT for report in reports):
            return  # its requests are unknown, so no drafter counts as idle
        num_wanting, num_requests = Counter(dict(await processes.load_demand())), Counter[str]()
        for report in reports:
            num_wanting.update(report.named)
            num_requests.update({one.name: one.num_requests for one in report.drafters})
        demands = {name: LoadDemand(num_requests[name], num_wanting[name]) for name in self.models.num_loads}
        moves = self.models.update(demands, time.monotonic())
        self._evict.extend(moves.evict)
        self._load.extend(moves.load)
        await self._carry_out(processes)
        state = (self.models.retiring, self.models.offered(time.monotonic()), self.models.on_fallback)
        if moves or state != self._published:
            self._published = state
            await processes.pool_changed()
