"""One server over four hosts, with mutual TLS between them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks import hosts
from benchmarks.host_fleet import Fleet, fleet
from benchmarks.hosts import HostedServer
from cluster.config import SupervisionConfig
from tests.support.certificates import Authority
from tests.support.settings import ALWAYS_DRAFTED, small_config
from tests.support.waiting import eventually, gauge


@dataclass(frozen=True)
class Served:
    hosts: Fleet
    server: HostedServer


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
