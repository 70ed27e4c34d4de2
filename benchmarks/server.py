"""Servers as child processes, for benchmarks and tests: `outrider serve`, and those of other projects."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import httpx
import psutil

from benchmarks.load import HttpTarget
from cluster.config import Config, show
from cluster.errors import OutriderError
from deploy.local_ray import descendants

START_S, STOP_S, POLL_S = 400.0, 100.0, 0.2


class ServerFailed(OutriderError):
    """The server did not start, or ended by itself; the message has its last output."""


class ChildServer(ABC):
    """Context manager: the server answers at ``url`` inside, and all of its processes have ended after it.

    Args:
        command: of the process, with the environment ``environment``.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], url: str) -> None:
        self.url = url
        self._command, self._environment = list(command), dict(environment)
        self._words: list[str] = []
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    @abstractmethod
    def _is_ready(self) -> bool: ...

    @abstractmethod
    def stop(self) -> None:
        """Ends all of its processes, if they have not ended."""

    @property
    def process(self) -> subprocess.Popen[str]:
        assert self._process is not None, "the server runs only within the context"
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    def start(self) -> None:
        """Does not wait until it is ready."""
        self._process = subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env=self._environment | {"PYTHONUNBUFFERED": "1"},
            process_group=0,  # Ctrl-C reaches the benchmark alone, which may report before it stops the server
        )
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), name="server output", daemon=True)
        self._reader.start()

    def wait_ready(self, timeout_s: float = START_S) -> None:
        """Raises ServerFailed if it ends, or is not ready in time."""
        end_s = time.monotonic() + timeout_s
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() > end_s:
                raise ServerFailed(f"{self.url} is not ready (exit code {self.process.poll()}): {self.last_words()}")
            time.sleep(POLL_S)

    def suspend(self) -> None:
        """It and all processes below it take no processor time until ``resume``."""
        self._signal_tree(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal_tree(signal.SIGCONT)

    def wait_end(self, timeout_s: float = STOP_S) -> int:
        """The exit code. Raises subprocess.TimeoutExpired."""
        return self.process.wait(timeout_s)

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def last_words(self, num_lines: int = 12) -> str:
        return "\n".join(self._words[-num_lines:]) or "it said nothing"

    def num_words(self) -> int:
        """Lines of output so far."""
        return len(self._words)

    def words_with(self, text: str, since: int) -> list[str]:
        """Lines of output that contain a text, from the line of that number on."""
        return [line for line in self._words[since:] if text in line]

    def client(self, timeout_s: float = 60.0) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=timeout_s, trust_env=False)

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._words.append(line.rstrip())

    def _signal_tree(self, number: signal.Signals) -> None:
        for process in (psutil.Process(self.pid), *descendants(self.pid)):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

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
            if self._reader is not None:
                self._reader.join(STOP_S)


class ServerProcess(ChildServer):
    """`outrider serve`.

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
        self._folder = tempfile.TemporaryDirectory(prefix="outrider-bench-")
        self._file = Path(self._folder.name) / "outrider.yaml"
        command = [str(python), "-m", "deploy.cli", "serve", *(words or [str(self._file)])]
        url = f"http://{config.api.host}:{config.api.port}"
        super().__init__(command, os.environ if environment is None else environment, url)

    def start(self) -> None:
        self._file.write_text(show(self.config), encoding="utf-8")
        super().start()

    def target(self) -> HttpTarget:
        with self.client() as client:
            model = client.get("/v1/models").json()["data"][0]["id"]
        url = httpx.URL(self.url)
        return HttpTarget(url.host, url.port or 80, model)

    def signal(self, number: signal.Signals = signal.SIGINT) -> None:
        self.process.send_signal(number)

    def workers(self, actor: str) -> list[psutil.Process]:
        """Processes of an actor class such as ``DrafterActor``, by start time."""
        found = [process for process in self._processes() if _names(process)[1].startswith(f"ray::{actor}")]
        return sorted(found, key=lambda process: process.create_time())

    def proxies(self) -> list[psutil.Process]:
        """HAProxy, and former ones that a reload lets end their connections."""
        return [process for process in self._processes() if _names(process)[0] == "haproxy"]

    def stop(self) -> None:
        if not self.is_running():
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

    def _is_ready(self) -> bool:
        return any(line.startswith("Outrider serves ") for line in list(self._words))

    def _processes(self) -> list[psutil.Process]:
        return descendants(self.pid)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            self._folder.cleanup()


class JoinedServer(ServerProcess):
    """On a Ray cluster that this process started, beside no other server."""

    def _processes(self) -> list[psutil.Process]:
        return descendants()


def _names(process: psutil.Process) -> tuple[str, str]:
    """Its name and its command line; empty if it has ended."""
    try:
        return process.name(), " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return "", ""
