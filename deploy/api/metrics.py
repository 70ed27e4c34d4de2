"""What ``/metrics`` exports, for Prometheus."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cluster.client import ClusterStatus
from deploy.api.choice import Choice

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)


class Metrics:
    """One registry per app, so that several can live in a process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "outrider_requests", "HTTP requests answered", ("endpoint", "status"), registry=self._registry
        )
        self.in_flight = Gauge("outrider_requests_in_flight", "Calls that are being served", registry=self._registry)
        self.queued = Gauge("outrider_requests_queued", "Calls that wait for their turn", registry=self._registry)
        self.prompt_tokens = Counter("outrider_prompt_tokens", "Tokens of prompts", registry=self._registry)
        self.completion_tokens = Counter("outrider_completion_tokens", "Tokens generated", registry=self._registry)
        self.accepted = Counter(
            "outrider_prediction_tokens_accepted", "Draft tokens in answers", ("drafter",), registry=self._registry
        )
        self.rejected = Counter(
            "outrider_prediction_tokens_rejected",
            "Draft tokens verified in vain",
            ("drafter",),
            registry=self._registry,
        )
        self.queue_s = Histogram(
            "outrider_queue_seconds", "Wait for a turn in this process", buckets=_SECONDS, registry=self._registry
        )
        self.ttft_s = Histogram(
            "outrider_ttft_seconds", "From a call's arrival to its first token", buckets=_SECONDS, registry=self._registry
        )
        self.tpot_s = Histogram(
            "outrider_tpot_seconds", "Per token after the first", buckets=_TOKEN_SECONDS, registry=self._registry
        )
        self._status = _StatusCollector()
        self._registry.register(self._status)

    def record_choice(self, choice: Choice, arrival_s: float) -> None:
        """Count a choice that ended, for whatever reason. ``arrival_s``: of the call, monotonic."""
        self.completion_tokens.inc(choice.num_tokens)
        for name, counts in choice.counts.by_drafter.items():
            self.accepted.labels(name).inc(counts.num_accepted)
            self.rejected.labels(name).inc(counts.num_rejected)
        if choice.first_token_s is None or choice.last_token_s is None:
            return
        self.ttft_s.observe(choice.first_token_s - arrival_s)
        if choice.num_tokens > 1:
            self.tpot_s.observe((choice.last_token_s - choice.first_token_s) / (choice.num_tokens - 1))

    def render(self, status: ClusterStatus | None) -> bytes:
        """In Prometheus' text format. ``status`` None: the cluster does not answer; its gauges are left out."""
        self._status.status = status
        return generate_latest(self._registry)


class _StatusCollector(Collector):
    """Gauges of the cluster as it is now; a drafter that left takes its series along."""

    def __init__(self) -> None:
        self.status: ClusterStatus | None = None

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("outrider_cluster_up", "1 when the cluster answers", value=float(self.status is not None))
        if self.status is None:
            return
        yield GaugeMetricFamily(
            "outrider_routing_table_version", "Of the newest routing table", value=self.status.table_version
        )
        targets, drafters = self.status.targets, self.status.drafters
        yield _gauge("outrider_target_ready", "1 when it takes requests", [(t.name, t.state == "ready") for t in targets])
        yield _gauge("outrider_target_running", "Requests in the batch", [(t.name, t.num_running) for t in targets])
        yield _gauge("outrider_target_waiting", "Requests before it", [(t.name, t.num_waiting) for t in targets])
        yield _gauge("outrider_target_blocks", "Blocks of the KV cache", [(t.name, t.num_blocks) for t in targets])
        yield _gauge("outrider_target_free_blocks", "Free ones", [(t.name, t.num_free_blocks) for t in targets])
        yield _gauge("outrider_target_tokens_per_second", "Committed", [(t.name, t.tokens_per_s) for t in targets])
        yield _gauge("outrider_target_step_seconds", "Mean of a pass", [(t.name, t.step_ms / 1000) for t in targets])
        yield _gauge(
            "outrider_drafter_ready", "1 when it may draft", [(d.name, d.state == "ready") for d in drafters], "drafter"
        )
        yield _gauge(
            "outrider_drafter_requests", "Requests it drafts for", [(d.name, d.num_requests) for d in drafters], "drafter"
        )
        yield _gauge(
            "outrider_drafter_verified",
            "Draft tokens that a target verified",
            [(d.name, d.num_proposed) for d in drafters],
            "drafter",
        )
        yield _gauge(
            "outrider_drafter_accepted", "Of these, those accepted", [(d.name, d.num_accepted) for d in drafters], "drafter"
        )
        yield _gauge("outrider_drafter_restarts", "Since the start", [(d.name, d.num_restarts) for d in drafters], "drafter")
        memory = GaugeMetricFamily(
            "outrider_drafter_memory_bytes", "Of the device that it is on, that count as its", labels=("drafter", "device")
        )
        for one in drafters:
            if one.device is not None and one.num_bytes is not None:
                memory.add_metric((one.name, one.device), float(one.num_bytes))
        yield memory
        yield _gauge("outrider_drafter_loads", "Into memory", [(d.name, d.num_loads) for d in drafters], "drafter")
        yield _gauge(
            "outrider_drafter_evictions",
            "For want of room for others",
            [(d.name, d.num_evictions) for d in drafters],
            "drafter",
        )
        yield _gauge(
            "outrider_drafter_fallbacks",
            "Loads on a CPU for want of room on its GPU",
            [(d.name, d.num_fallbacks) for d in drafters],
            "drafter",
        )
        yield _gauge(
            "outrider_drafter_reply_seconds",
            "Mean time of a reply",
            [(d.name, d.reply_ms / 1000) for d in drafters if d.reply_ms is not None],
            "drafter",
        )


def _gauge(name: str, text: str, values: Iterable[tuple[str, float]], label: str = "target") -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=(label,))
    for who, value in values:
        family.add_metric((who,), float(value))
    return family
