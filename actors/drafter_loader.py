"""The memory of drafters: predicted for each, with the limits of devices, as tenants of a `ModelPool`; and the loads and
evictions that it decides."""

import asyncio
import logging
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from actors.target import TargetReport
from cluster.config import Config, DrafterConfig
from cluster.errors import ModelUnavailable
from cluster.placement import Bundle, PlacementPlan, drafter_name, target_name
from cluster.resolve import Inventory
from drafters.footprint import Footprint, footprint, target_footprint
from router.assignment import member_name
from router.residency import GB, LoadDemand, ModelPool, Stay, Tenant, check_fits

logger = logging.getLogger(__name__)

RESERVE = 0.1  # share of a device that is left free: fragmentation, running passes
CONTROL_BYTES = 1 * GB  # API, router, supervisor and Ray, counted on each machine
# Rough reload costs, for comparing drafters: starting a process with torch, and reading its files.
START_S = 3.0
READ_BYTES_PER_S = 1e9


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """``limits``: bytes by device; a missing device has no known limit."""

    tenants: tuple[Tenant, ...] = ()
    limits: dict[str, int] = field(default_factory=dict)


def memory_budget(config: Config, plan: PlacementPlan, inventory: Inventory, most_tokens: float = math.inf) -> MemoryBudget:
    """Of a placed configuration; drafters whose files are elsewhere count as 0. ``most_tokens``: of all requests that run at
    once. Raises InvalidField if one does not fit."""
    tenants = tuple(_tenants(config, plan, most_tokens))
    limits = _limits(config, plan, inventory)
    check_fits(tenants, limits)
    return MemoryBudget(tenants, limits)


def _tenants(config: Config, plan: PlacementPlan, most_tokens: float) -> Iterable[Tenant]:
    for drafter in config.drafters:
        if drafter.is_colocated or drafter.scales:  # the latter are placed by their resources alone
            continue
        bundles = plan.group(drafter_name(drafter.name)).bundles
        on_gpu = drafter.device == "cuda"
        assert config.model.max_model_len != "auto", "the deployment has resolved it"
        more = (config.model.max_model_len, config.proposers_of(drafter.name), config.model.name, most_tokens)
        size = _known(drafter.name, footprint, drafter, str(drafter.device), *more)
        slow = _known(drafter.name, footprint, drafter, "cpu", *more) if on_gpu else Footprint()
        # Evicting a drafter without a model would free almost nothing.
        stay = Stay.PINNED if drafter.load == "start" and not drafter.has_model else Stay(drafter.load)
        for replica, bundle in enumerate(bundles):
            yield Tenant(
                name=member_name(drafter.name, replica),
                device=_gpu(bundle) if on_gpu else _cpu(bundle.node),
                num_bytes=size.total,
                stay=stay,
                fallback=_cpu(bundle.node) if on_gpu else None,
                fallback_bytes=slow.total,
                reload_s=START_S + size.stored_bytes / READ_BYTES_PER_S,
            )


def _known(name: str, predict: Callable[..., Footprint], *args: Any) -> Footprint:
    try:
        return predict(*args)
    except ModelUnavailable as missing:
        logger.warning("the memory of %s is unknown: %s", name, missing)
        return Footprint()


def _limits(config: Config, plan: PlacementPlan, inventory: Inventory) -> dict[str, int]:
    limits = {}
    for node in inventory.nodes:
        if config.memory.cpu_gb is not None:
            limits[_cpu(node.name)] = int(config.memory.cpu_gb * GB)
        elif node.memory_bytes is not None:
            targets = _target_bytes(config, plan, node.name)
            limits[_cpu(node.name)] = max(0, int(node.memory_bytes * (1 - RESERVE)) - targets - CONTROL_BYTES)
    gpu_bytes = {node.name: node.gpu_bytes for node in inventory.nodes}
    shares: dict[str, float] = defaultdict(float)  # of GPUs, that targets have
    for bundle in (bundle for i in range(config.target.replicas) for bundle in plan.group(target_name(i)).bundles):
        shares[_gpu(bundle)] += bundle.gpus
    for bundle in (bundle for group in plan.groups for bundle in group.bundles if bundle.gpu is not None):
        if config.memory.gpu_gb is not None:
            limits[_gpu(bundle)] = int(config.memory.gpu_gb * GB)
        elif (own := gpu_bytes.get(bundle.node)) is not None:
            limits[_gpu(bundle)] = int(own * (1 - RESERVE) * max(0.0, 1 - shares[_gpu(bundle)]))
    return limits


def _target_bytes(config: Config, plan: PlacementPlan, node: str) -> int:
    """Memory of the targets on a machine's CPUs."""
    if config.target.device != "cpu":
        return 0
    replicas = [plan.group(target_name(replica)) for replica in range(config.target.replicas)]
    num_here = sum(bundle.node == node for group in replicas for bundle in group.bundles)
    num_ranks = config.target.tensor_parallel if config.target.engine == "vllm" else 1  # of one bundle
    return num_here * num_ranks * _known("the target", target_footprint, config).total


def _cpu(node: str) -> str:
    return f"{node}/cpu"


def _gpu(bundle: Bundle) -> str:
    return f"{bundle.node}/gpu-{bundle.gpu}"


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
