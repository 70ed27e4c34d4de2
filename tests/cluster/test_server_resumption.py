"""A real server with two target replicas: streams outlast the loss of one, killed or hanging."""

import signal
from collections.abc import Iterator, Mapping

import pytest

from benchmarks.server import ServerProcess
from cluster.config import Resources, SupervisionConfig
from tests.support.servers import served
from tests.support.settings import small_config
from tests.support.streaming import Streamed, undrafted
from tests.support.waiting import eventually, gauge

pytestmark = [pytest.mark.ray, pytest.mark.model]

NUM_TOKENS = 120


@pytest.fixture(scope="module")
def server(model_folder: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    config = small_config(str(model_folder), tmp_path_factory.mktemp("state"))
    target = {"replicas": 2, "resources": Resources(cpus=0.25, gpus=0, threads=1)}
    changes = {"target": config.target.model_copy(update=target), "supervision": SupervisionConfig()}
    with served(config.model_copy(update=changes)) as server:
        yield server


@pytest.fixture(scope="module")
def plain(server: ServerProcess) -> Mapping[int, str]:
    with server.client() as http:
        eventually(lambda: gauge(http, "outrider_target_ready") == 2)
    return undrafted(server, NUM_TOKENS)


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGKILL, id="killed"), pytest.param(signal.SIGSTOP, id="hanging", marks=pytest.mark.nightly)],
)
def test_streams_of_a_lost_target_go_on(server: ServerProcess, plain: Mapping[int, str], number: signal.Signals) -> None:
    with server.client() as http:
        num_resumed = gauge(http, "outrider_requests_resumed_total")

        def resumed() -> bool:
            """False if all streams of the target had ended."""
            streamed = Streamed(server.url, NUM_TOKENS)
            streamed.start(4)
            streamed.wait_flowing()
            lost = server.workers("TargetActor")[0]
            lost.send_signal(number)
            streamed.wait_end()
            assert (streamed.texts, streamed.errors) == (plain, {})
            eventually(lambda: len(now := [p.pid for p in server.workers("TargetActor")]) == 2 and lost.pid not in now)
            eventually(lambda: gauge(http, "outrider_target_ready") == 2)
            return gauge(http, "outrider_requests_resumed_total") > num_resumed

        eventually(resumed)
    assert len(server.workers("TargetActor")) == 2
