"""Where replicas of the API exchange what they count, so that each can export all of it."""

from cluster.client import ReplicaMetrics

LOST_S = 10.0  # a replica sends its metrics every two seconds


class MetricsExchange:
    """Keeps the newest metrics of each replica. Those of a replica that has sent none for LOST_S are dropped."""

    def __init__(self) -> None:
        self._newest: dict[str, tuple[float, ReplicaMetrics]] = {}

    def give(self, own: ReplicaMetrics, now_s: float) -> tuple[ReplicaMetrics, ...]:
        """Replaces the metrics of a replica, and returns those of the others."""
        self._newest[own.replica] = now_s, own
        self._newest = {name: kept for name, kept in self._newest.items() if now_s - kept[0] <= LOST_S}
        return tuple(one for _, one in self._newest.values() if one.replica != own.replica)
