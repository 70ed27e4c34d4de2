"""Faults of whole hosts and of the network between them, each once, as `outrider bench faults --hosts` measures them."""

import pytest

from benchmarks.fault_rows import NUM_ARRIVING, Turns
from benchmarks.host_rows import HostRows
from benchmarks.load import LoadRequest
from tests.hosts.conftest import Served

pytestmark = [pytest.mark.ray, pytest.mark.model]

NUM_STREAMS, NUM_TOKENS = 3, 160  # more streams than come with a fault
QUICK = ("host_lost", "host_cut_off")  # the others are measured each night


@pytest.fixture(scope="module")
def rows(served_hosts: Served) -> HostRows:
    return HostRows(served_hosts.server, served_hosts.hosts)


@pytest.mark.parametrize("name", QUICK)
def test_streams_go_on_at_another_host_with_the_same_tokens(rows: HostRows, name: str) -> None:
    assert NUM_STREAMS > NUM_ARRIVING
    asks = [
        LoadRequest(f"stream-{i}", tuple(range(50 + i, 90 + i)), NUM_TOKENS, temperature=0.8 * (i % 2), seed=i)
        for i in range(NUM_STREAMS)
    ]
    turns = Turns([row for row in rows.table() if row.name == name], num_times=1)
    rows.measure(turns, asks)
    (result,) = turns.results()
    assert (result.num_wrong_tokens, result.num_lost, result.num_leaked, result.complaints) == (0, 0, 0, [])
    assert result.num_resumed > 0
    assert not rows.lost
