"""One server over four hosts, with mutual TLS between them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks import hosts
from benchmarks.fault_rows import NUM_ARRIVING, RowResult, Turns
from benchmarks.host_fleet import Fleet, fleet
from benchmarks.host_rows import HostRows
from benchmarks.hosts import HostedServer
from benchmarks.load import LoadRequest
from cluster.config import SupervisionConfig
from tests.support.certificates import Authority
from tests.support.settings import ALWAYS_DRAFTED, small_config
from tests.support.waiting import eventually, gauge

NUM_STREAMS, NUM_TOKENS = 3, 160  # more streams than come with a fault


@dataclass(frozen=True)
class Served:
    hosts: Fleet
    server: HostedServer

    def measured(self, name: str) -> RowResult:
        """A row of `outrider bench faults --hosts`, once, in which no promise was broken."""
        assert NUM_STREAMS > NUM_ARRIVING
        asks = [
            LoadRequest(f"stream-{i}", tuple(range(50 + i, 90 + i)), NUM_TOKENS, temperature=0.8 * (i % 2), seed=i)
            for i in range(NUM_STREAMS)
        ]
        rows = HostRows(self.server, self.hosts)
        turns = Turns([row for row in rows.table() if row.name == name], num_times=1)
        rows.measure(turns, asks)
        (result,) = turns.results()
        assert (result.num_wrong_tokens, result.num_lost, result.num_leaked, result.complaints) == (0, 0, 0, [])
        assert not rows.lost
        return result


@pytest.fixture(scope="session")
def served_hosts(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Skips where there are no network namespaces. Clients enter at the front, unless a test says otherwise."""
    if reason := hosts.why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("hosts")
    config = small_config(str(model_folder), folder / "state")
    cluster = config.cluster.model_copy(update={"tls": Authority().issue(folder / "certificates")})
    changes = {"planner": ALWAYS_DRAFTED, "cluster": cluster, "supervision": SupervisionConfig(quarantine_restarts=1000)}
    with fleet() as found, found.server(config.model_copy(update=changes)) as server:
        with server.client() as http:
            eventually(lambda: gauge(http, "outrider_drafter_ready") == 2)
            eventually(lambda: gauge(http, "outrider_target_ready") == 2)
        yield Served(found, server)
