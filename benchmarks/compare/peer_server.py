"""A server of another project, which answers `/health`."""

import os
from collections.abc import Mapping, Sequence
from http import HTTPStatus

import httpx
import psutil

from benchmarks.server import ChildServer
from deploy.local_ray import descendants, end_all, free_port

STOP_S = 20.0


class PeerServer(ChildServer):
    """At ``port`` of loopback.

    Args:
        command: of the server; ``{port}`` in an argument stands for the port.
        environment: variables beside those of this process.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.port = free_port()
        command = [part.replace("{port}", str(self.port)) for part in command]
        super().__init__(command, os.environ | dict(environment), f"http://127.0.0.1:{self.port}")

    def stop(self) -> None:
        if self.is_running():
            self.resume()
            end_all([psutil.Process(self.pid), *descendants(self.pid)], STOP_S)
            self.wait_end(STOP_S)

    def _is_ready(self) -> bool:
        try:
            with self.client(timeout_s=5.0) as client:
                return client.get("/health").status_code == HTTPStatus.OK
        except httpx.TransportError:
            return False  # it does not listen yet
