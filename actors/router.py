"""The router's process: every slot it reads the targets' reports, decides, and publishes a routing table.

It is off the data path: while it is down, targets keep serving with the last table.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from actors.router_memory import RouterMemory
from actors.worker import LoopActor, LoopThread
from cluster.config import Config, PolicyConfig
from cluster.state import open_store
from cluster.types import RoutingTable
from router.assignment import AssignmentPolicy
from router.drafter.policies import build_policy, scored_by
from router.drafter.router import SLOT_S, Router, SlotReport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RouterReport:
    """For the cluster's status. ``notes``: faults to show to users. ``trial_left_s``: None without a trial."""

    policy: str
    trial_left_s: float | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Trial:
    """A policy that replaces the configured one for a time. It begins without knowledge, and what it learns is not kept."""

    kind: str
    until_s: float


class Targets(Protocol):
    """The router's access to the targets."""

    def reports(self, deadline_s: float) -> list[SlotReport]:
        """Reports of the targets that answer within the deadline."""

    def publish(self, table: RoutingTable) -> None:
        """Sends the table to all targets without waiting."""

    def set_names(self, names: Sequence[str]) -> None:
        """The targets that there are from now on."""


class RouterActor(LoopActor):
    """Runs a Router against the targets, slot by slot.

    Args:
        remembers: the configured state store keeps what it learns.
        make_policy: of an operator's trial.
    """

    def __init__(
        self,
        config: Config,
        router: Router,
        targets: Targets,
        remembers: bool = False,
        slot_s: float = SLOT_S,
        make_policy: Callable[[PolicyConfig], AssignmentPolicy] = build_policy,
    ) -> None:
        super().__init__(config.observability)
        self._config = config
        self._router = deepcopy(router)  # arrays that Ray hands over are read-only, and a policy learns in place
        self._remembers = remembers
        self._memory: RouterMemory | None = None
        self._targets = targets
        self._slot_s = slot_s
        self._make_policy = make_policy
        self._wake = threading.Event()
        self._slot_began_s = time.monotonic()
        self._configured = self._router.policy
        self._asked: tuple[PolicyConfig | None, float] | None = None  # by `try_policy`, for the next slot
        self._trial: _Trial | None = None

    def _start_loop(self) -> LoopThread:
        if self._remembers:
            state = self._config.cluster
            self._memory = RouterMemory(open_store(state.state, state.namespace), self._config)
        self._slot_began_s = time.monotonic()  # the start may take long, and has a time-out of its own
        return LoopThread("router", partial(self.run, clock=time.monotonic), self._wake.set, on_end=self._close_memory)

    def run(self, stop: threading.Event, clock: Callable[[], float]) -> None:
        if self._memory is not None:
            self._memory.recall(self._router.policy)
        while not stop.is_set():
            start_s = self._slot_began_s = clock()
            self._follow_trial(start_s)
            table = self._router.slot(self._targets.reports(deadline_s=self._slot_s))
            if table is not None:
                self._targets.publish(table)
            if self._memory is not None and self._trial is None:
                self._memory.save(self._router.policy, clock())
            self._wake.wait(max(0.0, start_s + self._slot_s - clock()))
            self._wake.clear()

    def stalled_s(self) -> float:
        """Seconds since the last slot began or, before the first slot, since the loop started."""
        return time.monotonic() - self._slot_began_s

    def set_draining(self, names: frozenset[str]) -> None:
        """Drafters that get no requests. Takes effect with the next slot, which begins now."""
        self._router.set_draining(names)
        self._wake.set()

    def set_targets(self, names: Sequence[str]) -> None:
        """Targets come and go."""
        self._targets.set_names(names)
        self._wake.set()

    def set_offered(self, names: frozenset[str], on_fallback: frozenset[str]) -> None:
        """As `router.router.Router.set_offered`."""
        self._router.set_offered(names, on_fallback)

    def try_policy(self, policy: PolicyConfig | None, for_s: float) -> bool:
        """Routes by ``policy`` for a time, from the next slot on; then, or with None, by the configured one. Always True."""
        self._asked = policy, for_s
        self._wake.set()
        return True

    def report(self) -> RouterReport:
        fault = self._memory.fault if self._memory is not None else None
        notes = () if fault is None else (fault,)
        trial = self._trial
        if trial is None:
            return RouterReport(self._config.router.policy.kind, None, notes)
        return RouterReport(trial.kind, max(0.0, trial.until_s - time.monotonic()), notes)

    def load_demand(self) -> dict[str, int]:
        """How many requests the last slot would have given to each drafter that is not in memory."""
        return dict(self._router.load_demand)

    def _follow_trial(self, now_s: float) -> None:
        asked, self._asked = self._asked, None
        configured = self._config.router.policy
        if asked is not None and (policy := asked[0]) is not None:
            for_s = asked[1]
            self._router.use(self._make_policy(policy), scored_by(policy))
            self._trial = _Trial(policy.kind, now_s + for_s)
            logger.warning(
                "the router uses %s for %.0f s instead of %s: an operator asked", policy.kind, for_s, configured.kind
            )
        elif self._trial is not None and (asked is not None or now_s >= self._trial.until_s):
            self._router.use(self._configured, scored_by(configured))
            self._trial = None
            logger.warning("the router uses %s again", configured.kind)

    def _close_memory(self) -> None:
        if self._memory is not None:
            self._memory.close()
