"""Which compute partition a target and a drafter on its device use: all of it in turn, or a part each, at once (FASER, 4.3).

With t_v and t_d the profiled times of a pass and of its drafts in a partition, and x the share of rounds whose drafts were
made while the round before was verified, a round takes

    t_v + t_d                                        on the whole device, one after the other
    x max(t_v, t_d) + (1 - x) (t_v + t_d)            in parts
"""

from collections.abc import Mapping
from dataclasses import dataclass

WHOLE = ""  # the partition of drafters that have none of their own


@dataclass(frozen=True, slots=True)
class PartTimes:
    """Profiled in one partition for the present batch."""

    pass_s: float
    draft_s: float


class PartitionChoice:
    """Keeps a partition until another has been better by ``margin`` for ``patience`` choices in a row: to change it costs a
    synchronisation, and estimates of FASER's draft lengths hold for one partition."""

    def __init__(self, margin: float = 0.05, patience: int = 16) -> None:
        self._margin, self._patience = margin, patience
        self._challenger = self.current = WHOLE
        self._num_better = 0

    def choose(self, times: Mapping[str, PartTimes], overlapped: float) -> str:
        """The partition of the next rounds. ``times``: by partition, WHOLE among them. ``overlapped``: x, from 0 to 1."""
        seconds = {name: round_s(one, 0.0 if name == WHOLE else overlapped) for name, one in times.items()}
        best = min(seconds, key=lambda name: (seconds[name], name))
        if self.current not in seconds:  # it is not offered any more
            self.current, self._num_better = best, 0
            return best
        if seconds[best] >= (1.0 - self._margin) * seconds[self.current]:
            self._num_better = 0
            return self.current
        self._num_better = self._num_better + 1 if best == self._challenger else 1
        self._challenger = best
        if self._num_better >= self._patience:
            self.current, self._num_better = best, 0
        return self.current


def round_s(times: PartTimes, overlapped: float) -> float:
    apart_s, together_s = times.pass_s + times.draft_s, max(times.pass_s, times.draft_s)
    return overlapped * together_s + (1.0 - overlapped) * apart_s
