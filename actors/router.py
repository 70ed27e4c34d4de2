"""Decides, every slot, who rides ahead of whom, and publishes that. Off the data path: without it the last table serves."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from actors.router_memory import RouterMemory
from actors.target import SlotReport
from actors.worker import LoopActor, LoopThread
from cluster.config import Config
from cluster.state import open_store
from cluster.types import RoutingTable
from router.assignment import TARGET_ONLY, AssignmentPolicy, PoolMember, RequestView, drafter_of
from router.drift import CollapseWatch
from router.table import next_table

# Stands for whatever request comes next: what the policy would choose for it is the default of the table.
NEXT_REQUEST = "\0next"


class Router:
    """One slot's decision. Plain: reports in, a table out; no Ray, no clock.

    A drafter is healthy when every target that reports is linked with it. It costs what a target's profile says, else what
    the pool does. One whose acceptance collapses is quarantined, where there is a ``watch``.
    """

    def __init__(
        self,
        policy: AssignmentPolicy,
        pool: Sequence[PoolMember],
        max_draft_len: int,
        watch: CollapseWatch | None = None,
        scores: bool = False,
    ) -> None:
        self._policy = policy
        self._scores = scores
        self._watch = watch
        self._pool = tuple(pool)
        self._table = RoutingTable(version=0, max_draft_len=max_draft_len)
        self._draining: frozenset[str] = frozenset()

    @property
    def policy(self) -> AssignmentPolicy:
        return self._policy

    def set_draining(self, names: frozenset[str]) -> None:
        self._draining = names

    def slot(self, reports: Sequence[SlotReport]) -> RoutingTable | None:
        """The table for the slot that follows, or None: the targets have it already.

        Its version is above any that a target has, so that a router that was restarted is heard.
        """
        if not reports:
            return None
        observations = [observation for report in reports for observation in report.observations]
        scores = [score for report in reports for score in report.scores]
        if self._watch is not None:
            self._watch.observe(observations)
        self._policy.observe(observations, scores)
        pool = self._judged_pool(reports)
        requests = [request for report in reports for request in report.requests]
        chains = self._policy.assign([*requests, RequestView(NEXT_REQUEST, 0, 0, TARGET_ONLY)], pool)
        versions = [report.table_version for report in reports]
        table = next_table(self._table, requests, chains, (chains[NEXT_REQUEST],), versions, self._scorers(pool))
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

    def _judged_pool(self, reports: Sequence[SlotReport]) -> list[PoolMember]:
        """As it is now, for the targets that report."""
        linked = set[str].intersection(*(set(report.drafters) for report in reports))
        shares = {name: cost for report in reports for name, cost in report.draft_costs.items()}
        costs = {name: cost for report in reports for name, cost in report.member_costs.items()}
        pool = [
            replace(
                member,
                healthy=member.name in linked,
                draining=member.name in self._draining,
                cost=shares.get(drafter_of(member.name), member.cost),
                costs=costs.get(drafter_of(member.name), member.costs),
            )
            for member in self._pool
        ]
        return pool if self._watch is None else [self._watch.judge(member) for member in pool]


class Targets(Protocol):
    """The router's way to the targets."""

    def reports(self, deadline_s: float) -> list[SlotReport]:
        """Of those that answer in time; which do not is noted by whoever implements this."""

    def publish(self, table: RoutingTable) -> None:
        """To all, waiting for none."""


@dataclass(frozen=True, slots=True)
class RouterInfo:
    pid: int


class RouterActor(LoopActor[RouterInfo]):
    """Runs a Router against the targets, one slot after the other, on a thread.

    Args:
        remembers: what the policy learns is kept in the configured state store, and recalled from it at the start.
    """

    def __init__(self, config: Config, router: Router, targets: Targets, remembers: bool = False) -> None:
        super().__init__()
        self._config = config
        self._router = router
        self._remembers = remembers
        self._memory: RouterMemory | None = None
        self._targets = targets
        self._slot_s = config.router.slot_ms / 1e3
        self._wake = threading.Event()
        self._beat_s = time.monotonic()

    def _begin(self) -> LoopThread:
        if self._remembers:
            state = self._config.cluster
            self._memory = RouterMemory(open_store(state.state, state.namespace), self._config)
        return LoopThread("router", self, self._wake.set, on_end=self._forget)

    def _info(self) -> RouterInfo:
        return RouterInfo(os.getpid())

    def run(self, stop: threading.Event, clock: Callable[[], float]) -> None:
        if self._memory is not None:
            self._memory.recall(self._router.policy)
        while not stop.is_set():
            start_s = self._beat_s = clock()
            table = self._router.slot(self._targets.reports(deadline_s=self._slot_s))
            if table is not None:
                self._targets.publish(table)
            if self._memory is not None:
                self._memory.save(self._router.policy, clock())
            self._wake.wait(max(0.0, start_s + self._slot_s - clock()))
            self._wake.clear()

    def unread_s(self) -> float:
        """Since the last slot began."""
        return time.monotonic() - self._beat_s

    def set_draining(self, names: frozenset[str]) -> None:
        """These drafters are to be given no requests, from the next slot on, which begins now."""
        self._router.set_draining(names)
        self._wake.set()

    def _forget(self) -> None:
        if self._memory is not None:
            self._memory.close()
