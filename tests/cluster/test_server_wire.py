"""The real server over raw sockets: clients that hang up, that send nothing more, and that speak something else."""

import json
import resource
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from ipaddress import ip_address

import httpx
import openai
import psutil
import pytest

from benchmarks.server import ServerProcess
from deploy.local_ray import descendants
from tests.support import wire
from tests.support.waiting import eventually, gauge

pytestmark = [pytest.mark.ray, pytest.mark.model]

MODEL = "smollm2-135m"
NUM_CALLS = 40
LONG = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True}


def long_call(**fields: object) -> tuple[bytes, bytes]:
    return wire.post("/v1/completions", json.dumps(LONG | fields).encode())


def working(http: httpx.Client) -> float:
    """Calls and sequences that somebody still works for."""
    return gauge(http, "outrider_requests_in_flight") + num_in_target(http)


def num_in_target(http: httpx.Client) -> float:
    return gauge(http, "outrider_target_running") + gauge(http, "outrider_target_waiting")


def cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    """A client of a server that works for nobody, before and after."""
    with server.client() as client:
        eventually(lambda: working(client) == 0)
        yield client
        eventually(lambda: working(client) == 0)
        assert gauge(client, "outrider_requests_queued") == 0
        eventually(lambda: gauge(client, "outrider_target_kv_usage_ratio") == 0)


def in_one_segment(url: str) -> socket.socket:
    connection = wire.connect(url)
    connection.sendall(b"".join(long_call()))
    return connection


def in_two_segments(url: str) -> socket.socket:
    connection = wire.connect(url)
    head, body = long_call()
    connection.sendall(head)
    assert wire.exchange(url, wire.get("/-/routes")).status == 404  # by the proxy itself, which so has read the head
    connection.sendall(body)
    return connection


def streaming(url: str) -> socket.socket:
    connection = wire.connect(url)
    connection.sendall(b"".join(long_call(stream=True)))
    return connection


def with_a_long_prompt(url: str) -> socket.socket:
    connection = wire.connect(url)
    connection.sendall(b"".join(long_call(prompt=[11] * 1200, max_tokens=400)))
    return connection


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("call", [in_one_segment, in_two_segments, streaming, with_a_long_prompt])
def test_nothing_is_left_of_calls_that_hang_up(
    server: ServerProcess, http: httpx.Client, call: Callable[[str], socket.socket], reset: bool
) -> None:
    with ThreadPoolExecutor(8) as pool:
        connections = list(pool.map(lambda _: call(server.url), range(NUM_CALLS // 2)))
    if call is streaming:
        for connection in connections:
            assert connection.recv(1)
    # Until the target tells of all of them: its figures are up to a second old, and those from before would pass below.
    eventually(lambda: num_in_target(http) == len(connections))
    for connection in connections:
        wire.hang_up(connection, reset=reset)
    eventually(lambda: working(http) == 0)


def test_nothing_is_left_of_calls_that_hang_up_in_the_queue(server: ServerProcess, http: httpx.Client) -> None:
    with ExitStack() as running:
        for _ in range(server.config.api.max_concurrent_requests // 16):
            connection = running.enter_context(wire.connect(server.url))
            connection.sendall(b"".join(long_call(n=16)))
        eventually(lambda: num_in_target(http) == server.config.api.max_concurrent_requests)
        waiting = [in_two_segments(server.url) for _ in range(NUM_CALLS)]
        eventually(lambda: gauge(http, "outrider_requests_queued") == NUM_CALLS)
        for connection in waiting:
            wire.hang_up(connection, reset=False)
        eventually(lambda: gauge(http, "outrider_requests_queued") == 0)
        eventually(lambda: gauge(http, "outrider_requests_in_flight") == 16)


def test_nothing_is_left_of_the_official_client_s_time_outs_and_the_proxy_rests(
    server: ServerProcess, http: httpx.Client
) -> None:
    watched = server.proxies()
    assert watched
    before_s, start_s = cpu_s(watched), time.monotonic()
    num_gone = gauge(http, "outrider_requests_total", "499")

    def time_out(_: int) -> None:
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=2.0) as client,
            pytest.raises(openai.APITimeoutError),
        ):
            client.completions.create(model=MODEL, prompt="Once", max_tokens=1500, extra_body={"ignore_eos": True})

    with ThreadPoolExecutor(NUM_CALLS) as pool:
        list(pool.map(time_out, range(NUM_CALLS)))
    eventually(lambda: gauge(http, "outrider_requests_total", "499") > num_gone)
    eventually(lambda: working(http) == 0)
    assert cpu_s(watched) - before_s < 0.5 * (time.monotonic() - start_s), "the proxy spins"


def test_malformed_requests_are_refused_in_the_shape_of_errors(server: ServerProcess, http: httpx.Client) -> None:
    requests = wire.malformed(300, seed=2, model=MODEL)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda request: wire.exchange(server.url, request[1]), requests))
    for (kind, sent), answer in zip(requests, answers, strict=True):
        assert 400 <= answer.status < 500, (kind, sent[:200], answer)
        answer.error()


def test_a_trailer_is_no_header(server: ServerProcess, http: httpx.Client) -> None:
    body = json.dumps({"model": MODEL, "prompt": "Once", "max_tokens": 1}).encode()
    content_type = ["Content-Type: application/json"]
    assert wire.exchange(server.url, wire.chunked("/v1/completions", body, content_type, ["X-Any: a"])).status == 200
    assert wire.exchange(server.url, wire.chunked("/v1/completions", body, [], content_type)).status == 400


def test_every_process_listens_at_loopback_alone(server: ServerProcess) -> None:
    """Ray's and Serve's ports run code for whoever has the token."""
    addresses = {
        (process.name(), ip_address(connection.laddr.ip.removeprefix("::ffff:")))
        for process in descendants(server.pid)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert {name for name, _ in addresses} >= {"raylet", "gcs_server", "haproxy"}
    assert {(name, address) for name, address in addresses if not address.is_loopback} == set()


def test_a_killed_proxy_is_back_with_the_same_replicas(server: ServerProcess, http: httpx.Client) -> None:
    replicas, wrappers = server.workers("ServeReplica"), {process.ppid() for process in server.proxies()}
    killed = server.proxies()
    for process in killed:
        process.kill()
    eventually(lambda: answers(server.url), deadline_s=30.0)  # Serve alone takes a minute
    assert server.workers("ServeReplica") == replicas
    assert {process.ppid() for process in server.proxies()} <= wrappers
    assert not set(server.proxies()) & set(killed)


def answers(url: str) -> bool:
    try:
        return wire.exchange(url, wire.get("/v1/models")).status == 200
    except ConnectionError:
        return False


def test_half_sent_headers_stop_nobody_and_are_given_up(server: ServerProcess, http: httpx.Client) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with wire.half_headers(server.url, min(4200, hard // 5)) as waiting:
            assert wire.exchange(server.url, wire.get("/v1/models")).status == 200
            answers = [wire.receive(connection) for connection in waiting[-10:]]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [(answer.status, answer.error()["code"]) for answer in answers] == [(408, "timeout")] * 10
