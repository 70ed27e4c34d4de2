"""Names of the metrics that the API exports."""

from deploy.api.metric_table import METRICS


def exported() -> set[str]:
    """Names of all series of /metrics."""
    suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    return {f"outrider_{m.name}{suffix}" for m in METRICS for suffix in suffixes[m.kind]} | {"outrider_cluster_up"}
