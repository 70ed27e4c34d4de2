"""The cluster's status for users, from the supervisor's processes and the targets' reports."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from actors import health
from actors.autoscaler import ScaleLog
from actors.drafter_loader import SILENT
from actors.processes import ManagedProcess, ProcessState
from actors.router import RouterReport
from actors.target import DrafterCounts, TargetReport
from cluster.client import ChainStatus, ClusterStatus, DrafterStatus, TargetStatus
from cluster.config import Config, DrafterConfig, SupervisionConfig
from cluster.counts import merged
from router.residency import ModelPool

# Shorter than the 2 s that callers of the status wait, so that a hung target is left out in time.
REPORT_DEADLINE_S = 1.0


def cluster_status(
    config: Config,
    model: str,
    reports: Sequence[TargetReport],
    ended: Mapping[str, DrafterCounts],
    drafters: Mapping[str, DrafterConfig],
    members: Mapping[str, ManagedProcess],
    models: ModelPool,
    draining: Set[str],
    router: RouterReport | None = None,
    chains: Sequence[ChainStatus] | None = None,
    scaled: ScaleLog | None = None,
) -> ClusterStatus:
    """Args:
    ended: what targets that have ended had counted of drafters, by drafter.
    drafters: every member of the pool, by name.
    members: the members that have a process of their own.
    router, chains: None: it does not answer.
    """
    leaving, statuses = draining | models.retiring, []
    for name, drafter in drafters.items():
        counts = [one for report in reports for one in report.drafters if one.name == name]
        past = ended.get(name)
        statuses.append(_drafter(config, name, drafter, members.get(name), counts, past, models, name in leaving))
    return ClusterStatus(
        model=model,
        policy=router.policy if router is not None else config.router.policy.kind,
        table_version=max((report.table_version for report in reports), default=0),
        targets=tuple(
            replace(one, state=ProcessState.DRAINING) if one.state == ProcessState.READY and one.name in draining else one
            for one in (report.status for report in reports)
        ),
        drafters=tuple(statuses),
        planned_by=_planned_by(config),
        notes=router.notes if router is not None else (),
        trial_left_s=router.trial_left_s if router is not None else None,
        chains=tuple(chains or ()),
        scale_events=scaled.events if scaled is not None else (),
        scale_counts=scaled.counts if scaled is not None else (),
    )


def _planned_by(config: Config) -> tuple[str, ...]:
    planner, target = config.planner, config.target
    deep = (("early exit", target.early_exit), ("partition", target.partition if target.can_divide else "off"))
    asked = (f"{what} {value}" for what, value in deep if value != "off")
    return (f"length {planner.draft_length.kind}", f"verify {planner.verify}", f"overlap {planner.overlap}", *asked)


def _drafter(
    config: Config,
    name: str,
    drafter: DrafterConfig,
    member: ManagedProcess | None,
    counts: Sequence[DrafterCounts],
    past: DrafterCounts | None,
    models: ModelPool,
    leaves: bool,
) -> DrafterStatus:
    state = member.state if member is not None else ProcessState.READY if counts else ProcessState.STARTING
    replies = [one.reply_s for one in counts if one.reply_s is not None]
    everything = [*counts, past] if past is not None else counts
    return DrafterStatus(
        name=name,
        kind=drafter.options.kind,
        state=ProcessState.DRAINING if leaves and state is ProcessState.READY else state,
        num_requests=sum(one.num_requests for one in counts),
        num_proposed=sum(one.num_proposed for one in everything),
        num_accepted=sum(one.num_accepted for one in everything),
        reply_ms=1e3 * sum(replies) / len(replies) if replies else None,
        num_restarts=member.restarts.num_restarts if member is not None else 0,
        reason=member.reason if member is not None and state is not ProcessState.READY else None,
        verifies=drafter.options.traits.can_verify,
        proposers=tuple(one.name for one in config.proposers_of(drafter.name)),
        device=models.resident.get(name),
        num_bytes=models.bytes_of(name) if name in models.num_loads else None,
        num_loads=models.num_loads.get(name, 0),
        num_evictions=models.num_evictions.get(name, 0),
        num_fallbacks=models.num_fallbacks.get(name, 0),
        num_unsound=sum(one.num_unsound for one in everything),
        counts=merged([one.drafts for one in everything]),
        num_cpus=drafter.resources.reserved[0],
        num_gpus=drafter.resources.reserved[1],
    )


class LastReports:
    """What targets reported last, so that no exported counter falls when a target does not answer, leaves or is replaced:
    counts of drafters are exported as sums over targets, and Prometheus takes what is left of a sum that fell for new.

    ``ended``: counts of drafters by targets that have ended, by drafter.
    """

    def __init__(self) -> None:
        self._last: dict[str, TargetReport] = {}
        self._ended: dict[str, DrafterCounts] = {}

    @property
    def ended(self) -> Mapping[str, DrafterCounts]:
        return self._ended

    async def ask(self, member: ManagedProcess, supervision: SupervisionConfig) -> TargetReport:
        """What a target reports now; the last report of one that does not answer."""
        unknown = TargetReport(TargetStatus(member.name, member.state, 0, 0, 0, 0, 0.0, 0.0))
        if (process := member.ready) is None:
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
