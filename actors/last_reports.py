"""What targets reported last, so that no exported counter falls when one does not answer, leaves or is replaced.

Counts of drafters are exported as sums over targets. Without what a lost target had counted a sum would fall, and a rate in
Prometheus would show all that is left of it as new.
"""

from collections.abc import Mapping
from dataclasses import replace

from actors import health
from actors.drafter_loader import SILENT
from actors.processes import ManagedProcess, ProcessState
from actors.target import DrafterCounts, TargetReport
from cluster.client import TargetStatus
from cluster.config import SupervisionConfig
from cluster.drafting_counts import merged

# Shorter than the 2 s that callers of the status wait, so that a hung target is left out in time.
REPORT_DEADLINE_S = 1.0


class LastReports:
    """``ended``: counts of drafters by targets that have ended, by drafter."""

    def __init__(self) -> None:
        self._last: dict[str, TargetReport] = {}
        self._ended: dict[str, DrafterCounts] = {}

    @property
    def ended(self) -> Mapping[str, DrafterCounts]:
        return self._ended

    async def ask(self, member: ManagedProcess, supervision: SupervisionConfig) -> TargetReport:
        """What a target reports now; the last report of one that does not answer."""
        unknown = TargetReport(TargetStatus(member.name, member.state, 0, 0, 0, 0, 0.0, 0.0))
        process = member.process
        if process is None or member.state is not ProcessState.READY:
            return unknown
        report: TargetReport | None = await health.ask(process, supervision, "report", deadline_s=REPORT_DEADLINE_S)
        if report is None:
            last = self._last.get(member.name, unknown)
            return replace(last, status=replace(last.status, state=SILENT))
        if process is member.process:  # it may have ended meanwhile
            self._last[member.name] = report
        return report

    def counted(self, report: TargetReport) -> TargetReport:
        """With the counts of drafters that ``ended`` does not have: the target may have ended since it reported."""
        last = self._last.get(report.status.name)
        return replace(report, drafters=() if last is None else last.drafters)

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
