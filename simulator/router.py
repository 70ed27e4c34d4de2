"""The router of a simulated cluster: the live slot, told what the live loops of the targets report."""

from collections.abc import Callable, Sequence

from cluster.types import RoutingTable
from router.drafter.router import Router, SlotReport
from simulator.target import SimulatedTarget


class SimulatedRouter:
    """A decision takes no time.

    Args:
        names: of all drafters, which are always linked.
        target_passes: what passes of a target are believed to take, with so much context, as of SlotReport.
    """

    def __init__(
        self, router: Router, names: Sequence[str], target_passes: Callable[[int], tuple[tuple[int, float], ...]]
    ) -> None:
        self.first_table: RoutingTable = router.first_table()
        self._router = router
        self._names = tuple(names)
        self._target_passes = target_passes

    def slot(self, targets: Sequence[SimulatedTarget]) -> None:
        # Of the times of passes the first target speaks for all.
        reports = [self._report(target, with_passes=not number) for number, target in enumerate(targets)]
        table = self._router.slot(reports)
        if table is None:
            return
        for target in targets:
            target.loop.publish_table(table)

    def _report(self, target: SimulatedTarget, with_passes: bool) -> SlotReport:
        loop = target.loop
        requests = loop.requests()
        num_context = sum(request.committed_len for request in requests)
        return SlotReport(
            requests,
            loop.telemetry.take_observations(),
            loop.status().table_version,
            self._names,
            scores=loop.telemetry.take_scores(),
            levels=loop.telemetry.take_levels(),
            target_passes=self._target_passes(num_context) if with_passes else (),
        )
