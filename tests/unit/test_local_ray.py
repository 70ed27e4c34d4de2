"""What a Ray cluster of this machine is started with."""

import os
import socket
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import grpc
import pytest
from ray._private.ray_constants import WORKER_PROCESS_SETUP_HOOK_ENV_VAR
from ray._private.runtime_env.setup_hook import load_and_execute_setup_hook
from ray.serve.schema import ProxyStatus

from cluster.errors import InvalidField
from deploy import local_ray
from deploy.deployment import ALIVE, answering_host, asks_for_token
from deploy.local_ray import LaunchError, free_port, prepare_environment


def test_ray_asks_for_a_token_that_only_this_user_can_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    prepare_environment(tmp_path)
    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert len(token.read_text()) == 64


def test_processes_of_serve_on_a_joined_cluster_find_a_wrapped_haproxy() -> None:
    """On whatever machine they are, before they import Serve. Its sockets control it, and are this user's alone."""
    with patch.dict(os.environ, {"RAY_SERVE_HAPROXY_NBTHREAD": "3"}):
        given = local_ray.joined_environment()
        assert (given["RAY_SERVE_ENABLE_HA_PROXY"], given["RAY_SERVE_HAPROXY_NBTHREAD"]) == ("1", "3")
        for name in ("BINARY_PATH", "SOCKET_PATH"):
            os.environ.pop(f"RAY_SERVE_HAPROXY_{name}", None)
        assert load_and_execute_setup_hook(given[WORKER_PROCESS_SETUP_HOOK_ENV_VAR]) is None
        script, admin = (Path(os.environ[f"RAY_SERVE_HAPROXY_{name}"]) for name in ("BINARY_PATH", "SOCKET_PATH"))
    assert stat.S_IMODE(admin.parent.stat().st_mode) == 0o700
    assert "HAProxy version" in subprocess.run([script, "-v"], capture_output=True, text=True, check=True).stdout


def test_a_name_in_tmp_that_another_has_taken_stops_nothing(tmp_path: Path) -> None:
    own = local_ray._private_folder(tmp_path)
    assert local_ray._private_folder(tmp_path) == own
    own.rmdir()
    own.symlink_to(tmp_path)
    other = local_ray._private_folder(tmp_path)
    assert other != own
    assert stat.S_IMODE(other.stat().st_mode) == 0o700


def test_a_free_port_is_not_of_those_that_the_kernel_gives_away() -> None:
    """Ray's own processes took such a port between the choice and the start of the server that it was for."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    if first < local_ray.PORTS.stop:
        pytest.skip(f"this kernel gives away the ports from {first}")
    chosen = {free_port() for _ in range(20)}
    assert len(chosen) > 1
    assert not any(first <= port <= last for port in chosen)


def test_a_port_in_use_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setattr(local_ray, "PORTS", range(port, port + 1))
    assert free_port() == port
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        with pytest.raises(LaunchError, match=f"from {port} to {port}"):
            free_port()


class Starts:
    """Ray, whose first starts take too long."""

    def __init__(self, num_late: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num, self._num_late, self.ended = 0, num_late, 0
        monkeypatch.setattr("ray.init", self._init)
        monkeypatch.setattr("ray.shutdown", lambda: None)
        monkeypatch.setattr(local_ray, "adopt_orphans", lambda: None)
        monkeypatch.setattr(local_ray, "stop", lambda: None)
        monkeypatch.setattr(local_ray, "end_descendants", self._end)

    def _init(self, **_: object) -> None:
        self.num += 1
        if self.num <= self._num_late:
            raise Exception("The current node timed out during startup.")

    def _end(self, grace_s: float) -> None:
        self.ended += 1


def test_a_ray_that_was_late_is_started_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = Starts(1, monkeypatch)
    local_ray.start(tmp_path, "test")
    assert (starts.num, starts.ended) == (2, 1)


def test_a_ray_that_is_always_late_is_an_error_of_the_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = Starts(9, monkeypatch)
    with pytest.raises(LaunchError, match="Ray did not start: The current node timed out"):
        local_ray.start(tmp_path, "test")
    assert starts.num == 2


@pytest.mark.parametrize(("system", "num_calls"), [("linux", 1), ("darwin", 0)])
def test_only_linux_is_asked_to_adopt_orphans(system: str, num_calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []

    class Library:
        def prctl(self, *args: int) -> int:
            calls.append(args)
            return 0

    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(local_ray.ctypes, "CDLL", lambda *_, **__: Library())
    local_ray.adopt_orphans()
    assert len(calls) == num_calls


# ---- where a process that deployed the API reaches it


ADDRESSES = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "fd00::3"}
BUSY, WELL = ProxyStatus.UNHEALTHY, ProxyStatus.HEALTHY


@pytest.mark.parametrize(
    ("host", "here", "proxies", "reached"),
    [
        ("0.0.0.0", "a", {"a": WELL, "b": WELL}, "127.0.0.1"),
        ("::", "a", {"a": WELL}, "::1"),
        ("0.0.0.0", "b", {"a": WELL}, "10.0.0.1"),
        ("::", "b", {"c": WELL}, "fd00::3"),
        ("0.0.0.0", "c", {"a": BUSY, "b": WELL}, "10.0.0.2"),
        ("0.0.0.0", "a", {"a": BUSY, "b": WELL}, "10.0.0.2"),
        ("0.0.0.0", "a", {"b": BUSY}, "127.0.0.1"),
        ("10.0.0.9", "b", {"a": WELL}, "10.0.0.9"),
        ("127.0.0.1", "a", {"a": BUSY}, "127.0.0.1"),
    ],
)
def test_the_api_is_reached_where_a_healthy_proxy_is(
    host: str, here: str, proxies: dict[str, ProxyStatus], reached: str
) -> None:
    assert answering_host(host, here, proxies, ADDRESSES) == reached


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_is_refused_on_a_machine_without_a_proxy(host: str) -> None:
    with pytest.raises(InvalidField, match=r"api\.host.*0\.0\.0\.0"):
        answering_host(host, "b", {"a": WELL}, ADDRESSES)


# ---- whether a Ray cluster that is joined asks for a token


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray Serve's import


@pytest.mark.parametrize(
    ("answer", "asks"), [(None, False), (grpc.StatusCode.UNAUTHENTICATED, True), (grpc.StatusCode.INTERNAL, None)]
)
def test_a_call_without_a_token_shows_it(answer: grpc.StatusCode | None, asks: bool | None) -> None:
    def handle(request: bytes, context: grpc.ServicerContext) -> bytes:
        if answer is not None:
            context.abort(answer, "no")
        return b""

    server = grpc.server(ThreadPoolExecutor(1))
    _, service, method = ALIVE.split("/")
    handlers = {method: grpc.unary_unary_rpc_method_handler(handle)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        if asks is None:
            with pytest.raises(LaunchError, match="does not answer"):
                asks_for_token(f"127.0.0.1:{port}")
        else:
            assert asks_for_token(f"127.0.0.1:{port}") is asks
    finally:
        server.stop(None)


def test_a_port_that_wants_a_certificate_asks_for_more_than_a_token() -> None:
    """A plain connection is not answered."""
    assert asks_for_token(f"127.0.0.1:{free_port()}")
