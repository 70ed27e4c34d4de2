"""Spans of traced requests: what a process did for one of them, as data. `cluster.otlp` sends them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.config import ObservabilityConfig

MAX_EVENTS = 64  # of a span; a request may have thousands of rounds

Attributes = Mapping[str, str | int | float | Sequence[str]]


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """Times are of the process's monotonic clock, in seconds, here and in FinishedSpan."""

    name: str
    at_s: float
    attributes: Attributes


@dataclass(frozen=True, slots=True)
class FinishedSpan:
    """``parent``: the `traceparent` of W3C Trace Context that came with the request."""

    name: str
    parent: str
    start_s: float
    end_s: float
    attributes: Attributes
    events: tuple[SpanEvent, ...] = ()


class SpanSink(Protocol):
    """Where spans go. ``add`` may be called from any thread and waits for nobody."""

    def add(self, span: FinishedSpan) -> None: ...

    def close(self) -> None:
        """Sends what is queued, for a bounded time. Blocks."""


def open_spans(config: ObservabilityConfig, process: str) -> SpanSink | None:
    """``process``: its name in the deployment. None: nothing is traced. Raises ModuleNotFoundError without the extra
    ``tracing``."""
    if config.otlp_endpoint is None:
        return None
    from cluster.otlp import OtlpSpans

    return OtlpSpans(config.otlp_endpoint, config.sampled_share, process)
