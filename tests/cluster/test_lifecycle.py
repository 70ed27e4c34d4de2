"""`outrider serve` from its start to its end: nothing is left behind, and what cannot work is one line."""

import json
import re
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.server import START_S, ServerProcess
from cluster.config import Config
from deploy.local_ray import descendants, run_folder
from tests.support.settings import small_config
from tests.support.waiting import eventually

pytestmark = pytest.mark.ray

FOLDER = re.compile(r"(/[^\s=:]*/outrider-[a-z0-9_]{8})/")

RAY_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")


class Traces:
    """Everything that a server started or made, as far as it was seen while it lived."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self.processes: set[psutil.Process] = set()
        self.folders: set[Path] = set()

    def look(self) -> None:
        for process in descendants(self._server.pid):
            self.processes.add(process)
            try:
                self.folders.update(map(Path, FOLDER.findall(" ".join(process.cmdline()))))
            except psutil.NoSuchProcess:
                continue

    def saw(self, name: str) -> bool:
        self.look()
        return any(_is(process, name) for process in self.processes)

    def left(self) -> list[str]:
        alive = [str(process) for process in self.processes if _lives(process)]
        return alive + [str(folder) for folder in self.folders if folder.exists()]


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def _is(process: psutil.Process, name: str) -> bool:
    try:
        return name in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def server(tiny_model_folder: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    """Not started; of one drafter."""
    config = small_config(str(tiny_model_folder), tmp_path)
    server = ServerProcess(config.model_copy(update={"drafters": config.drafters[:1]}))
    try:
        yield server
    finally:
        server.__exit__(None, None, None)


LONG_CALL = {"model": "model", "prompt": [5, 6], "max_tokens": 500, "n": 16, "ignore_eos": True}


def test_a_signal_ends_a_serving_cluster_without_a_trace(server: ServerProcess) -> None:
    """Calls that are not complete after `api.drain_s` end with an error, in a stream before its last event."""
    config = server.config
    server.config = config.model_copy(update={"api": config.api.model_copy(update={"drain_s": 0.0})})
    server.start()
    server.wait_ready()
    steps = (
        "is checked",
        "Ray starts",
        "the supervisor starts 1 targets",
        "loads the weights",
        "target-0 is ready",
        "the API starts",
    )
    for step in steps:
        assert server.words_with(step, 0), server.last_words(50)
    assert server.words_with("Outrider serves model at", 0)[0].endswith("/dashboard")
    traces = Traces(server)
    traces.look()
    assert {"haproxy", "raylet", "gcs_server"} <= set(map(_name, traces.processes))
    assert traces.folders
    with ThreadPoolExecutor(2) as pool:
        flows = threading.Event()
        stream = pool.submit(lambda: streamed(server.url, flows))
        document = pool.submit(
            lambda: httpx.post(f"{server.url}/v1/completions", json=LONG_CALL, timeout=60, trust_env=False)
        )
        assert flows.wait(60)
        server.signal(signal.SIGINT)
        events, answer = stream.result(), document.result()
    assert "the server stops" in json.loads(events[-2])["error"]["message"]
    assert events[-1] == "[DONE]"
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "the server stops" in answer.json()["error"]["message"]
    assert server.wait_end() == 0, server.last_words()
    assert not traces.left()
    assert server.words_with("requests for at most 0 s (api.drain_s)", 0), server.last_words(50)
    assert not server.words_with("\x1b", 0)


def streamed(url: str, flows: threading.Event) -> list[str]:
    """The data of all events."""
    found = []
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=LONG_CALL | {"stream": True}, timeout=60, trust_env=False
    ) as answer:
        for line in answer.iter_lines():
            if line:
                found.append(line.removeprefix("data: "))
                flows.set()
    return found


@pytest.mark.parametrize(
    ("stage", "number"),
    [
        ("raylet", signal.SIGTERM),
        pytest.param("ray::PoolSupervisor", signal.SIGINT, marks=pytest.mark.nightly),
        pytest.param("haproxy", signal.SIGINT, marks=pytest.mark.nightly),
    ],
)
def test_a_signal_during_the_start_leaves_nothing_either(server: ServerProcess, stage: str, number: signal.Signals) -> None:
    server.start()
    traces = Traces(server)
    eventually(lambda: traces.saw(stage))
    server.signal(number)
    while server.is_running():
        traces.look()
    assert server.wait_end() == 0, server.last_words()
    assert not traces.left()


def test_a_cluster_ends_with_a_launcher_that_is_killed(server: ServerProcess) -> None:
    server.start()
    server.wait_ready()
    traces = Traces(server)
    traces.look()
    # Ray's two agents try to tell the cluster, which is gone, and give up after a minute.
    own = {process for process in traces.processes if not any(_is(process, name) for name in RAY_AGENTS)}
    server.signal(signal.SIGKILL)
    server.wait_end()
    eventually(lambda: not any(map(_lives, own)))
    assert traces.folders
    with run_folder():  # whoever starts next tidies up
        assert not any(folder.exists() for folder in traces.folders)


def fails(config: Config) -> str:
    """The last line of a server that does not come up."""
    server = ServerProcess(config)
    try:
        server.start()
        assert server.wait_end(START_S) == 1
    finally:
        server.__exit__(None, None, None)
    assert "Traceback" not in server.last_words(1000)
    return server.last_words(1)


def test_a_port_that_is_taken_is_one_line(tiny_model_folder: Path, tmp_path: Path) -> None:
    config = small_config(str(tiny_model_folder), tmp_path)
    with socket.create_server((config.api.host, config.api.port)):
        words = fails(config)
    assert words.startswith(f"outrider: cannot listen at 127.0.0.1:{config.api.port} (Address already in use)")


def test_a_missing_model_is_one_line(tmp_path: Path) -> None:
    missing = str(tmp_path / "nothing")
    words = fails(small_config(missing, tmp_path))
    assert words.startswith("outrider: ")
    assert missing in words


def test_too_little_memory_is_one_line(tiny_model_folder: Path, tmp_path: Path) -> None:
    config = small_config(str(tiny_model_folder), tmp_path)
    greedy = config.model_copy(update={"target": config.target.model_copy(update={"kv_cache_gb": 4000.0})})
    needs = r"needs about 400\d\.\d GB of memory \(weights 0\.\d, caches and hidden states 4000\.\d, .*\)"
    assert re.match(rf"outrider: .* {needs}, .* lower target\.kv_cache_gb \(4000\)", fails(greedy))


def test_a_model_that_cannot_be_loaded_is_one_line(tiny_model_folder: Path, tmp_path: Path) -> None:
    """What only the target's own process finds out."""
    config = small_config(str(tiny_model_folder), tmp_path)
    cramped = config.model_copy(update={"target": config.target.model_copy(update={"kv_cache_gb": 1e-9})})
    words = fails(cramped)
    assert words.startswith("outrider: target-0 did not start: ")
    assert "kv_cache" in words
