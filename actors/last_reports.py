"""What targets reported last, so that no exported counter falls when one does not answer, leaves or is replaced.

Counts of drafters are exported as sums over targets. Without what a lost target had counted a sum would fall, and a rate in
Prometheus would show all that is left of it as new.
"""

from collections.abc import Mapping
from dataclasses import replace

from actors.drafter_loader import SILENT
from actors.target import DrafterCounts, TargetReport
from cluster.drafting_counts import merged


class LastReports:
    """``ended``: counts of drafters by targets that have ended, by drafter."""

    def __init__(self) -> None:
        self._last: dict[str, TargetReport] = {}
        self._ended: dict[str, DrafterCounts] = {}

    @property
    def ended(self) -> Mapping[str, DrafterCounts]:
        return self._ended

    def note(self, report: TargetReport) -> None:
        self._last[report.status.name] = report

    def counted(self, report: TargetReport) -> TargetReport:
        """With the counts of drafters that ``ended`` does not have: the target may have ended since it reported."""
        last = self._last.get(report.status.name)
        return replace(report, drafters=() if last is None else last.drafters)

    def of_silent(self, unknown: TargetReport) -> TargetReport:
        """Of a target that does not answer. ``unknown``: if it never has."""
        last = self._last.get(unknown.status.name, unknown)
        return replace(last, status=replace(last.status, state=SILENT))

    def end(self, target: str) -> None:
        """The process of a target has ended."""
        last = self._last.pop(target, None)
        for one in last.drafters if last is not None else ():
            before = self._ended.get(one.name)
            self._ended[one.name] = _over(one) if before is None else _over(one, before)


def _over(*counts: DrafterCounts) -> DrafterCounts:
    """Sums of what only rises."""
    return DrafterCounts(
        counts[0].name,
        num_requests=0,
        num_proposed=sum(one.num_proposed for one in counts),
        num_accepted=sum(one.num_accepted for one in counts),
        reply_s=None,
        num_unsound=sum(one.num_unsound for one in counts),
        drafts=replace(merged([one.drafts for one in counts]), acceptance=None),
    )
