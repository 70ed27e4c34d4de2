"""One slot of a router: the targets' reports in, a routing table out."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from cluster.messages import LevelReport
from cluster.types import RoutingTable
from router.assignment import (
    TARGET_ONLY,
    AssignmentPolicy,
    Chain,
    Levels,
    MemberCosts,
    Observation,
    PoolMember,
    RequestView,
    ScoreCounts,
    Scored,
    drafter_of,
    nobody,
)
from router.cost_model import monotone
from router.drafter.seats import reseat_absent
from router.estimates.drift import DriftDetector

# Cost of a draft token on a CPU over one on a GPU, until rounds tell: GPU memory is so much faster.
FALLBACK_COST = 20.0
# Stands for the next request: its chain is the table's default.
NEXT_REQUEST = RequestView("\0next", 0, 0, TARGET_ONLY)


@dataclass(frozen=True, slots=True)
class SlotReport:
    """What the router learns of a target in a slot."""

    requests: tuple[RequestView, ...]
    observations: tuple[Observation, ...]
    table_version: int
    drafters: tuple[str, ...]  # linked now
    draft_costs: Mapping[str, float] = field(default_factory=dict)  # as of PoolMember, of drafters measured here
    member_costs: Mapping[str, MemberCosts] = field(default_factory=dict)  # of the same
    scores: tuple[ScoreCounts, ...] = ()  # counterfactual, of drafters in step with requests that others drafted for
    levels: tuple[LevelReport, ...] = ()  # of models in chains
    target_passes: tuple[tuple[int, float], ...] = ()  # (rows, seconds), ascending; (): not measured


SLOT_S = 0.25  # between slots: how often requests may change drafters


class Router:
    """Decides a slot; no Ray, no clock.

    - A drafter is healthy when every reporting target is linked with it.
    - With a ``watch``, a drafter whose acceptance collapses is quarantined.
    - The ``scored`` drafters keep in step with requests that others draft for (SPIN's fast switching), and are scored.
    - An offered drafter is not loaded, but could be: ``load_demand`` counts the requests that would use it.
    """

    def __init__(
        self,
        policy: AssignmentPolicy,
        pool: Sequence[PoolMember],
        watch: DriftDetector | None = None,
        scored: Scored = nobody,
    ) -> None:
        self.policy = policy
        self._scored = scored
        self._watch = watch
        self._pool = tuple(pool)
        self._known = frozenset(drafter_of(member.name) for member in self._pool)  # reports on others are ignored
        self._table = RoutingTable(version=0)
        self._draining: frozenset[str] = frozenset()
        self._offered: frozenset[str] = frozenset()
        self._on_fallback: frozenset[str] = frozenset()
        self.load_demand: Mapping[str, int] = {}  # of the last slot

    def use(self, policy: AssignmentPolicy, scored: Scored) -> None:
        """Another policy from the next slot on."""
        self.policy, self._scored = policy, scored

    def set_draining(self, names: frozenset[str]) -> None:
        self._draining = names

    def set_offered(self, names: frozenset[str], on_fallback: frozenset[str]) -> None:
        """``names`` are not loaded, but could be; those ``on_fallback`` draft on a CPU instead of a GPU."""
        self._offered, self._on_fallback = names, on_fallback

    def first_table(self) -> RoutingTable:
        """Before any target has reported: defaults for the pool as it is configured."""
        chain = self.policy.assign([NEXT_REQUEST], self._pool)[NEXT_REQUEST.request_id]
        self._table = RoutingTable(1, {}, (chain,), self._scorers(self._pool, 0))
        return self._table

    def slot(self, reports: Sequence[SlotReport]) -> RoutingTable | None:
        """The table of the next slot; None: the targets have it already."""
        if not reports:
            return None
        known = self._known
        observations = [one for report in reports for one in report.observations if drafter_of(one.drafter) in known]
        scores = [one for report in reports for one in report.scores if drafter_of(one.drafter) in known]
        if self._watch is not None:
            self._watch.observe(observations)
        levels = [level for report in reports for level in report.levels if self._is_of_the_pool(level)]
        passes = next((report.target_passes for report in reports if report.target_passes), ())
        self.policy.observe(observations, scores, Levels(levels, monotone(passes) if passes else None))
        # One that has just joined has neither requests nor links yet.
        settled = [report for report in reports if report.requests or report.drafters] or reports
        linked = set[str].intersection(*(set(report.drafters) for report in settled))
        absent = self._offered - linked
        pool = self._judged_pool(reports, linked | absent)
        requests = [request for report in reports for request in report.requests]
        every = [*(request for request in requests if not request.opted_out), NEXT_REQUEST]
        chains, self.load_demand = reseat_absent(self.policy.assign(every, pool), every, pool, absent)
        chains |= {request.request_id: TARGET_ONLY for request in requests if request.opted_out}
        scorers = self._scorers([member for member in pool if member.name not in absent], len(every) - 1)
        versions, default = [report.table_version for report in reports], chains[NEXT_REQUEST.request_id]
        former = self._table
        self._table = next_table(former, requests, chains, (default,), versions, scorers)
        return None if self._table is former else self._table

    def _is_of_the_pool(self, level: LevelReport) -> bool:
        return self._known.issuperset((level.drafter, *(verified.proposer for verified in level.verified)))

    def _scorers(self, pool: Sequence[PoolMember], num_requests: int) -> tuple[str, ...]:
        """One member of each scored drafter. Colocated drafters have no spare time to be in step."""
        scored = reversed(self._scored(pool, num_requests))
        members = {drafter_of(member.name): member.name for member in scored if member.is_open and member.leads}
        return tuple(sorted(members.values()))

    def _judged_pool(self, reports: Sequence[SlotReport], there: Set[str]) -> list[PoolMember]:
        """The pool with its present health and costs. A drafter's measured costs do not hold on its fallback."""
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


MAX_CHAINS = 16_384


def next_table(
    previous: RoutingTable,
    requests: Sequence[RequestView],
    chains: Mapping[str, Chain],
    defaults: Sequence[Chain],
    versions: Sequence[int],
    scorers: Sequence[str] = (),
) -> RoutingTable:
    """The table of the next slot: ``chains`` of the live ``requests``, ``defaults`` for those not seen yet. Of more than
    MAX_CHAINS it keeps those whose chain changes first: a request that is missing from a table keeps its chain.

    Returns ``previous`` itself if nothing changed and all targets have it by ``versions``. Else the version is above all of
    theirs, so that they take the table of a restarted router. A ``previous`` of version 0 was never published.
    """
    live = {request.request_id: chains[request.request_id] for request in requests if request.request_id in chains}
    if len(live) > MAX_CHAINS:
        moving = [request for request in requests if live.get(request.request_id, request.chain) != request.chain]
        kept = dict.fromkeys([*(r.request_id for r in moving), *live])
        live = {request_id: live[request_id] for request_id in list(kept)[:MAX_CHAINS]}
    table = RoutingTable(previous.version, live, tuple(defaults) or ((),), tuple(scorers))
    if previous.version > 0 and table == previous and all(version == previous.version for version in versions):
        return previous
    return replace(table, version=max(previous.version, *versions) + 1)
