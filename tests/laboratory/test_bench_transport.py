"""The benchmark of the data plane measures what it says: the payloads are those it names, and every trip is timed."""

import math

import pytest

from benchmarks import transport
from benchmarks.report import BenchOptions
from cluster.transport.codec import decode, encode
from profiler import transport_probe


def test_one_kb_is_1024_bytes() -> None:
    assert len(encode(transport_probe.one_kb())) == 1024


def test_an_answer_extends_what_was_committed() -> None:
    down = transport_probe.down_round(32)
    up = transport_probe.up_round(down)
    assert decode(encode(up)) == up
    for extend, proposal in zip(down.extends, up.proposals, strict=True):
        assert proposal.base_len == extend.base_len + len(extend.token_ids)
        assert len(proposal.token_ids) == len(proposal.confidences) == transport_probe.DRAFT_LEN


def test_every_transport_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "NUM_TURNS_QUICK", 2)
    monkeypatch.setattr(transport_probe, "TRIPS_PER_TURN", 10)
    monkeypatch.setattr(transport_probe, "BUSY_TRIPS_PER_TURN", 1)
    result = transport.run(BenchOptions(quick=True))
    assert all(math.isfinite(value) and value > 0 for value in result.figures.values())
    assert [row[0] for row in result.tables[0].rows] == [
        "raw_socket_1kb",
        "unix_1kb",
        "unix_round_32",
        "grpc_1kb",
        "grpc_round_32",
        "unix_busy",
        "unix_busy_default",
        "grpc_busy",
        "grpc_busy_default",
    ]
    assert all(row[3] == (2 if "busy" in str(row[0]) else 20) for row in result.tables[0].rows)
    for row in result.tables[0].rows:
        assert result.figures[f"{row[0]}_p50_us"] <= result.figures[f"{row[0]}_p99_us"]
