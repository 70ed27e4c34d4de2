"""The wrapper round HAProxy."""

import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from deploy import haproxy, process_tree

CONFIG = """\
global
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


@pytest.mark.parametrize(("system", "num_calls"), [("linux", 1), ("darwin", 0)])
def test_only_linux_is_asked_to_end_it_with_its_starter(
    system: str, num_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On other systems the C library has no such function, and HAProxy starts without it."""
    calls: list[tuple[int, ...]] = []

    class Library:
        def prctl(self, *args: int) -> None:
            calls.append(args)

    started: list[list[str]] = []
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(haproxy.ctypes, "CDLL", lambda _: Library())
    monkeypatch.setattr(haproxy.os, "execv", lambda binary, argv: started.append(argv))
    haproxy.main("/bin/haproxy", ["-v"])
    assert (started, len(calls)) == ([["/bin/haproxy", "-v"]], num_calls)


@pytest.mark.parametrize(("system", "num_calls"), [("linux", 1), ("darwin", 0)])
def test_only_linux_is_asked_to_adopt_orphans(system: str, num_calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []

    class Library:
        def prctl(self, *args: int) -> int:
            calls.append(args)
            return 0

    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(process_tree.ctypes, "CDLL", lambda *_, **__: Library())
    process_tree.adopt_orphans()
    assert len(calls) == num_calls


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


def answering(admin: Path, waits: Sequence[Callable[[], object]], calls: list[bytes]) -> threading.Thread:
    """A process at an admin socket, which answers one call after each wait and then ends."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(admin))
    listener.listen()

    def answer() -> None:
        with listener:
            for wait in waits:
                connection, _ = listener.accept()
                with connection, suppress(BrokenPipeError):
                    calls.append(connection.recv(64))
                    wait()
                    connection.sendall(b"Pid: 1\n")

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


def test_it_waits_for_a_predecessor_that_is_late(tmp_path: Path) -> None:
    calls: list[bytes] = []
    thread = answering(tmp_path / "admin.sock", [partial(time.sleep, 0.3), int], calls)
    haproxy.wait_for_predecessor(str(tmp_path / "admin.sock"), prompt_s=0.3, deadline_s=30.0)
    thread.join()
    assert calls == [b"show info\n"] * 2


def test_a_reload_asks_its_predecessor_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bytes] = []
    started: list[int] = []
    monkeypatch.setattr(haproxy.ctypes, "CDLL", lambda _: MagicMock())
    monkeypatch.setattr(haproxy.os, "execv", lambda *_: started.append(len(calls)))
    thread = answering(tmp_path / "admin.sock", [int], calls)
    haproxy.main("/bin/haproxy", ["-x", str(tmp_path / "admin.sock")])
    assert started == [1]
    thread.join()


def test_it_waits_for_a_predecessor_that_hangs_until_the_deadline(tmp_path: Path) -> None:
    released = threading.Event()
    thread = answering(tmp_path / "admin.sock", [released.wait], [])
    start = time.monotonic()
    haproxy.wait_for_predecessor(str(tmp_path / "admin.sock"), deadline_s=0.5)
    assert time.monotonic() - start >= 0.5
    released.set()
    thread.join()


def test_it_does_not_wait_for_a_predecessor_that_has_ended(tmp_path: Path) -> None:
    never_s = 1e6
    haproxy.wait_for_predecessor(str(tmp_path / "admin.sock"), deadline_s=never_s)
    answering(tmp_path / "admin.sock", [], []).join()
    haproxy.wait_for_predecessor(str(tmp_path / "admin.sock"), deadline_s=never_s)


def test_what_it_starts_ends_with_its_starter(tmp_path: Path) -> None:
    file = tmp_path / "haproxy.cfg"
    file.write_text(CONFIG)
    command = [
        sys.executable,
        "-I",
        "-S",
        haproxy.__file__,
        "/bin/sh",
        "-c",
        "echo $$; exec sleep 60",
        "-f",
        str(file),
    ]
    starter = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess; subprocess.run({command!r})"], stdout=subprocess.PIPE, text=True
    )
    assert starter.stdout is not None
    with starter.stdout:
        pid = int(starter.stdout.readline())
        descriptor = os.pidfd_open(pid)
        starter.kill()
        starter.wait()
    ready, _, _ = select.select([descriptor], [], [], 30)
    os.close(descriptor)
    assert ready, "it outlived its starter"
    assert f"bind unix@{tmp_path}/prometheus.sock" in file.read_text()


def test_the_limit_of_open_files_bounds_the_connections(tmp_path: Path) -> None:
    """HAProxy does not start with more connections than it may open files."""
    few, many = (haproxy.rewrite(CONFIG, tmp_path, max_files) for max_files in (600, 10**9))
    assert f"maxconn {haproxy.maxconn_for(haproxy.clients_for(600))}\n" in few
    assert many == haproxy.rewrite(CONFIG, tmp_path)
