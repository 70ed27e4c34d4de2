"""The router as the simulator sees it: the code of the live one, told every slot what simulated targets would report."""

from collections.abc import Callable, Mapping, Sequence

from cluster.messages import LevelReport
from cluster.types import RoutingTable
from router.assignment import ScoreCounts, drafter_of
from router.slot import Router, SlotReport
from simulator.sequence import SlotCounts
from simulator.target import SimulatedTarget


class SimulatedRouter:
    """A decision takes no time.

    Args:
        draft_lens: of every member of the pool, its longest draft.
        levels: what happened within chains since it was last asked.
        target_passes: what passes of a target are believed to take, with so much context, as of PassTime.
        seen: is told of every slot: when it was, and how many tokens the targets had committed then.
    """

    def __init__(
        self,
        router: Router,
        draft_lens: Mapping[str, int],
        levels: Callable[[], Sequence[LevelReport]],
        target_passes: Callable[[int], tuple[tuple[int, float], ...]],
        seen: Callable[[float, int], None] | None = None,
    ) -> None:
        self._router = router
        self._draft_lens = draft_lens
        self._targets: Sequence[SimulatedTarget] = ()
        self._levels = levels
        self._target_passes = target_passes
        self._seen = seen
        self._table = router.first_table()
        self._next_bases: dict[tuple[str, str], int] = {}  # of (request, drafter): where its next virtual round begins
        self.num_slots = 0

    @property
    def table(self) -> RoutingTable:
        return self._table

    def serve(self, targets: Sequence[SimulatedTarget]) -> None:
        self._targets = targets

    def slot(self, now_s: float) -> None:
        self.num_slots += 1
        if self._seen is not None:
            self._seen(now_s, sum(target.num_committed for target in self._targets))
        # What happened within chains is told once; of passes the first target speaks for all.
        levels = tuple(self._levels())
        reports = []
        for number, target in enumerate(self._targets):
            reports.append(self._report(target, () if number else levels, with_passes=not number))
        live = {request.request_id for report in reports for request in report.requests}
        self._next_bases = {key: base for key, base in self._next_bases.items() if key[0] in live}
        table = self._router.slot(reports)
        if table is not None:
            self._table = table
            for target in self._targets:
                target.publish(table)

    def _report(self, target: SimulatedTarget, levels: tuple[LevelReport, ...], with_passes: bool) -> SlotReport:
        slots, requests = target.take_slots(), tuple(target.requests())
        num_context = sum(request.committed_len for request in requests)
        return SlotReport(
            requests,
            tuple(slot.observation(drafter) for (_, drafter), slot in slots.items()),
            target.table.version,
            tuple(self._draft_lens),
            scores=tuple(self._scored(slots)),
            levels=levels,
            target_passes=self._target_passes(num_context) if with_passes else (),
        )

    def _scored(self, slots: Mapping[tuple[str, str], SlotCounts]) -> list[ScoreCounts]:
        """The virtual rounds of each scorer, as `drafters.counterfactual` defines them: each begins where the one before it
        would have ended, whoever drove the request."""
        scores = []
        scorers = [(drafter_of(name), self._draft_lens[name]) for name in self._table.scorers]
        for (request_id, drafter), slot in slots.items():
            if not slot.bases:
                continue
            first, last = slot.bases[0], slot.bases[-1]
            for other, draft_len in scorers:
                if other != drafter_of(drafter):
                    key = request_id, other
                    agreement = slot.request.answer.of(other)
                    start = max(first, self._next_bases.get(key, 0))
                    bases, self._next_bases[key] = agreement.rounds(start, last, draft_len)
                    if bases:
                        scores.append(ScoreCounts(request_id, other, agreement.positions(bases, draft_len)))
        return scores
