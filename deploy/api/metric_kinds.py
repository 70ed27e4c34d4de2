"""A metric of ``/metrics``, and constructors of those that are read from the status of targets and drafters."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from cluster.client import ClusterStatus, DrafterStatus, DraftingEffect, TargetStatus
from cluster.drafting_counts import DraftingCounts
from cluster.histograms import HistogramCounts

# Upper bounds in seconds. Metrics appends api.request_deadline_s (600 s by default) where it exceeds the last of them.
CALL_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0)
TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0, 600.0)
COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5)

Kind = Literal["counter", "gauge", "histogram"]
Reading = Iterable[tuple[tuple[str, ...], float]]  # label values, and the value
Readings = Reading | Iterable[tuple[tuple[str, ...], HistogramCounts]]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Args:
        name: without the prefix ``outrider_``, and without the suffix ``_total`` of counters.
        text: its description, a sentence.
        read: reads it from the cluster's status; None: this process counts it.
        vllm: vLLM's names for it, without the prefix ``vllm:``, each with the labels that it keeps beside ``model_name``.
            Other labels are aggregated.
        mean: aggregate by the mean, else by the sum.
        own: read from a part of the status that is of this process.
    """

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    read: Callable[[ClusterStatus], Readings] | None = None
    vllm: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    mean: bool = False
    own: bool = False


def counter(name: str, text: str, *vllm: str, labels: tuple[str, ...] = ()) -> Metric:
    return Metric(name, "counter", text, labels, vllm=dict.fromkeys(vllm, ()))


def histogram(name: str, text: str, *vllm: str, buckets: tuple[float, ...] = CALL_S) -> Metric:
    return Metric(name, "histogram", text, buckets=buckets, vllm=dict.fromkeys(vllm, ()))


def target_gauge(name: str, text: str, value: Callable[[TargetStatus], float], *vllm: str, mean: bool = False) -> Metric:
    def read(status: ClusterStatus) -> Reading:
        return [((target.name,), float(value(target))) for target in status.targets]

    return Metric(f"target_{name}", "gauge", text, ("target",), read=read, vllm=dict.fromkeys(vllm, ()), mean=mean)


def drafting_counter(name: str, text: str, value: Callable[[DraftingEffect], float]) -> Metric:
    return replace(target_gauge(name, text, lambda target: value(target.drafting)), kind="counter")


def drafter_metric(name: str, kind: Kind, text: str, value: Callable[[DrafterStatus], float | None]) -> Metric:
    def read(status: ClusterStatus) -> Reading:
        values = [((drafter.name,), value(drafter)) for drafter in status.drafters]
        return [(labels, float(number)) for labels, number in values if number is not None]

    return Metric(f"drafter_{name}", kind, text, ("drafter",), read=read)


def target_histogram(name: str, text: str, value: Callable[[TargetStatus], HistogramCounts | None]) -> Metric:
    def read(status: ClusterStatus) -> Readings:
        counts = [((target.name,), value(target)) for target in status.targets]
        return [(labels, one) for labels, one in counts if one is not None]

    return Metric(f"target_{name}", "histogram", text, ("target",), read=read)


def drafter_histogram(name: str, text: str, value: Callable[[DraftingCounts], HistogramCounts]) -> Metric:
    """A histogram of each drafter, over all targets."""

    def read(status: ClusterStatus) -> Readings:
        return [((drafter.name,), value(drafter.counts)) for drafter in status.drafters]

    return Metric(f"drafter_{name}", "histogram", text, ("drafter",), read=read)


def position_counter(name: str, text: str, value: Callable[[DraftingCounts], Sequence[int]]) -> Metric:
    def read(status: ClusterStatus) -> Reading:
        for drafter in status.drafters:
            for position, num in enumerate(value(drafter.counts)):
                yield (drafter.name, str(position)), float(num)

    return Metric(f"drafter_{name}", "counter", text, ("drafter", "position"), read=read)
