"""A real server whose API has one replica, two under load, and one again. Serve's delays are shortened."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.server import ServerProcess
from cluster.config import Config
from tests.support.settings import small_config
from tests.support.streaming import Streamed
from tests.support.waiting import eventually

pytestmark = [pytest.mark.ray, pytest.mark.model]

MAX_CONCURRENT = 8  # a replica is added above two calls for each
NUM_BUSY, NUM_CALM, NUM_TOKENS = 6, 2, 60
SCRIPT = """
from deploy import cli, launch

prepare = launch.prepare_environment

def prepared(folder):
    prepare(folder)
    from deploy import serve_app  # which imports Ray
    serve_app.LOOK_BACK_S, serve_app.UPSCALE_DELAY_S, serve_app.DOWNSCALE_DELAY_S = 2.0, 0.5, 2.0

launch.prepare_environment = prepared
cli.app()
"""


class QuicklyScaled(ServerProcess):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._command[1:3] = ["-c", SCRIPT]  # instead of the module


@pytest.fixture
def server(model_folder: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    config = small_config(str(model_folder), tmp_path)
    api = {"replicas": 1, "max_replicas": 2, "max_concurrent_requests": MAX_CONCURRENT}
    with QuicklyScaled(config.model_copy(update={"api": config.api.model_copy(update=api)})) as server:
        yield server


def test_replicas_of_the_api_follow_the_load_and_no_call_is_lost(server: ServerProcess) -> None:
    plain: dict[int, str] = {}

    def replicas_after(num_streams: int, drafting: str = "auto") -> int:
        streamed = Streamed(server.url, NUM_TOKENS, drafting)
        streamed.start(num_streams)
        streamed.wait_end()
        plain.update({} if plain else streamed.texts)
        assert (streamed.texts, streamed.errors) == ({number: plain[number] for number in range(num_streams)}, {})
        return len(server.workers("ServeReplica"))

    assert replicas_after(NUM_BUSY, "off") in (1, 2)
    eventually(lambda: replicas_after(NUM_BUSY) == 2)
    eventually(lambda: replicas_after(NUM_CALM) == 1)
    replicas_after(NUM_CALM)
