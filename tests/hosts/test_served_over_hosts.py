"""A server over hosts with addresses of their own, each of which has a second interface that no other host reaches."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.host_fleet import Fleet
from benchmarks.hosts import PREFIX, Host, Hosts, why_not
from benchmarks.server import ServerFailed
from tests.hosts.conftest import Served
from tests.support.streaming import Streamed
from tests.support.waiting import eventually, gauge

pytestmark = [pytest.mark.ray, pytest.mark.model]

NUM_TOKENS = 40


def entries(hosts: Fleet) -> tuple[Host, ...]:
    """Serve has a proxy on the head and beside each replica of the API."""
    return hosts.head, hosts.front, hosts.first


def listening_at(process: psutil.Process) -> set[str]:
    """The IPv4 addresses where a process listens, as its own host sees it."""
    proc = Path(f"/proc/{process.pid}")
    sockets = {os.readlink(link) for link in proc.glob("fd/*")}
    lines = [line.split() for name in ("tcp", "tcp6") for line in (proc / "net" / name).read_text().splitlines()[1:]]
    heard = [
        local.partition(":")[0] for _, local, _, state, *rest in lines if state == "0A" and f"socket:[{rest[5]}]" in sockets
    ]
    return {".".join(str(part) for part in reversed(bytes.fromhex(address[-8:]))) for address in heard}


@pytest.mark.skipif(why_not() is not None, reason="no network namespaces")
def test_the_client_keeps_its_address_on_the_wire_when_hosts_come_and_go() -> None:
    """Else what hosts send to it is lost, for as long as their ARP caches are wrong."""
    with Hosts() as network:
        address = Path(f"/sys/class/net/{network.name}/address")
        before = address.read_text()
        for host in [network.add() for _ in range(3)]:
            assert address.read_text() == before
            host.remove()
        assert address.read_text() == before


@pytest.mark.skipif(why_not() is not None, reason="no network namespaces")
def test_networks_that_begin_at_once_are_apart_and_remove_what_a_killed_process_left() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    for name in (stale := [f"{PREFIX}{number}" for number in range(300, 304)]):
        subprocess.run(["ip", "link", "add", name, "type", "bridge"], check=True)
        subprocess.run(["ip", "link", "set", name, "alias", f"of process {ended.pid}"], check=True)
    with ExitStack() as stack, ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: stack.enter_context(Hosts()), range(4)))
        assert len({network.folder for network in found if network.folder.is_dir()}) == 4
        assert not {path.name for path in Path("/sys/class/net").iterdir()} & set(stale)


def test_clients_enter_at_any_host_and_get_the_same_tokens(served_hosts: Served) -> None:
    """Half of the streams are sampled. The proxy is HAProxy with Outrider's rules: through Serve's own, each piece of a
    stream would be a call of Ray."""
    texts = []
    for host in entries(served_hosts.hosts):
        url = f"http://{host.address}:{served_hosts.server.config.api.port}"
        assert httpx.get(f"{url}/-/routes", trust_env=False).status_code == httpx.codes.NOT_FOUND
        streamed = Streamed(url, NUM_TOKENS)
        streamed.start(2)
        streamed.wait_end()
        assert not streamed.errors
        texts.append(streamed.texts)
    assert texts[0] == texts[1] == texts[2]


def test_status_and_dashboard_are_the_same_at_any_host(served_hosts: Served) -> None:
    for host in entries(served_hosts.hosts):
        served_hosts.server.enter_at(host)
        with served_hosts.server.client() as http:
            status = http.get("/v1/outrider/status").json()
            assert [one["state"] for one in status["targets"] + status["drafters"]] == ["ready"] * 4
            assert status["tls_not_after_s"]
            assert http.get("/dashboard").status_code == 200
            eventually(lambda http=http: gauge(http, "outrider_requests_total") > 0)  # type: ignore[misc]
    served_hosts.server.enter_at(served_hosts.hosts.front)


def test_drafts_travel_between_hosts(served_hosts: Served) -> None:
    with served_hosts.server.client() as http:
        before = gauge(http, "outrider_drafter_verified_total", "ngram")
        streamed = Streamed(served_hosts.server.url, NUM_TOKENS, "ngram")
        streamed.start(2)
        streamed.wait_end()
        eventually(lambda: gauge(http, "outrider_drafter_verified_total", "ngram") > before)


def test_parts_are_on_their_hosts_and_targets_listen_at_the_address_that_ray_was_given(served_hosts: Served) -> None:
    hosts, server = served_hosts.hosts, served_hosts.server
    targets = server.workers("TargetActor")
    for host in (hosts.first, hosts.second):
        (target,) = [process for process in targets if process in host.processes()]
        assert host.address in listening_at(target)  # beside it, Ray listens everywhere
    drafters, replicas = server.workers("DrafterActor"), server.workers("ServeReplica")
    assert len(drafters) == 2
    assert not set(server.workers("PoolSupervisor")) & set(hosts.head.processes())
    assert set(drafters) <= set(hosts.front.processes())
    assert [sum(one in host.processes() for one in replicas) for host in (hosts.front, hosts.first)] == [1, 1]


def test_a_second_server_of_the_name_is_refused_and_ends_nothing(served_hosts: Served) -> None:
    server = served_hosts.server
    with (
        pytest.raises(ServerFailed, match=r"belongs to `outrider serve` on [0-9.]+, which still runs"),
        server.of(server.config),
    ):
        pass
    with server.client() as http:
        assert {one["state"] for one in http.get("/v1/outrider/status").json()["targets"]} == {"ready"}
