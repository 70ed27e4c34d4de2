"""A real server whose target replicas have two ranks each: the tokens of one rank, and one replica's loss of a rank."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.server import ServerProcess
from cluster.config import Config, Resources
from tests.support.servers import served, served_without_ray
from tests.support.settings import small_config
from tests.support.streaming import MODEL, Streamed, undrafted
from tests.support.tiny_model import write_tiny_model
from tests.support.waiting import eventually, gauge

pytestmark = pytest.mark.ray

NUM_STREAMS = 4
LONG = 380  # tokens: the streams flow until a rank is killed


def config_of(model: Path, state: Path, num_ranks: int, num_replicas: int) -> Config:
    base = small_config(str(model), state)
    resources = Resources(cpus=0.25, gpus=0, threads=1)
    target = {"tensor_parallel": num_ranks, "replicas": num_replicas, "kv_cache_gb": 0.02, "resources": resources}
    return base.model_copy(
        update={
            "model": base.model.model_copy(update={"max_model_len": 512}),
            "target": base.target.model_copy(update=target),
            "drafters": base.drafters[:1],
        }
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three key-value heads, which two ranks hold unevenly. Named as the model that streams ask for."""
    shape = {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3}
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / MODEL, **shape)


@pytest.fixture(scope="module")
def of_one_rank(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    with served_without_ray(config_of(model, tmp_path_factory.mktemp("state"), 1, 1)) as url:
        return long_streams(url).texts


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with served(config_of(model, tmp_path_factory.mktemp("state"), 2, 2)) as server:
        yield server


def pids(server: ServerProcess) -> set[int]:
    """Of all ranks of all replicas."""
    return {worker.pid for actor in ("RankActor", "TargetActor") for worker in server.workers(actor)}


def long_streams(url: str) -> Streamed:
    streamed = Streamed(url, LONG, drafting="off")
    streamed.start(NUM_STREAMS)
    streamed.wait_end()
    return streamed


def test_two_ranks_serve_the_tokens_of_one(server: ServerProcess, of_one_rank: dict[int, str]) -> None:
    assert len(set(of_one_rank.values())) > 1
    assert long_streams(server.url).texts == of_one_rank
    drafted = Streamed(server.url, 48)
    drafted.start(NUM_STREAMS)
    drafted.wait_end()
    assert drafted.texts == undrafted(server)


@pytest.mark.parametrize("killed", ["RankActor", pytest.param("TargetActor", marks=pytest.mark.nightly)])
def test_a_lost_rank_ends_its_replica_and_no_stream(server: ServerProcess, of_one_rank: dict[int, str], killed: str) -> None:
    """The other replica continues all streams, and the whole group is replaced."""
    with server.client() as http:
        num_resumed = gauge(http, "outrider_requests_resumed_total")

        def resumed() -> bool:
            """False if all streams of the replica had ended."""
            eventually(lambda: gauge(http, "outrider_target_ready") == 2 and len(pids(server)) == 4)
            before = pids(server)
            streamed = Streamed(server.url, LONG, drafting="off")
            streamed.start(NUM_STREAMS)
            streamed.wait_flowing()
            server.workers(killed)[0].kill()
            streamed.wait_end()
            assert (streamed.texts, streamed.errors) == (of_one_rank, {})
            # Until the lost group is replaced, the other one being as it was.
            eventually(lambda: len(now := pids(server)) == 4 and len(now & before) == 2)
            eventually(lambda: gauge(http, "outrider_target_ready") == 2)
            assert len(pids(server) & before) == 2, "the other replica was restarted, too"
            return gauge(http, "outrider_requests_resumed_total") > num_resumed

        eventually(resumed)
    assert long_streams(server.url).texts == of_one_rank
