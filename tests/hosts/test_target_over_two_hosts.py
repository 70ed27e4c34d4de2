"""A target whose ranks are on two hosts, drafters spread over both, and one on a third host that reads its hidden states."""

import pytest

from benchmarks.host_fleet import POOL
from cluster.config import DrafterConfig, HiddenStateOptions, NgramOptions, Resources
from deploy.status import PATH
from tests.hosts.conftest import Served
from tests.support.streaming import Streamed
from tests.support.waiting import eventually, gauge

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.nightly]

NUM_TOKENS = 40
RANK_CPUS = 1.55  # one has room on either host, and two on none


def texts(url: str, drafting: str) -> dict[int, str]:
    """Half of the streams are sampled."""
    streamed = Streamed(url, NUM_TOKENS, drafting)
    streamed.start(2)
    streamed.wait_end()
    assert not streamed.errors
    return streamed.texts


def test_ranks_hidden_states_and_spread_drafters_work_between_hosts(served_hosts: Served) -> None:
    """Last: it takes the place of the server that the other tests use."""
    hosts, former = served_hosts.hosts, served_hosts.server
    plain = texts(former.url, "off")
    former.stop()
    config = former.config

    def at(host: str, cpus: float) -> Resources:
        return Resources(cpus=cpus, gpus=0, threads=1, node_labels={POOL: host})

    target = {"replicas": 1, "tensor_parallel": 2, "resources": at("target", RANK_CPUS)}
    drafters = (
        DrafterConfig(name="ngram", options=NgramOptions(), replicas=2, resources=at("target", 0.3)),
        DrafterConfig(
            name="dspark",
            remote=True,
            device="cpu",
            options=HiddenStateOptions(kind="dspark", path="dspark"),
            resources=at("front", 0.3),
        ),
    )
    config = config.model_copy(update={"target": config.target.model_copy(update=target), "drafters": drafters})
    with former.of(config) as server:
        server.enter_at(hosts.head)  # where Serve always has a proxy
        with server.client() as http:
            ranks = [*server.workers("TargetActor"), *server.workers("RankActor")]
            assert [sum(rank in host.processes() for rank in ranks) for host in (hosts.first, hosts.second)] == [1, 1]
            eventually(lambda: gauge(http, "outrider_drafter_ready") == 3)
            found = server.workers("DrafterActor")
            by_host = [sum(one in host.processes() for one in found) for host in (hosts.front, hosts.first, hosts.second)]
            assert by_host == [1, 1, 1]
            for drafting in ("off", "ngram", "dspark"):
                assert texts(server.url, drafting) == plain
            (dspark,) = [one for one in http.get(PATH).json()["drafters"] if one["name"] == "dspark"]
            assert dspark["num_proposed"] > 20
