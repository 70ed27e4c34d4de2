"""The round's status: a report per step, and a snapshot for other threads."""

from cluster.fast_dataclass import record


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
    table_version: int = 0
    draining: bool = False
    followed: tuple[tuple[str, int], ...] = ()  # linked drafters, and for how many requests each drafts
