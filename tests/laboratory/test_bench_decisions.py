"""The benchmark of decisions measures what it says: as many requests, drafters and places, and every decision is timed."""

import math
import random

import pytest

from benchmarks import decisions
from benchmarks.report import BenchOptions
from cluster.types import RoutingTable


def test_traffic_is_of_the_size_that_is_promised_and_goes_on() -> None:
    traffic = decisions.Traffic(random.Random(0))
    assert (len(traffic.pool), sum(member.capacity for member in traffic.pool)) == (8, 256)
    first = traffic.report()
    assert len(first.requests) == 1000
    assert first.observations == ()  # nobody has a place yet
    placed = {request.request_id: (f"d{i % 8}",) for i, request in enumerate(first.requests[:256])}
    traffic.follow(RoutingTable(1, placed))
    second = traffic.report()
    assert len(second.requests) == 1000
    assert 200 <= len(second.observations) <= 256
    assert len(second.scores) > 150
    assert second.table_version == 1
    ids = {request.request_id for request in first.requests}
    assert 0 < sum(request.request_id not in ids for request in second.requests) < 120


def test_a_round_is_of_the_size_that_is_promised() -> None:
    views = decisions.sequences(random.Random(0))
    assert len(views) == 256
    assert all(view.num_drafted == 7 and view.running for view in views)


def test_everything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "NUM_SLOTS_QUICK", 3)
    monkeypatch.setattr(decisions, "NUM_PLANS_QUICK", 5)
    monkeypatch.setattr(decisions, "NUM_ROUNDS_TIMED_QUICK", 5)
    monkeypatch.setattr(decisions, "_WARM_UP_SLOTS", 2)
    figures = decisions.run(BenchOptions(quick=True)).figures
    assert {
        "slot_p99_ms",
        "slot_p99_cpu_ms",
        "round_p50_ms",
        "round_p50_cpu_ms",
        "round_python_ms.64",
        "publish_python_ms.256",
        "plan_gap_ms.64",
    } <= set(figures)
    assert {"plan_p50_ms", "plan_p50_cpu_ms"} <= set(figures)
    assert all(math.isfinite(value) and value > 0 for value in figures.values())
    assert figures["slot_p99_ms"] >= figures["slot_p50_ms"]
