"""How tenants share a server: whose request is next, and how much of a bounded resource one may hold."""

from collections import Counter
from collections.abc import Collection, Mapping

THRESHOLD = 2.0  # times what is free


class TokenCounters:
    """The virtual token counter (VTC, Sheng et al., OSDI 2024, algorithm 2). A tenant's share is
    proportional to its weight, 1 by default.

    Of the tenants that wait, the one with the least service is next. One that comes back gets no credit for the time in
    which it asked for nothing: its counter is lifted to the least of those that wait, or to that of the last one served.
    Bounded by the number of tenants.
    """

    def __init__(self) -> None:
        self.weights: Mapping[str, float] = {}
        self._served: dict[str, float] = {}
        self._last = 0.0  # counter of the last tenant that was chosen

    def arrive(self, tenant: str, waiting: Collection[str]) -> None:
        """Before a request of ``tenant`` is queued; ``waiting``: the tenants whose requests wait for others'."""
        if tenant not in waiting:
            floor = min((self._served[other] for other in waiting), default=self._last)
            self._served[tenant] = max(self._served.get(tenant, 0.0), floor)

    def charge(self, tenant: str, num_tokens: int) -> None:
        self._served[tenant] = self._served.get(tenant, 0.0) + num_tokens / self.weights.get(tenant, 1.0)

    def next_of(self, waiting: Collection[str]) -> str:
        """Ties go to the first of ``waiting``. Raises ValueError if it is empty."""
        chosen = min(waiting, key=self._served.__getitem__)
        self._last = self._served[chosen]
        return chosen


class SharedLimit:
    """A resource of which at most ``limit`` is held at once. Dynamic thresholds (Choudhury and Hahne, IEEE/ACM ToN 1998)
    keep some of it free for tenants that come: one may hold THRESHOLD times what is free, so alone two thirds of all, and
    each of n that want more 2 / (1 + 2 n).

    ``is_shared``: whether there are several tenants; else one may hold all.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: Counter[str] = Counter()  # by tenant, none zero
        self.is_shared = False
        self.num_held = 0

    def hold(self, tenant: str, amount: int) -> None:
        self._held[tenant] += amount
        self.num_held += amount

    def give_back(self, tenant: str, amount: int) -> None:
        self.num_held -= amount
        self._held[tenant] -= amount
        if not self._held[tenant]:
            del self._held[tenant]

    def is_exceeded(self, tenant: str, least: int) -> bool:
        """Whether what is held now is too much, for all or for ``tenant``, which may always hold ``least``."""
        num_free = self._limit - self.num_held
        return num_free < 0 or (self.is_shared and self._held[tenant] > max(least, THRESHOLD * num_free))
