"""`outrider serve` as a child process, for benchmarks and tests."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import httpx
import psutil

from cluster.config import Config, show
from cluster.errors import OutriderError
from deploy.process_tree import descendants

START_S = 400.0
STOP_S = 100.0


class ServerFailed(OutriderError):
    """The server did not start, or ended by itself; the message has its last output."""


class ServerProcess:
    """Context manager: the server answers at ``url`` inside, and all of its processes have ended after it.

    Args:
        environment: of the process; by default this process's.
        python: the interpreter of the server's environment; by default this process's.
        words: of the command line; by default a file of ``config``.
    """

    def __init__(
        self,
        config: Config,
        environment: Mapping[str, str] | None = None,
        python: Path = Path(sys.executable),
        words: Sequence[str] = (),
    ) -> None:
        self.config = config
        self._arguments = list(words)
        self._python = python
        self._environment = dict(os.environ if environment is None else environment)
        self.url = f"http://{config.api.host}:{config.api.port}"
        self._folder = tempfile.TemporaryDirectory(prefix="outrider-bench-")
        self._ready = threading.Event()
        self._words: list[str] = []
        self._process: subprocess.Popen[str] | None = None
        self._readers: list[threading.Thread] = []

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server runs only within the context"
        return self._process.pid

    def start(self) -> None:
        """Does not wait until it is ready."""
        file = Path(self._folder.name) / "outrider.yaml"
        file.write_text(show(self.config), encoding="utf-8")
        self._process = subprocess.Popen(
            [str(self._python), "-m", "deploy.cli", "serve", *(self._arguments or [str(file)])],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            env=self._environment | {"PYTHONUNBUFFERED": "1"},
            process_group=0,  # Ctrl-C reaches the benchmark alone, which may report before it stops the server
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        for stream in (self._process.stdout, self._process.stderr):
            reader = threading.Thread(target=self._read, args=(stream,), name="server output", daemon=True)
            reader.start()
            self._readers.append(reader)

    def wait_ready(self, timeout_s: float = START_S) -> None:
        """Raises ServerFailed if it ends, or is not ready in time."""
        assert self._process is not None
        while not self._ready.wait(0.2):
            timeout_s -= 0.2
            if self._process.poll() is not None or timeout_s <= 0:
                raise ServerFailed(f"the server is not ready (exit code {self._process.poll()}): {self.last_words()}")

    def signal(self, number: signal.Signals = signal.SIGINT) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def suspend(self) -> None:
        """It and all processes below it take no processor time until ``resume``."""
        signal_tree(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        signal_tree(self.pid, signal.SIGCONT)

    def wait_end(self, timeout_s: float = STOP_S) -> int:
        """The exit code. Raises subprocess.TimeoutExpired."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def workers(self, actor: str) -> list[psutil.Process]:
        """Processes of an actor class such as ``DrafterActor``, by start time."""
        found = (process for process in self._processes() if _cmdline(process).startswith(f"ray::{actor}"))
        return sorted(found, key=lambda process: process.create_time())

    def proxies(self) -> list[psutil.Process]:
        """HAProxy, and former ones that a reload lets end their connections."""
        return [process for process in self._processes() if _name(process) == "haproxy"]

    def _processes(self) -> list[psutil.Process]:
        return descendants(self.pid)

    def last_words(self, num_lines: int = 12) -> str:
        return "\n".join(self._words[-num_lines:]) or "it said nothing"

    def num_words(self) -> int:
        """Lines of output so far."""
        return len(self._words)

    def words_with(self, text: str, since: int) -> list[str]:
        """Lines of output that contain a text, from the line of that number on."""
        return [line for line in self._words[since:] if text in line]

    def stop(self) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        self.signal()
        try:
            self.wait_end()
        except subprocess.TimeoutExpired:
            left = [psutil.Process(self.pid), *descendants(self.pid)]
            for process in left:
                process.kill()
            psutil.wait_procs(left, timeout=STOP_S)
            raise ServerFailed(f"the server did not end within {STOP_S:g} s and was killed: {self.last_words()}") from None

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60.0, trust_env=False)

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._words.append(line.rstrip())
                if line.startswith("Outrider serves "):
                    self._ready.set()

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.stop()
        finally:
            for reader in self._readers:
                reader.join(STOP_S)
            self._folder.cleanup()


def signal_tree(pid: int, number: signal.Signals) -> None:
    """To a process and all below it."""
    for process in (psutil.Process(pid), *descendants(pid)):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


class JoinedServer(ServerProcess):
    """On a Ray cluster that this process started, beside no other server."""

    def _processes(self) -> list[psutil.Process]:
        return descendants()


def _cmdline(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""
