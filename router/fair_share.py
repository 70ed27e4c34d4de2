"""Whose request is next: tenants share a server by the tokens that it computed for them."""

from collections.abc import Collection, Mapping


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
