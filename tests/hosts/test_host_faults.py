"""Faults of whole hosts and of the network between them, each once, as `outrider bench faults --hosts` measures them."""

from typing import Any

import pytest

from deploy.status import PATH
from tests.hosts.conftest import NUM_STREAMS, NUM_TOKENS, Served
from tests.support.streaming import Streamed
from tests.support.waiting import DEADLINE_S, eventually, gauge

pytestmark = [pytest.mark.ray, pytest.mark.model]

RESUMED = "outrider_requests_resumed_total"
QUICK = ("host_lost", "host_cut_off")  # the others are measured each night


@pytest.mark.parametrize("name", QUICK)
def test_streams_go_on_at_another_host_with_the_same_tokens(served_hosts: Served, name: str) -> None:
    assert served_hosts.measured(name).num_resumed > 0


def test_a_host_that_drains_ends_its_streams_and_gets_no_new_ones(served_hosts: Served) -> None:
    """When it leaves, nothing has to resume; with no drain, `host_lost` resumes streams."""
    hosts, server = served_hosts.hosts, served_hosts.server
    with server.client() as http:

        def targets(state: str) -> list[dict[str, Any]]:
            return [one for one in http.get(PATH).json()["targets"] if one["state"] == state]

        num_resumed = gauge(http, RESUMED)
        before = Streamed(server.url, NUM_TOKENS)
        before.start(NUM_STREAMS)
        before.wait_flowing()
        hosts.second.drain(hosts.head, DEADLINE_S)
        eventually(lambda: len(targets("draining")) == 1)
        before.wait_end()
        eventually(lambda: targets("draining")[0]["num_running"] == 0)
        after = Streamed(server.url, NUM_TOKENS)
        after.start(NUM_STREAMS)
        after.wait_flowing()
        eventually(lambda: targets("ready")[0]["num_running"] == NUM_STREAMS)
        hosts.replace(hosts.second)
        after.wait_end()
        assert before.errors == after.errors == {}
        assert before.texts == after.texts
        assert gauge(http, RESUMED) == num_resumed
        hosts.wait_joined()
        eventually(lambda: len(targets("ready")) == 2)
