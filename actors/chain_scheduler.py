"""The router of the policy `chain`: it hears what happens within chains, too, and publishes chains of several models."""

from collections.abc import Sequence

from actors.router import Router, RouterActor
from actors.target import SlotReport
from cluster.types import RoutingTable
from router.assignment import PoolMember
from router.chains import PassTime
from router.drift import CollapseWatch
from router.policies.chain import ModelChains


class ChainScheduler(Router):
    """One slot's decision, as `Router`. Plain: reports in, a table out."""

    def __init__(
        self,
        policy: ModelChains,
        pool: Sequence[PoolMember],
        max_draft_len: int,
        watch: CollapseWatch | None = None,
    ) -> None:
        super().__init__(policy, pool, max_draft_len, watch, scores=True)
        self._chains = policy

    def slot(self, reports: Sequence[SlotReport]) -> RoutingTable | None:
        levels = [level for report in reports for level in report.levels]
        passes = next((report.target_passes for report in reports if report.target_passes), ())
        if reports:
            self._chains.learn(levels, PassTime(passes) if passes else None)
        return super().slot(reports)


class ModelChainScheduler(RouterActor):
    """Runs a ChainScheduler against the targets. Like a router it may die at any time: the last table serves on."""
