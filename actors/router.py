"""The router's process: every slot it reads the targets' reports, decides, and publishes a routing table.

It is off the data path: while it is down, targets keep serving with the last table. What it learned is kept in the state
store, so that a restarted router continues from it.
"""

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from pydantic import JsonValue

from actors.worker import LoopActor, LoopThread
from cluster.config import Config, PolicyConfig
from cluster.errors import InvalidField
from cluster.state import Document, StateStore, StateUnavailable, open_store, state_fault
from cluster.types import RoutingTable
from router.assignment import AssignmentPolicy
from router.drafter.policies import build_policy, scored_by
from router.drafter.router import SLOT_S, Router, SlotReport

logger = logging.getLogger(__name__)

SAVE_PERIOD_S = 10.0
RECALL_S = 1.0  # longest wait of the first slot for the store


class RouterMemory:
    """Called by the thread that decides, which waits for the store in the first slot only: another thread accesses it.
    ``kind``: of the policy; None: the configured one.

    An unavailable store is logged once and tried again every period; ``fault`` holds the reason. A stored snapshot is read
    before it is overwritten. If it arrives late, only a policy that has learned nothing restores it.
    """

    def __init__(self, store: StateStore, config: Config, kind: str | None = None) -> None:
        self._store = store
        # What was learned holds for one target model and one policy.
        model = hashlib.sha256(config.model.name.encode()).hexdigest()[:16]
        self._key = f"router/{kind or config.router.policy.kind}/{model}"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="router-memory")
        self._exchange: Future[str | None] | None = None  # under way; its result is the fault
        # The store's thread sets these during an exchange.
        self._is_read = False
        self._document: Document | None = None  # read, not restored yet
        self._saved: JsonValue = None
        self._started_s: float | None = None  # of the last exchange
        self.fault: str | None = None

    def recall(self, policy: AssignmentPolicy) -> None:
        """Restores the stored snapshot. Waits at most RECALL_S; ``save`` restores one that arrives later."""
        self._exchange = self._thread.submit(self._access, None)
        wait([self._exchange], RECALL_S)
        if not self._exchange.done():
            self._report("it does not answer")
        self._collect()
        self._restore(policy)

    def save(self, policy: AssignmentPolicy, now_s: float) -> None:
        """Stores the policy's snapshot once a period, the first time one period after the first call."""
        self._collect()
        self._restore(policy)
        if self._started_s is None:
            self._started_s = now_s
        if now_s - self._started_s < SAVE_PERIOD_S:
            return
        self._started_s = now_s
        if self._exchange is not None:
            self._report("it does not answer")
            return
        snapshot = policy.snapshot() if self._is_read else None
        if snapshot == self._saved:
            snapshot = None
        if snapshot or not self._is_read or self.fault is not None:
            self._exchange = self._thread.submit(self._access, snapshot or None)

    def settle(self) -> None:
        """Waits for the exchange under way."""
        if self._exchange is not None:
            wait([self._exchange])
            self._collect()

    def close(self) -> None:
        """Finishes the exchange under way."""
        self.settle()
        self._thread.shutdown(wait=True)
        self._store.close()

    def _access(self, snapshot: JsonValue) -> str | None:
        """Writes ``snapshot``; without one, reads the stored one and probes whether the store can be written."""
        try:
            if snapshot is not None:
                self._store.put(self._key, snapshot)
                self._saved = snapshot
                return None
            if not self._is_read:
                self._document, self._is_read = self._store.get(self._key), True
            return state_fault(self._store)
        except (StateUnavailable, InvalidField) as error:
            return str(error)

    def _collect(self) -> None:
        if self._exchange is not None and self._exchange.done():
            fault, self._exchange = self._exchange.result(), None
            self._report(fault)

    def _restore(self, policy: AssignmentPolicy) -> None:
        if self._exchange is not None:
            return
        document, self._document = self._document, None
        if document is None or policy.snapshot():
            return
        try:
            policy.restore(document.value)
            logger.info("the router restored what it had learned, version %d", document.version)
        except ValueError as error:
            logger.warning("state %r is of another version of the policy, it starts anew: %s", self._key, error)

    def _report(self, fault: str | None) -> None:
        known, self.fault = self.fault, None
        if fault is not None:
            self.fault = f"the state store cannot be used, what is learned is not kept: {fault}"
            if known is None:
                logger.warning("%s; it is tried again every %g s", self.fault, SAVE_PERIOD_S)
        elif known is not None:
            logger.info("the state store can be used again")


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
