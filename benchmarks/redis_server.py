"""A redis-server to lose."""

import subprocess
from pathlib import Path

import redis

from cluster.config import StateConfig
from cluster.state import open_store
from deploy.local_ray import free_port


class RedisServer:
    """A redis-server of one's own, on a port that was free. What it keeps outlasts it."""

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        self._folder = folder
        self._host = host
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def config(self) -> StateConfig:
        return StateConfig(url=self.url)

    def start(self) -> None:
        options = {
            "port": self.port,
            "bind": self._host,
            "protected-mode": "no",
            "dir": self._folder,
            "save": "",
            "appendonly": "yes",
        }
        command = ["redis-server", *(part for name, value in options.items() for part in (f"--{name}", str(value)))]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        store = open_store(self.config, "outrider", deadline_s=20.0)
        store.keys()  # waits until it answers
        store.close()

    def require_password(self, password: str) -> None:
        with redis.Redis(self._host, self.port) as client:
            client.config_set("requirepass", password)

    @property
    def address(self) -> str:
        return f"{self._host}:{self.port}"

    @property
    def url(self) -> str:
        return f"redis://{self.address}/0"

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None
