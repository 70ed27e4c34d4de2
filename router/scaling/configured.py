"""The scaler of a deployment: what its configuration and its targets' measured costs say of the fleet.

A replica costs what it reserves of the resource that targets use: GPUs, or CPUs where they have none.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.config import Config, DrafterConfig
from cluster.resolve import CONTROL_CPUS
from router.assignment import MemberCosts
from router.cost_model import ROWS, CostModel, TableCost, monotone
from router.plan import UNKNOWN_DRAFTER
from router.scaling.policy import FleetLimits, FleetScaler
from router.scaling.service_rates import CONTEXT_STEP, DrafterSize, Objectives, ServiceRates, TargetSize

LEAST_COST = 0.01  # of a drafter that reserves nothing of it, so that one that does not help ends


@dataclass(frozen=True, slots=True)
class CostTables:
    """A CostModel as plain tables, which a target sends to the supervisor. ``members``: of the measured drafters, by
    configured name."""

    step: TableCost
    prefill: TableCost
    members: Mapping[str, MemberCosts]

    @classmethod
    def of(cls, cost: CostModel, members: Mapping[str, MemberCosts]) -> "CostTables":
        per_context_s = (cost.step_s(1, CONTEXT_STEP) - cost.step_s(1, 0)) / CONTEXT_STEP
        step = monotone([(rows, cost.step_s(rows, 0)) for rows in ROWS], per_context_s)
        return cls(step, monotone([(rows, cost.prefill_s(rows, 0)) for rows in ROWS]), members)

    def step_s(self, num_rows: int, num_context: int) -> float:
        return self.step.step_s(num_rows, num_context)

    def prefill_s(self, num_rows: int, num_context: int) -> float:
        return self.prefill.step_s(num_rows, num_context)

    def table(self, num_context: int) -> TableCost:
        return self.step.table(num_context)

    def draft_s(self, drafter: str, batch: int, draft_len: int) -> float | None:
        """Of its longest draft, whatever ``draft_len``."""
        costs = self.members.get(drafter)
        return None if costs is None else monotone(costs.draft_s).at(batch)

    def catch_up_s(self, drafter: str, num_tokens: int) -> float | None:
        costs = self.members.get(drafter)
        return None if costs is None else num_tokens * costs.catch_up_s


def fleet_scaler(config: Config, cost: CostModel, kv_tokens: int, resources: Mapping[str, float]) -> FleetScaler:
    """Args:
    config: resolved, with `scaling.policy` outrider.
    kv_tokens: of one target's KV cache.
    resources: as of ``fleet_limits``.
    """
    target, ttft_ms, tpot_ms = config.target, *config.scaling_objectives()
    costs = _drafter_costs(config)
    sizes = {
        drafter.name: _drafter_size(drafter, costs[drafter.name], target.most * target.max_num_sequences)
        for drafter in config.drafters
        if drafter.scales
    }
    rates = ServiceRates(cost, TargetSize(_target_cost(config), target.max_num_sequences, kv_tokens), sizes)
    objectives = Objectives(ttft_ms / 1e3, tpot_ms / 1e3)
    limits = fleet_limits(config, resources)
    return FleetScaler(rates, objectives, limits, config.scaling.target_start_s)


def fleet_limits(config: Config, resources: Mapping[str, float]) -> FleetLimits:
    """Args:
    resources: CPU and GPU of all machines, by Ray's names. Only read where `scaling.hardware` is fixed.
    """
    target, on_gpus = config.target, _is_on_gpus(config)
    scaling = [drafter for drafter in config.drafters if drafter.scales]
    others = [drafter for drafter in config.drafters if not drafter.scales and not drafter.is_colocated]
    target_cost, costs = _target_cost(config), _drafter_costs(config)
    most = target.most * target_cost + sum(drafter.most * costs[drafter.name] for drafter in scaling)
    reserved = 0.0
    if config.scaling.hardware == "fixed":
        used = sum(drafter.replicas * drafter.resources.reserved[on_gpus] for drafter in others)
        left = resources.get("GPU", 0.0) if on_gpus else resources.get("CPU", 0.0) - CONTROL_CPUS
        most = reserved = max(target_cost, min(most, left - used))
    return FleetLimits(
        max_gpus=most,
        min_targets=target.least,
        num_reserved_gpus=reserved,
        max_targets=target.most,
        min_drafters={drafter.name: drafter.least for drafter in scaling},
        max_drafters={drafter.name: drafter.most for drafter in scaling},
    )


def _is_on_gpus(config: Config) -> bool:
    return config.target.resources.reserved[1] > 0.0


def _target_cost(config: Config) -> float:
    return max(LEAST_COST, config.target.tensor_parallel * config.target.resources.reserved[_is_on_gpus(config)])


def _drafter_costs(config: Config) -> dict[str, float]:
    on_gpus = _is_on_gpus(config)
    return {one.name: max(LEAST_COST, one.resources.reserved[on_gpus]) for one in config.drafters if one.scales}


def _drafter_size(drafter: DrafterConfig, cost: float, max_requests: int) -> DrafterSize:
    """``max_requests``: that the largest fleet runs at once."""
    capacity = min(drafter.capacity, max_requests)
    return DrafterSize(cost, capacity, UNKNOWN_DRAFTER.acceptance, drafter.max_draft_len)
