"""The wrapper round HAProxy."""

import os
import select
import subprocess
import sys
from pathlib import Path

from deploy import haproxy

CONFIG = """\
frontend prometheus
    bind :9101
frontend http_frontend
    bind *:8000
listen stats
  bind *:8404
frontend other
    bind *:91011
"""


def test_only_the_statistics_move_to_loopback() -> None:
    moved = haproxy.bind_to_loopback(CONFIG, [9101, 8404])
    assert moved == CONFIG.replace("bind :9101", "bind 127.0.0.1:9101").replace("bind *:8404", "bind 127.0.0.1:8404")


def test_what_it_starts_ends_with_its_starter(tmp_path: Path) -> None:
    file = tmp_path / "haproxy.cfg"
    file.write_text(CONFIG)
    command = [
        sys.executable,
        "-I",
        "-S",
        haproxy.__file__,
        "/bin/sh",
        "9101",
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
    assert "bind 127.0.0.1:9101" in file.read_text()
