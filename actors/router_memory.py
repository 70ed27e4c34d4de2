"""What the router learned, kept in the state store, so that one that is restarted need not learn it again."""

import hashlib
import logging

from pydantic import JsonValue

from cluster.config import Config
from cluster.errors import InvalidField
from cluster.state import StateStore, StateUnavailable
from router.assignment import AssignmentPolicy

logger = logging.getLogger(__name__)

SAVE_PERIOD_S = 10.0


class RouterMemory:
    """Used from the router's thread. A store that is away is logged and asked again a period later: routing goes on."""

    def __init__(self, store: StateStore, config: Config) -> None:
        self._store = store
        # What was learned holds for this target and this way of learning.
        model = hashlib.sha256(config.model.name.encode()).hexdigest()[:16]
        self._key = f"router/{config.router.policy.kind}/{model}"
        self._saved_s: float | None = None
        self._saved: JsonValue = None

    def recall(self, policy: AssignmentPolicy) -> None:
        try:
            known = self._store.get(self._key)
            if known is not None:
                policy.restore(known.value)
                logger.info("the router recalls what it learned, version %d", known.version)
        except StateUnavailable as error:
            logger.warning("the router starts without what it learned before: %s", error)
        except ValueError as error:
            logger.warning("state %r is of another version of the policy, it starts anew: %s", self._key, error)

    def save(self, policy: AssignmentPolicy, now_s: float) -> None:
        """Once a period, the first time a period after the start."""
        if self._saved_s is None or now_s - self._saved_s < SAVE_PERIOD_S:
            self._saved_s = now_s if self._saved_s is None else self._saved_s
            return
        self._saved_s = now_s
        snapshot = policy.snapshot()
        if not snapshot or snapshot == self._saved:
            return
        try:
            self._store.put(self._key, snapshot)
            self._saved = snapshot
        except (StateUnavailable, InvalidField) as error:
            logger.warning("what the router learned was not saved: %s", error)

    def close(self) -> None:
        self._store.close()
