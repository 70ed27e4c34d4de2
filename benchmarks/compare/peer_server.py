"""A server of another project as a process of its own: started, waited for, suspended between its turns, ended."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from types import TracebackType
from typing import IO, Self

import httpx
import psutil

from benchmarks.server import signal_tree
from cluster.errors import OutriderError
from deploy.local_ray import free_port
from deploy.process_tree import descendants, end_all

START_S = 300.0
STOP_S = 20.0
POLL_S = 0.2
NUM_LAST_LINES = 15


class PeerFailed(OutriderError):
    """A peer's server did not start or ended by itself; its last lines of output are in the message."""


class PeerServer:
    """Use as a context manager: inside, the server answers at ``port`` of loopback; after it, none of its processes is left.

    A suspended server (``suspend``, ``resume``) takes no processor time while others are measured.

    Args:
        command: of the server; ``{port}`` in an argument stands for the port.
        environment: variables beside those of this process.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self.port = free_port()
        self._command = [part.replace("{port}", str(self.port)) for part in command]
        self._environment = dict(os.environ) | dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] = tempfile.TemporaryFile(prefix=f"{name}-")  # noqa: SIM115 - closed by __exit__

    def start(self) -> None:
        """Without waiting until it answers."""
        self._process = subprocess.Popen(
            self._command, stdout=self._output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=self._environment
        )

    def wait_ready(self, timeout_s: float = START_S) -> None:
        """Raises PeerFailed when it ends, or does not answer in time."""
        assert self._process is not None
        end_s = time.monotonic() + timeout_s
        with httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=5.0, trust_env=False) as client:
            while True:
                if self._process.poll() is not None:
                    raise PeerFailed(f"{self.name} ended with exit code {self._process.returncode}: {self._last_lines()}")
                try:
                    if client.get("/health").status_code == HTTPStatus.OK:
                        return
                except httpx.TransportError:
                    pass  # it does not listen yet
                if time.monotonic() > end_s:
                    raise PeerFailed(f"{self.name} does not answer within {timeout_s:g} s: {self._last_lines()}")
                time.sleep(POLL_S)

    def suspend(self) -> None:
        assert self._process is not None
        signal_tree(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        signal_tree(self._process.pid, signal.SIGCONT)

    def end(self) -> None:
        """All of its processes, if they have not ended."""
        if self._process is None or self._process.poll() is not None:
            return
        self.resume()
        end_all([psutil.Process(self._process.pid), *descendants(self._process.pid)], STOP_S)
        self._process.wait(STOP_S)

    def _last_lines(self) -> str:
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-NUM_LAST_LINES:])

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()
        self._output.close()
