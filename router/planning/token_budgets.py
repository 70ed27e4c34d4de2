"""Budgets of a tenant: requests and tokens per minute, each a token bucket. Times are in seconds of one clock.

Replicas of a server divide them: each has a bucket of 1 / ``num_replicas`` of the size and of the rate. A bucket holds at
least one request, so that a burst may reach ``num_replicas`` requests where less is allowed; the rate is never exceeded.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """None: unlimited."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # prompt and output
    burst_minutes: float = 1.0  # size of a bucket: what an idle tenant may use at once


UNLIMITED = Limits()


class TokenBucket:
    """Holds up to ``size``, and is full at first; ``per_s`` flows in."""

    def __init__(self, size: float, per_s: float) -> None:
        self.size = size
        self._per_s = per_s
        self._level = size
        self._at_s = float("-inf")

    def resize(self, size: float, per_s: float, now_s: float) -> None:
        """Keeps what it holds, as far as there is room."""
        self._level = min(size, self.level(now_s))
        self.size, self._per_s = size, per_s

    def level(self, now_s: float) -> float:
        if now_s > self._at_s:
            self._level = min(self.size, self._level + (now_s - self._at_s) * self._per_s)
            self._at_s = now_s
        return self._level

    def wait_s(self, amount: float, now_s: float) -> float:
        """Until ``amount``, of at most ``size``, is there; 0: it is."""
        return max(0.0, amount - self.level(now_s)) / self._per_s

    def take(self, amount: float, now_s: float) -> None:
        """Of what is there."""
        self._level = self.level(now_s) - amount

    def give_back(self, amount: float) -> None:
        self._level = min(self.size, self._level + amount)


class Budget:
    """One replica's buckets of ``limits``; None: unlimited."""

    def __init__(self, limits: Limits, num_replicas: int = 1) -> None:
        self.limits = limits
        self.requests, self.tokens = (
            None if per_minute is None else TokenBucket(*self._share(per_minute, num_replicas))
            for per_minute in (limits.requests_per_minute, limits.tokens_per_minute)
        )

    def divide(self, num_replicas: int, now_s: float) -> None:
        """Among another number of replicas."""
        limits = self.limits
        for bucket, per_minute in ((self.requests, limits.requests_per_minute), (self.tokens, limits.tokens_per_minute)):
            if bucket is not None and per_minute is not None:
                bucket.resize(*self._share(per_minute, num_replicas), now_s)

    def _share(self, per_minute: int, num_replicas: int) -> tuple[float, float]:
        """Size and flow per second."""
        share = per_minute / num_replicas
        return max(1.0, share * self.limits.burst_minutes), share / 60.0
