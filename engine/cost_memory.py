"""Measured pass costs of a target, kept in the state store between starts."""

import hashlib
import json
import logging
from typing import Annotated

from pydantic import Field, JsonValue, ValidationError, model_validator

from cluster.config import Section
from cluster.errors import InvalidField
from cluster.state import StateStore, StateUnavailable
from engine.models.manifest import code_version
from profiler.latency import Seconds
from profiler.profile import Identity
from router.cost_model import TableCost, monotone

logger = logging.getLogger(__name__)

PREFIX = "cost"


class _Stored(Section):
    """A ``TableCost`` as JSON: (rows, seconds), rows ascending and seconds not falling."""

    points: Annotated[tuple[tuple[int, Seconds], ...], Field(min_length=1, max_length=64)]
    per_context_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]

    @model_validator(mode="after")
    def _is_a_table(self) -> "_Stored":
        rows = [num_rows for num_rows, _ in self.points]
        if rows != sorted(set(rows)) or rows[0] < 1:
            raise ValueError(f"rows must be positive and ascend, got {rows}")
        return self


class CostMemory:
    """Costs of one target on this machine with this version of the engine. An unusable store is logged and counts as empty.
    ``operators``: name of the operators' class; without kernels a pass costs several times as much."""

    def __init__(self, store: StateStore, identity: Identity, operators: str) -> None:
        self._store = store
        known = f"{identity.model_dump_json()} {code_version()} {operators}"
        self._key = f"{PREFIX}/{hashlib.sha256(known.encode()).hexdigest()[:32]}"

    def recall(self) -> TableCost | None:
        """The stored costs; None if there are no usable ones."""
        try:
            document = self._store.get(self._key)
            found = None if document is None else _Stored.model_validate_json(json.dumps(document.value))
            return None if found is None else monotone(found.points, found.per_context_s)
        except StateUnavailable as error:
            logger.warning("stored pass costs cannot be read: %s", error)
        except ValidationError as error:
            logger.warning("state %r is not a cost table, passes are measured again: %s", self._key, error)
        return None

    def keep(self, cost: TableCost) -> None:
        points: list[JsonValue] = [[rows, seconds] for rows, seconds in zip(cost.rows, cost.step_s_at, strict=True)]
        try:
            self._store.put(self._key, {"points": points, "per_context_s": cost.per_context_s})
        except (StateUnavailable, InvalidField) as error:
            logger.warning("pass costs cannot be stored, the next start measures them again: %s", error)
