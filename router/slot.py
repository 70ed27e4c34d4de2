"""A router's slot: reports of targets in, a table out. The code of the live router and of the simulator's."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from cluster.messages import LevelReport
from cluster.types import RoutingTable
from router.assignment import (
    TARGET_ONLY,
    AssignmentPolicy,
    MemberCosts,
    Observation,
    PoolMember,
    RequestView,
    ScoreCounts,
    drafter_of,
)
from router.chains import PassTime
from router.estimates.drift import DriftDetector
from router.load_demand import settle
from router.policies.chain import ModelChains
from router.table import next_table

# Of a draft token on a CPU over one on a GPU, until rounds tell: the memory of the one is read so much faster.
FALLBACK_COST = 20.0
# Stands for whatever request comes next: what the policy would choose for it is the default of the table.
NEXT_REQUEST = RequestView("\0next", 0, 0, TARGET_ONLY)


@dataclass(frozen=True, slots=True)
class SlotReport:
    """What the router learns of a target in a slot."""

    requests: tuple[RequestView, ...]
    observations: tuple[Observation, ...]
    table_version: int
    drafters: tuple[str, ...]  # that are linked now
    draft_costs: Mapping[str, float] = field(default_factory=dict)  # as of PoolMember, of those that were measured here
    member_costs: Mapping[str, MemberCosts] = field(default_factory=dict)  # of the same
    scores: tuple[ScoreCounts, ...] = ()  # of drafters in step with requests that others drafted for
    levels: tuple[LevelReport, ...] = ()  # what models in chains did
    target_passes: tuple[tuple[int, float], ...] = ()  # (rows, seconds), ascending, as measured here; (): not known


class Router:
    """One slot's decision: no Ray, no clock.

    A drafter is healthy when every target that reports is linked with it. It costs what a target's profile says, else what
    the pool does. One whose acceptance collapses is quarantined, where there is a ``watch``. One that is offered, for it
    could be loaded, may be wished for: ``load_demand`` is how many requests would be with it.
    """

    def __init__(
        self,
        policy: AssignmentPolicy,
        pool: Sequence[PoolMember],
        watch: DriftDetector | None = None,
        scores: bool = False,
    ) -> None:
        self._policy = policy
        self._scores = scores
        self._watch = watch
        self._pool = tuple(pool)
        self._known = frozenset(drafter_of(member.name) for member in self._pool)  # of others nothing is learned
        self._table = RoutingTable(version=0)
        self._draining: frozenset[str] = frozenset()
        self._offered: frozenset[str] = frozenset()
        self._on_fallback: frozenset[str] = frozenset()
        self.load_demand: Mapping[str, int] = {}  # of the last slot

    @property
    def policy(self) -> AssignmentPolicy:
        return self._policy

    def set_draining(self, names: frozenset[str]) -> None:
        self._draining = names

    def set_offered(self, names: frozenset[str], on_fallback: frozenset[str]) -> None:
        """``names`` are not in memory, and may be wished for; those ``on_fallback`` draft on a CPU in the place of a GPU."""
        self._offered, self._on_fallback = names, on_fallback

    def first_table(self) -> RoutingTable:
        """Before any target has reported: for requests to come, with the pool as it is configured."""
        chain = self._policy.assign([NEXT_REQUEST], self._pool)[NEXT_REQUEST.request_id]
        defaults, scorers = (chain,), self._scorers(self._pool)
        self._table = RoutingTable(1, {}, defaults, scorers)
        return self._table

    def slot(self, reports: Sequence[SlotReport]) -> RoutingTable | None:
        """The table for the slot that follows, or None: the targets have it already.

        Its version is above any that a target has, so that a router that was restarted is heard.
        """
        if not reports:
            return None
        observations = [seen for report in reports for seen in report.observations]
        scores = [score for report in reports for score in report.scores if drafter_of(score.drafter) in self._known]
        if self._watch is not None:
            self._watch.observe(observations)
        self._policy.observe(observations, scores)
        linked = set[str].intersection(*(set(report.drafters) for report in reports))
        absent = self._offered - linked
        pool = self._judged_pool(reports, linked | absent)
        requests = [request for report in reports for request in report.requests]
        every = [*requests, NEXT_REQUEST]
        chains, self.load_demand = settle(self._policy.assign(every, pool), every, pool, absent)
        pool = [member for member in pool if member.name not in absent]
        versions = [report.table_version for report in reports]
        defaults = (chains[NEXT_REQUEST.request_id],)
        table = next_table(self._table, requests, chains, defaults, versions, self._scorers(pool))
        if table is self._table:
            return None
        self._table = table
        return table

    def _scorers(self, pool: Sequence[PoolMember]) -> tuple[str, ...]:
        """One member of each drafter, where the policy learns from scores; those in the target's own process have no time
        to spare."""
        if not self._scores:
            return ()
        members = {drafter_of(member.name): member.name for member in reversed(pool) if member.is_open and member.leads}
        return tuple(sorted(members.values()))

    def _judged_pool(self, reports: Sequence[SlotReport], there: Set[str]) -> list[PoolMember]:
        """As it is now, for the targets that report. What was measured of a drafter does not hold on its fallback."""
        shares = {name: cost for report in reports for name, cost in report.draft_costs.items()}
        costs = {name: cost for report in reports for name, cost in report.member_costs.items()}
        pool = [
            replace(
                member,
                healthy=member.name in there,
                draining=member.name in self._draining,
                cost=shares.get(drafter_of(member.name), member.cost),
                costs=costs.get(drafter_of(member.name), member.costs),
                num_targets=1 if member.leads else len(reports),
            )
            for member in self._pool
        ]
        pool = [
            replace(member, cost=FALLBACK_COST * member.cost, costs=None) if member.name in self._on_fallback else member
            for member in pool
        ]
        return pool if self._watch is None else [self._watch.judge(member) for member in pool]


class ChainScheduler(Router):
    """A router whose policy assigns chains, and is told what happened within them."""

    def __init__(
        self,
        policy: ModelChains,
        pool: Sequence[PoolMember],
        watch: DriftDetector | None = None,
        scores: bool = False,
    ) -> None:
        super().__init__(policy, pool, watch, scores)
        self._chains = policy

    def slot(self, reports: Sequence[SlotReport]) -> RoutingTable | None:
        levels = [level for report in reports for level in report.levels if self._is_of_the_pool(level)]
        passes = next((report.target_passes for report in reports if report.target_passes), ())
        if reports:
            self._chains.learn(levels, PassTime(passes) if passes else None)
        return super().slot(reports)

    def _is_of_the_pool(self, level: LevelReport) -> bool:
        return self._known.issuperset((level.drafter, *(verified.proposer for verified in level.verified)))


def build_router(
    policy: AssignmentPolicy,
    pool: Sequence[PoolMember],
    watch: DriftDetector | None = None,
    scores: bool = False,
) -> Router:
    """Of the kind that the policy needs."""
    if isinstance(policy, ModelChains):
        return ChainScheduler(policy, pool, watch, scores)
    return Router(policy, pool, watch, scores)
