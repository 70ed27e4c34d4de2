"""Drafters in the target's process, which read its hidden states and draft between two passes, while the target waits."""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from cluster.types import Commit
from router.break_even import BreakEvenGate, saved_s
from router.cost_model import CostModel

logger = logging.getLogger(__name__)


class ColocatedLoop(Protocol):
    """A drafter's loop, linked to the target's mailbox as any other drafter."""

    @property
    def name(self) -> str: ...

    def step(self, now_s: float) -> bool:
        """Returns whether there was anything to do: if so, call again at once."""


class ColocatedDrafters:
    """Steps the loops, and decides for each batch size whether a drafter is queried: its drafts must save more time than
    they take. What must be sent to a drafter that is not queried waits in its outbox."""

    def __init__(self, loops: Sequence[ColocatedLoop], clock: Callable[[], float]) -> None:
        self._loops = list(loops)
        self._clock = clock
        self._gates = {loop.name: BreakEvenGate() for loop in loops}
        self._batch = 1  # requests of the last pass that sampled

    def __bool__(self) -> bool:
        return bool(self._loops)

    def is_colocated(self, drafter: str) -> bool:
        return drafter in self._gates

    def is_queried(self, drafter: str) -> bool:
        """True for a drafter in another process."""
        gate = self._gates.get(drafter)
        return gate is None or gate.is_queried

    def choose(self, batch: int) -> None:
        """Decides who is queried for the next proposals of ``batch`` requests."""
        for gate in self._gates.values():
            gate.decide(batch)
        self._batch = batch

    def note_pass(self, commits: Sequence[Commit], batch: int, num_context: int, cost: CostModel) -> None:
        """Records the time that each drafter's drafts saved in a pass over ``batch`` sequences."""
        for name, gate in self._gates.items():
            own = [commit for commit in commits if commit.drafter == name]
            if own:
                num_verified = sum(commit.num_proposed for commit in own)
                num_accepted = sum(commit.num_accepted for commit in own)
                gate.note_saved(batch, saved_s(batch, num_verified, num_accepted, num_context, cost))

    def note_overhead(self, seconds: float) -> None:
        """The last round took so long beside its pass and its drafts."""
        for gate in self._gates.values():
            gate.note_rest(self._batch, seconds)

    def draft(self, now_s: float, is_idle: bool, follows_pass: bool) -> tuple[float, list[tuple[str, str]]]:
        """Lets each queried drafter read its mail and draft; if ``is_idle`` (no request is live), every one. Returns the
        seconds that it took, and name and error of each drafter that failed and is left out from now on. ``follows_pass``:
        the time counts as that of drafting for a batch."""
        begin_s, failed = self._clock(), []
        for loop in tuple(self._loops):
            if not (is_idle or self.is_queried(loop.name)):
                continue
            start_s = self._clock()
            try:
                while loop.step(now_s):
                    pass
            except Exception as error:  # this process owns the loop, and a drafter's fault costs speed alone
                logger.exception("drafter %s failed, and is left out from now on", loop.name)
                self._loops.remove(loop)
                del self._gates[loop.name]
                failed.append((loop.name, f"{type(error).__name__}: {error}"))
                continue
            if follows_pass:
                self._gates[loop.name].note_draft(self._batch, self._clock() - start_s)
        return self._clock() - begin_s, failed
