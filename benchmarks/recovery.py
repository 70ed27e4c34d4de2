"""Detects a server's recovery from a fault by its metrics."""

from collections.abc import Callable, Mapping

# A figure of the cluster by its name and member ("": none).
Metrics = Mapping[tuple[str, str], float]


def routes_again() -> Callable[[Metrics], bool]:
    """A new table was published after the kill."""
    first: float | None = None

    def recovered(metrics: Metrics) -> bool:
        nonlocal first
        version = metrics.get(("outrider_routing_table_version", ""))
        if version is None:
            return False
        first = version if first is None else first
        return version > first

    return recovered


def target_is_ready() -> Callable[[Metrics], bool]:
    """It was down and is ready."""
    seen_down = False

    def recovered(metrics: Metrics) -> bool:
        nonlocal seen_down
        ready = any(value for (name, _), value in metrics.items() if name == "outrider_target_ready")
        seen_down = seen_down or not ready
        return seen_down and ready

    return recovered
