"""A real server with two replicas of the API, one of which is killed under load."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.server import ServerProcess
from cluster.config import SupervisionConfig
from tests.support.servers import served
from tests.support.settings import small_config
from tests.support.streaming import Streamed
from tests.support.waiting import eventually, gauge

pytestmark = [pytest.mark.ray, pytest.mark.model]

NUM_STREAMS = 8
NUM_TOKENS = 80


@pytest.fixture(scope="module")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    config = small_config(str(model_folder), tmp_path_factory.mktemp("state"))
    changes = {"api": config.api.model_copy(update={"replicas": 2}), "supervision": SupervisionConfig()}
    with served(config.model_copy(update=changes)) as server:
        yield server


def by_replica(http: httpx.Client, name: str, **labels: str) -> dict[str, float]:
    """A figure of /metrics, by the replica of the API that counts it; without those that have not counted it yet."""
    if not (page := http.get("/metrics")).is_success:
        return {}
    families = text_string_to_metric_families(page.text)
    samples = [one for family in families for one in family.samples if one.name == name]
    return {one.labels["api_replica"]: one.value for one in samples if labels.items() <= one.labels.items()}


def names(http: httpx.Client) -> set[str]:
    return set(by_replica(http, "outrider_requests_in_flight"))


def finished(http: httpx.Client, reason: str = "length") -> dict[str, float]:
    """Choices, by replica; of two, since a page lacks a replica that is late."""
    found: dict[str, float] = {}

    def both() -> bool:
        found.clear()
        found.update(by_replica(http, "outrider_choices_finished_total", finished_reason=reason))
        return len(found) == 2

    eventually(both)
    return found


def streams(server: ServerProcess, drafting: str = "auto") -> Streamed:
    streamed = Streamed(server.url, NUM_TOKENS, drafting)
    streamed.start(NUM_STREAMS)
    streamed.wait_flowing()
    return streamed


@pytest.fixture(scope="module")
def plain(server: ServerProcess) -> Mapping[int, str]:
    """The answers of the target alone."""
    streamed = Streamed(server.url, NUM_TOKENS, "off")
    streamed.start(NUM_STREAMS)
    streamed.wait_end()
    assert not streamed.errors
    with server.client() as http:
        eventually(lambda: sum(finished(http).values()) > NUM_STREAMS)  # the launch has made a call, too
    return streamed.texts


def test_both_answer_and_either_counts_for_both(server: ServerProcess, plain: Mapping[int, str]) -> None:
    with server.client() as http:
        before = finished(http)
        streamed = streams(server)
        streamed.wait_end()
        assert (streamed.texts, streamed.errors) == (plain, {})
        eventually(lambda: sum(finished(http).values()) == sum(before.values()) + NUM_STREAMS)
        first, *others = [finished(http) for _ in range(4)]  # of either replica, which take turns
    assert others == [first] * 3
    assert len(first) == 2
    assert all(count > before[name] for name, count in first.items()), "one replica got all streams"


def test_a_killed_replica_takes_only_its_own_streams_and_comes_back(server: ServerProcess, plain: Mapping[int, str]) -> None:
    with server.client() as http:
        before = finished(http)
        known, remaining = set(before), set[str]()
        killed, kept = server.workers("ServeReplica")
        streamed = streams(server, "off")  # as many passes as tokens: none ends before the kill
        killed.kill()
        streamed.wait_end()
        assert streamed.texts.items() <= plain.items()
        assert {type(error) for error in streamed.errors.values()} == {openai.APIConnectionError}, streamed.errors
        assert len(streamed.texts) + len(streamed.errors) == NUM_STREAMS

        def is_replaced() -> bool:
            """The killed one's name is known for a while beside those of the survivor and of the successor."""
            remaining.clear()
            remaining.update(names(http))
            return len(remaining) == 2 and len(remaining - known) == 1

        eventually(is_replaced)
        (survivor,) = known & remaining
        eventually(lambda: finished(http).get(survivor) == before[survivor] + len(streamed.texts))  # it has lost none
        eventually(lambda: finished(http, "abort").get(survivor) == finished(http, "error").get(survivor) == 0)
        pids = [process.pid for process in server.workers("ServeReplica")]
        assert (len(pids), kept.pid in pids, killed.pid in pids) == (2, True, False)

        def both_answer() -> bool:
            again = streams(server)
            again.wait_end()
            assert again.texts.items() <= plain.items()
            assert all("no target can be reached" in str(error) for error in again.errors.values()), again.errors
            return not again.errors and min(finished(http).values()) > 0  # a successor on a busy machine has no link yet

        eventually(both_answer)
        eventually(lambda: gauge(http, "outrider_target_running") == 0)  # requests of lost streams were aborted


def test_a_supervisor_that_hangs_is_killed_once(server: ServerProcess, plain: Mapping[int, str]) -> None:
    """Both replicas depend on it, and one of them watches it."""
    (hanging,) = server.workers("PoolSupervisor")
    hanging.suspend()
    eventually(lambda: [process.pid for process in server.workers("PoolSupervisor")] not in ([], [hanging.pid]))
    (successor,) = server.workers("PoolSupervisor")
    with server.client() as http:
        eventually(lambda: gauge(http, "outrider_target_ready") == 1 and gauge(http, "outrider_drafter_ready") == 2)
        eventually(lambda: sorted(by_replica(http, "outrider_supervisor_kills_total").values()) == [0, 1])
    assert [process.pid for process in server.workers("PoolSupervisor")] == [successor.pid]
