"""A round between its halves, its report, and for other threads a snapshot of the loop and the time since a pass last
advanced, which distinguishes a long pass from a hung one."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.types import record
from router.plan import Span, StepPlan


@dataclass(slots=True)
class PendingPass:
    """A round between its two halves: what the engine computes, and when its pass began and ended."""

    plan: StepPlan
    began_s: float
    spans: Sequence[Span] = ()
    pass_began_s: float = 0.0
    end_s: float = 0.0
    since_s: float = 0.0  # from when the draft lengths count its round

    @property
    def pass_s(self) -> float:
        return self.end_s - self.pass_began_s


@record
class StepReport:
    """What a step did. ``wake_s``: when the first hold ends, if every request is held for its proposal."""

    executed: bool
    wake_s: float | None = None


@record
class LoopStatus:
    """The loop as of the last step, for other threads; ``followed`` is counted when it is read."""

    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0  # while ``num_running`` requests hold the others
    table_version: int = 0
    draining: bool = False
    followed: tuple[tuple[str, int], ...] = ()  # linked drafters, and for how many requests each drafts


class PassProgress:
    """``advanced`` is called by the computing thread, at least once per layer; ``still_s`` by any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._advanced_s = clock()

    def advanced(self) -> None:
        self._advanced_s = self._clock()

    def still_s(self) -> float:
        """Seconds since the last advance, or since construction."""
        return self._clock() - self._advanced_s


# A process has one loop, and so one progress.
PASSES = PassProgress()
