"""Processes of the real server are killed while it streams, the one that is missed most the last."""

from collections.abc import Mapping

import openai
import pytest

from benchmarks.server import ServerProcess
from tests.support.streaming import another_takes_over, answers, run, undrafted
from tests.support.waiting import eventually, gauge

pytestmark = [pytest.mark.ray, pytest.mark.model]
Texts = Mapping[int, str]


@pytest.fixture(scope="module")
def plain(server: ServerProcess) -> Texts:
    return undrafted(server)


def test_killed_drafters_change_no_token_and_come_back(server: ServerProcess, plain: Texts) -> None:
    with server.client() as http:
        restarts = gauge(http, "outrider_drafter_restarts_total")
        disturbed = run(server, kill="DrafterActor")
        assert (disturbed.texts, disturbed.errors) == (plain, {})
        eventually(lambda: gauge(http, "outrider_drafter_restarts_total") >= restarts + 2)
        eventually(lambda: gauge(http, "outrider_drafter_ready") == 2)
        verified = gauge(http, "outrider_drafter_verified_total")  # of both, for the router may prefer either

        def new_processes_draft() -> bool:
            assert run(server).texts == plain
            return gauge(http, "outrider_drafter_verified_total") > verified

        eventually(new_processes_draft)


def test_without_a_router_the_last_table_serves_and_another_takes_over(server: ServerProcess, plain: Texts) -> None:
    another_takes_over(server, "RouterActor", plain)


def test_a_supervisor_that_is_killed_finds_its_members_again(server: ServerProcess, plain: Texts) -> None:
    target, drafters = server.workers("TargetActor")[0].pid, [p.pid for p in server.workers("DrafterActor")]
    router, killed = server.workers("RouterActor")[0].pid, server.workers("PoolSupervisor")[0].pid
    disturbed = run(server, kill="PoolSupervisor")
    assert (disturbed.texts, disturbed.errors) == (plain, {})
    eventually(lambda: [p.pid for p in server.workers("PoolSupervisor")] not in ([], [killed]))
    with server.client() as http:
        eventually(lambda: gauge(http, "outrider_target_ready") == 1 and gauge(http, "outrider_drafter_ready") == 2)
    assert [p.pid for p in server.workers("TargetActor")] == [target]
    assert [p.pid for p in server.workers("DrafterActor")] == drafters
    assert [p.pid for p in server.workers("RouterActor")] == [router]
    server.workers("DrafterActor")[0].kill()
    with server.client() as http:
        eventually(lambda: gauge(http, "outrider_drafter_restarts_total") >= 1)
        eventually(lambda: gauge(http, "outrider_drafter_ready") == 2)


@pytest.mark.nightly  # beside tests/cluster/test_api_replicas.py
def test_a_supervisor_that_hangs_is_replaced(server: ServerProcess, plain: Texts) -> None:
    (hanging,) = server.workers("PoolSupervisor")
    hanging.suspend()
    disturbed = run(server)
    assert (disturbed.texts, disturbed.errors) == (plain, {})
    eventually(lambda: [p.pid for p in server.workers("PoolSupervisor")] not in ([], [hanging.pid]))
    with server.client() as http:
        eventually(lambda: gauge(http, "outrider_target_ready") == 1 and gauge(http, "outrider_drafter_ready") == 2)
        assert gauge(http, "outrider_supervisor_kills_total") == 1
        assert "did not answer and was killed" in str(http.get("/v1/outrider/status").json()["notes"])


def test_a_killed_target_ends_its_streams_with_an_error_and_serves_again(server: ServerProcess, plain: Texts) -> None:
    killed = run(server, kill="TargetActor", max_tokens=1500, drafting="off")  # so long that none ends before
    assert not killed.texts
    assert {type(error) for error in killed.errors.values()} == {openai.APIError}
    assert all("again" in str(error) for error in killed.errors.values()), killed.errors
    with server.client() as http:
        eventually(lambda: gauge(http, "outrider_target_ready") == 1)
        eventually(lambda: gauge(http, "outrider_drafter_ready") == 2)
        eventually(lambda: answers(http))
    assert run(server).texts == plain
