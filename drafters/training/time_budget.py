"""Time for a step of a run that may be killed: what it took so far is noted in the work folder, and is not given twice."""

from time import monotonic

from drafters.training.manifest import WorkFolder

_NOTE_S = 5.0  # between notes: what a kill may forget


class TimeBudget:
    """Call it to ask whether the time is over.

    Args:
        seconds: for the step, over all runs; None: it takes what it takes.
        is_done: the step came to its end before, in the time that it had: there is none left.
    """

    def __init__(self, work: WorkFolder, step: str, seconds: float | None, *, is_done: bool) -> None:
        self._work, self._step = work, step
        self._seconds = 0.0 if is_done and seconds is not None else seconds
        now_s = monotonic()
        self._began_s, self._noted_s = now_s - work.spent_s(step), now_s

    def __call__(self) -> bool:
        if self._seconds is None:
            return False
        now_s = monotonic()
        is_over = now_s - self._began_s >= self._seconds
        if now_s - self._noted_s >= _NOTE_S or is_over:
            self._work.note_spent(self._step, now_s - self._began_s)
            self._noted_s = now_s
        return is_over
