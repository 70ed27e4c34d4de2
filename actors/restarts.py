"""When a failed process is restarted: at once, then with exponential backoff, then after a quarantine."""

from collections import deque
from dataclasses import dataclass, field

from cluster.config import SupervisionConfig

BACKOFF_S = 0.25  # before the second restart; doubles with each further one
MAX_BACKOFF_S = 5.0  # a start of a model takes longer, so that a longer pause saves little
WINDOW_S = 60.0  # in which failures count
QUARANTINE_S = 120.0  # a drafter that fails at each start costs 5 loads in 3 minutes, and one that recovers is soon back


@dataclass(frozen=True, slots=True)
class Restart:
    at_s: float
    quarantined: bool = False  # it failed too often


@dataclass(slots=True)
class RestartPolicy:
    """Restart policy of one process. Pure. Failures older than the window are forgotten.

    Only drafters are quarantined (``may_quarantine``): the service works without them.
    """

    config: SupervisionConfig
    may_quarantine: bool
    num_restarts: int = 0
    _failures_s: deque[float] = field(default_factory=deque)

    def failed(self, now_s: float) -> Restart:
        """The process ended or did not start."""
        config = self.config
        self.num_restarts += 1
        while self._failures_s and self._failures_s[0] <= now_s - WINDOW_S:
            self._failures_s.popleft()
        self._failures_s.append(now_s)
        num_recent = len(self._failures_s)
        if self.may_quarantine and num_recent >= config.quarantine_restarts:
            self._failures_s.clear()
            return Restart(now_s + QUARANTINE_S, quarantined=True)
        if num_recent == 1:
            return Restart(now_s)
        doublings = min(num_recent - 2, 30)  # more would overflow a float; these reach any bound
        return Restart(now_s + min(BACKOFF_S * 2**doublings, MAX_BACKOFF_S))
