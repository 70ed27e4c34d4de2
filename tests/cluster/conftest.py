"""One real server for the suites that only talk to it, over the real model."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before anything imports Ray: it reads these at import, and its processes inherit them.
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # loopback only

from benchmarks.server import ServerProcess
from tests.support.servers import served
from tests.support.settings import ALWAYS_DRAFTED, small_config
from tests.support.waiting import eventually, gauge


@pytest.fixture(scope="session")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Who drafts shows in the figures, whatever the drafts are worth on this machine. Other programs seem to take nearly all
    memory: Ray's monitor, which would end the server's processes, is off."""
    full = {**os.environ, "RAY_memory_usage_threshold": "0.01"}
    config = small_config(str(model_folder), tmp_path_factory.mktemp("state"))
    with served(config.model_copy(update={"planner": ALWAYS_DRAFTED}), full) as server:
        with server.client() as http:
            eventually(lambda: gauge(http, "outrider_drafter_ready") == 2)
        yield server
