"""Predicted memory of each drafter and the memory limits of its devices: the tenants of a `ModelPool`."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from cluster.config import Config
from cluster.errors import ModelUnavailable
from cluster.placement import Bundle, PlacementPlan, drafter_name, target_name
from cluster.resolve import Inventory
from drafters.footprint import Footprint, footprint, target_footprint
from router.assignment import member_name
from router.residency import GB, Stay, Tenant, check_fits

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


def memory_budget(config: Config, plan: PlacementPlan, inventory: Inventory) -> MemoryBudget:
    """Of a placed configuration; drafters whose files are elsewhere count as 0. Raises InvalidField if one does not fit."""
    tenants = tuple(_tenants(config, plan))
    limits = _limits(config, plan, inventory)
    check_fits(tenants, limits)
    return MemoryBudget(tenants, limits)


def _tenants(config: Config, plan: PlacementPlan) -> Iterable[Tenant]:
    for drafter in config.drafters:
        if drafter.is_colocated or drafter.scales:  # the latter are placed by their resources alone
            continue
        bundles = plan.group(drafter_name(drafter.name)).bundles
        on_gpu = drafter.device == "cuda"
        assert config.model.max_model_len != "auto", "the deployment has resolved it"
        more = (config.model.max_model_len, config.proposers_of(drafter.name), config.model.name)
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
