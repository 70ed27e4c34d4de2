"""Round trips of the data plane: the payloads are those that the figures name, and every trip is timed."""

import pytest

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
    monkeypatch.setattr(transport_probe, "TRIPS_PER_TURN", 10)
    times = transport_probe.round_trips(2)
    assert list(times) == ["unix_1kb", "unix_round_32", "grpc_1kb", "grpc_round_32"]
    assert all(len(trips_s) == 20 and min(trips_s) > 0 for trips_s in times.values())
