"""The router as the simulator sees it: every slot the policy that serves decides, and the same code makes a table of it."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from cluster.messages import LevelReport
from cluster.types import RoutingTable
from profiler.simulator.sequence import SlotCounts
from profiler.simulator.target import SimulatedTarget
from router.assignment import (
    TARGET_ONLY,
    AssignmentPolicy,
    Observation,
    PoolMember,
    RequestView,
    Score,
    drafter_of,
)
from router.chains import PassTime
from router.policies.chain import ModelChains
from router.table import next_table

# As actors.router.NEXT_REQUEST: stands for whatever request comes next.
NEXT_REQUEST = "\0next"


class SimulatedRouter:
    """As `actors.router.Router`; a decision takes no time.

    Args:
        scores: every drafter of the pool tells what it would have drafted where others did (DESIGN idea 5).
        levels: what happened within chains since it was last asked. For policies that assign chains, as is
        target_passes: what passes of a target are believed to take, with so much context.
        seen: is told of every slot: when it was, and how many tokens the targets had committed then.
    """

    def __init__(
        self,
        policy: AssignmentPolicy,
        pool: Sequence[PoolMember],
        max_draft_len: int,
        scores: bool,
        levels: Callable[[], Sequence[LevelReport]],
        target_passes: Callable[[int], PassTime],
        seen: Callable[[float, int], None] | None = None,
    ) -> None:
        self._policy = policy
        self._pool = tuple(pool)
        self._members = {drafter_of(member.name): member for member in reversed(pool)}
        self._targets: Sequence[SimulatedTarget] = ()
        self._scores = scores
        self._levels = levels
        self._target_passes = target_passes
        self._seen = seen
        self.table = RoutingTable(0, max_draft_len=max_draft_len)
        self.num_slots = 0

    def serve(self, targets: Sequence[SimulatedTarget]) -> None:
        self._targets = targets

    def first_table(self) -> RoutingTable:
        """Before anything was seen."""
        chains = self._policy.assign([_NEXT], self._pool)
        self.table = RoutingTable(1, {}, (chains[NEXT_REQUEST],), self.table.max_draft_len)
        return self.table

    def slot(self, now_s: float) -> None:
        self.num_slots += 1
        if self._seen is not None:
            self._seen(now_s, sum(target.num_committed for target in self._targets))
        observations: list[Observation] = []
        scores: list[Score] = []
        requests: list[RequestView] = []
        for target in self._targets:
            slots = target.take_slots()
            requests += target.requests()
            for (_, drafter), slot in slots.items():
                observations.append(slot.observation(drafter, self._draft_len(drafter)))
            if self._scores:
                scores += self._scored(slots)
        if isinstance(self._policy, ModelChains):
            num_context = sum(request.committed_len for request in requests) // len(self._targets)
            self._policy.learn(self._levels(), self._target_passes(num_context))
        self._policy.observe(observations, scores)
        chains = self._policy.assign([*requests, _NEXT], self._pool)
        versions = [target.table.version for target in self._targets]
        table = next_table(self.table, requests, chains, (chains[NEXT_REQUEST],), versions)
        if table is not self.table:
            self.table = table
            for target in self._targets:
                target.publish(table)

    def _draft_len(self, drafter: str) -> int:
        member = self._members.get(drafter_of(drafter))
        return self.table.max_draft_len if member is None else member.max_draft_len

    def _scored(self, slots: Mapping[tuple[str, str], SlotCounts]) -> list[Score]:
        """What each other drafter would have drafted where a round of a request began."""
        scores = []
        for (request_id, drafter), slot in slots.items():
            if not slot.bases:
                continue
            at = np.array(slot.bases, np.int64)
            for other, member in self._members.items():
                if other != drafter_of(drafter):
                    positions = slot.request.answer.of(other).positions(at, member.max_draft_len)
                    scores.append(Score(request_id, other, positions))
        return scores


_NEXT = RequestView(NEXT_REQUEST, 0, 0, TARGET_ONLY)
