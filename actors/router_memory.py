"""What the router learned, kept in the state store, so that one that is restarted need not learn it again."""

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
RECALL_S = 1.0  # that the first slot waits for the store


class RouterMemory:
    """Used from the router's thread, which never waits for the store: that has a thread of its own.

    A store that is away is logged once and asked again every period: routing goes on. ``fault`` says why nothing is kept.
    What it holds is not replaced before it was read: when it comes back, a policy that has learned nothing yet recalls it.
    """

    def __init__(self, store: StateStore, config: Config) -> None:
        self._store = store
        # What was learned holds for this target and this way of learning.
        model = hashlib.sha256(config.model.name.encode()).hexdigest()[:16]
        self._key = f"router/{config.router.policy.kind}/{model}"
        self._saved_s: float | None = None
        self._saved: JsonValue = None
        self._is_recalled = False
        self._reading: Future[Document | None] | None = None
        self._probing: Future[str | None] | None = None
        self._writing: tuple[Future[int], JsonValue] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="router-memory")
        self.fault: str | None = None

    def recall(self, policy: AssignmentPolicy) -> None:
        """Waits RECALL_S at most; what comes later is taken up by ``save``."""
        self._reading = self._thread.submit(self._store.get, self._key)
        self._probing = self._thread.submit(state_fault, self._store)  # a folder may be read and not written
        wait([self._reading], RECALL_S)
        self._take_up(policy)

    def save(self, policy: AssignmentPolicy, now_s: float) -> None:
        """Once a period, the first time a period after the start."""
        self._note_probed()
        if self._saved_s is None or now_s - self._saved_s < SAVE_PERIOD_S:
            self._saved_s = now_s if self._saved_s is None else self._saved_s
            return
        self._saved_s = now_s
        if not self._is_recalled:
            self._take_up(policy)
        if self._is_recalled:
            self._write(policy)
        if self.fault is not None and self._probing is None:
            self._probing = self._thread.submit(state_fault, self._store)

    def settle(self) -> None:
        """Waits until what was begun is done."""
        self._thread.submit(lambda: None).result()
        self._note_probed()
        self._note_written()

    def close(self) -> None:
        """What was begun is finished."""
        self._thread.shutdown(wait=True)
        self._note_written()
        self._store.close()

    def _take_up(self, policy: AssignmentPolicy) -> None:
        """What was read, if it is there; what could not be read is asked for again."""
        if self._reading is None:
            self._reading = self._thread.submit(self._store.get, self._key)
            return
        if not self._reading.done():
            self._failed("it does not answer")
            return
        reading, self._reading = self._reading, None
        try:
            known = reading.result()
        except StateUnavailable as error:
            self._failed(str(error))
            return
        self._is_recalled = True
        if known is None or policy.snapshot():
            return
        try:
            policy.restore(known.value)
            logger.info("the router recalls what it learned, version %d", known.version)
        except ValueError as error:
            logger.warning("state %r is of another version of the policy, it starts anew: %s", self._key, error)

    def _write(self, policy: AssignmentPolicy) -> None:
        self._note_written()
        if self._writing is not None:
            return  # the store is slow
        snapshot = policy.snapshot()
        if not snapshot or snapshot == self._saved:
            return
        self._writing = self._thread.submit(self._store.put, self._key, snapshot), snapshot

    def _note_written(self) -> None:
        if self._writing is None or not self._writing[0].done():
            return
        (written, snapshot), self._writing = self._writing, None
        try:
            written.result()
            self._saved = snapshot
            self._works()
        except (StateUnavailable, InvalidField) as error:
            self._failed(str(error))

    def _note_probed(self) -> None:
        if self._probing is None or not self._probing.done():
            return
        found, self._probing = self._probing.result(), None
        if found is None:
            self._works()
        else:
            self._failed(found)

    def _failed(self, why: str) -> None:
        fault = f"the state store cannot be used, what is learned is not kept: {why}"
        if self.fault is None:
            logger.warning("%s; it is tried again every %g s", fault, SAVE_PERIOD_S)
        self.fault = fault

    def _works(self) -> None:
        if self.fault is not None:
            logger.info("the state store can be used again")
        self.fault = None
