"""The cluster's status for users, from the supervisor's processes and the targets' reports."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from actors.autoscaler import ScaleLog
from actors.processes import ManagedProcess, ProcessState
from actors.router import RouterReport
from actors.target import DrafterCounts, TargetReport
from cluster.client import ChainStatus, ClusterStatus, DrafterStatus
from cluster.config import Config, DrafterConfig
from cluster.drafting_counts import merged
from router.residency import ModelPool


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
