"""Keeps what the router learned in the state store, so that a restarted router continues from it."""

import hashlib
import logging
from concurrent.futures import Future, ThreadPoolExecutor, wait

from pydantic import JsonValue

from cluster.config import Config
from cluster.errors import InvalidField
from cluster.state import Document, StateStore, StateUnavailable, state_fault
from router.assignment import AssignmentPolicy

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
