"""When a process that ended is started again: at once, then with growing pauses, then after a quarantine."""

from collections import deque
from dataclasses import dataclass, field

from cluster.config import SupervisionConfig


@dataclass(frozen=True, slots=True)
class Restart:
    """``at_s``: when to start again. ``quarantined``: it has failed too often to be trusted before."""

    at_s: float
    quarantined: bool


@dataclass(slots=True)
class RestartPolicy:
    """Of one process. Pure: time comes in as data.

    A process that has run well for the whole window starts over with a clean slate. Only what the service can do without
    is put into quarantine (``may_quarantine``); a target is tried for ever, at the longest pause.
    """

    config: SupervisionConfig
    may_quarantine: bool
    num_restarts: int = 0
    _failures_s: deque[float] = field(default_factory=deque)

    def failed(self, now_s: float) -> Restart:
        """The process has ended, or would not start. Says when to start it again."""
        config = self.config
        self.num_restarts += 1
        while self._failures_s and self._failures_s[0] <= now_s - config.quarantine_window_s:
            self._failures_s.popleft()
        self._failures_s.append(now_s)
        num_recent = len(self._failures_s)
        if self.may_quarantine and num_recent >= config.quarantine_restarts:
            self._failures_s.clear()
            return Restart(now_s + config.quarantine_s, quarantined=True)
        if num_recent == 1:
            return Restart(now_s, quarantined=False)
        # Exponents beyond this reach any bound, and would overflow a float.
        doublings = min(num_recent - 2, 30)
        pause_ms = min(config.restart_backoff_ms * 2**doublings, config.max_restart_backoff_ms)
        return Restart(now_s + pause_ms / 1e3, quarantined=False)
