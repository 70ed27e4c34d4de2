"""The round's status: a report per step, and a snapshot for other threads."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step did. ``wake_s``: when a hold ends, if the step did nothing because everybody waits for a proposal."""

    executed: bool
    wake_s: float | None = None


@dataclass(frozen=True, slots=True)
class LoopStatus:
    """A consistent copy of what the loop would tell of itself, made once a step for readers on other threads."""

    num_running: int = 0
    num_waiting: int = 0
    table_version: int = 0
    draining: bool = False
    followed: tuple[tuple[str, int], ...] = ()  # connected drafters and how many requests each follows
