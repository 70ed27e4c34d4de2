"""Sends spans by OTLP over HTTP. Imported where an endpoint is configured only."""

import logging
import time
from importlib.metadata import version as version_of

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from cluster.spans import FinishedSpan

MAX_QUEUED_SPANS = 4096  # further ones push out the oldest
MAX_SENT_SPANS = 512  # in one batch
EXPORT_EVERY_S = 1.0
OFFSET_READINGS = 5
EXPORT_DEADLINE_S = 2.0  # of one batch, retries included
PROPAGATOR = TraceContextTextMapPropagator()
_QUOTING_LOGGERS = ("opentelemetry.trace.span", "opentelemetry.trace.propagation.tracecontext")


def make_provider(endpoint: str, sampled_share: float, process: str) -> TracerProvider:
    """Owns a thread that sends finished spans to ``endpoint``, the collector's base URL. The caller's decision to sample is
    kept; of calls without one, ``sampled_share`` are sampled."""
    for name in _QUOTING_LOGGERS:  # their warnings quote the caller's headers
        logging.getLogger(name).setLevel(logging.ERROR)
    names = {"service.name": "outrider", "service.version": version_of("outrider"), "service.instance.id": process}
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(sampled_share)), resource=Resource.create(names), shutdown_on_exit=False
    )
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_DEADLINE_S)
    provider.add_span_processor(
        BatchSpanProcessor(
            exporter,
            max_queue_size=MAX_QUEUED_SPANS,
            schedule_delay_millis=EXPORT_EVERY_S * 1e3,
            max_export_batch_size=MAX_SENT_SPANS,
        )
    )
    return provider


def wall_offset_ns() -> int:
    """To add to times of the monotonic clock, so that they are shown as wall time: the clocks' present offset. Of the
    reading that took the least time, since a thread may lose its core between two clocks."""
    readings = []
    for _ in range(OFFSET_READINGS):
        before_ns, wall_ns, after_ns = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        readings.append((after_ns - before_ns, wall_ns - (before_ns + after_ns) // 2))
    return min(readings)[1]


class OtlpSpans:
    """`cluster.spans.SpanSink`."""

    def __init__(self, endpoint: str, sampled_share: float, process: str) -> None:
        self._provider = make_provider(endpoint, sampled_share, process)
        self._tracer = self._provider.get_tracer("outrider")

    def add(self, span: FinishedSpan) -> None:
        offset_ns = wall_offset_ns()
        context = PROPAGATOR.extract({"traceparent": span.parent}, Context())
        start_ns = int(span.start_s * 1e9) + offset_ns
        made = self._tracer.start_span(span.name, context, attributes=span.attributes, start_time=start_ns)
        for event in span.events:
            made.add_event(event.name, event.attributes, int(event.at_s * 1e9) + offset_ns)
        made.end(int(span.end_s * 1e9) + offset_ns)

    def close(self) -> None:
        self._provider.shutdown()
