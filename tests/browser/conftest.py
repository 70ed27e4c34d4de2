"""A real server with requests under way, and Chromium that looks at its dashboard."""

import itertools
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

# Before anything imports Ray: it reads these at import, and its processes inherit them.
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # loopback only

from benchmarks.server import ServerProcess
from cluster.config import ApiConfig, ClusterConfig, Config, ModelConfig, SloConfig, StateConfig, TargetConfig
from deploy.local_ray import free_port
from tests.support.servers import served
from tests.support.settings import ALWAYS_DRAFTED, API_KEY

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PROMPTS = (
    "Repeat after me, many times: the grey goose crossed the green field. The grey goose crossed the green field.",
    "Write a Python class for a stack, then the same class for a queue, and then one for a deque.",
    "Count from one to sixty in words, one number per line.",
    "Write an SQL table of customers with ten columns, and then a table of orders in the same style.",
    "Write a short story about a lighthouse keeper who finds a letter.",
)
NUM_CLIENTS = 3
HEADERS = {"authorization": f"Bearer {API_KEY}"}


@pytest.fixture(scope="session")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The default pool, as users see it, with an API key and a class of objectives. It drafts whatever drafts are worth."""
    folder = tmp_path_factory.mktemp("dashboard")
    keys = folder / "keys"
    keys.write_text(f"{API_KEY}\n")
    keys.chmod(0o600)
    config = Config(
        model=ModelConfig(name="smollm2-135m"),
        target=TargetConfig(device="cpu", kv_cache_gb=0.25),
        planner=ALWAYS_DRAFTED,
        slo=SloConfig.model_validate(
            {"classes": {"interactive": {"ttft_ms": 2000, "tpot_ms": 80}, "batch": {}}, "shed": False}
        ),
        api=ApiConfig(port=free_port(), api_keys_file=keys, operator_keys_file=keys),
        cluster=ClusterConfig(state=StateConfig(folder=folder / "state")),
    )
    with served(config) as server:
        yield server


@pytest.fixture(scope="session")
def busy_server(server: ServerProcess) -> Iterator[ServerProcess]:
    """Clients stream answers from it until the tests have ended."""
    stop = threading.Event()
    threads = [threading.Thread(target=_stream, args=(server, i, stop), name=f"client {i}") for i in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield server
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _stream(server: ServerProcess, client: int, stop: threading.Event) -> None:
    with httpx.Client(
        base_url=server.url, timeout=120.0, trust_env=False, headers={"authorization": f"Bearer {API_KEY}"}
    ) as http:
        for number in itertools.count(client):
            body = {
                "model": "smollm2-135m",
                "messages": [{"role": "user", "content": PROMPTS[number % len(PROMPTS)]}],
                "max_tokens": 150,
                "temperature": 0.0 if client else 0.7,
                "seed": number,
                "stream": True,
                "slo": "batch" if client == 2 else "interactive",
            }
            with http.stream("POST", "/v1/chat/completions", json=body) as response:
                for _ in response.iter_lines():
                    if stop.is_set():
                        return
            stop.wait(0.3 * client)  # the number of concurrent requests varies
            if stop.is_set():
                return


@pytest.fixture(scope="session")
def chromium() -> Iterator["Browser"]:
    from playwright.sync_api import expect, sync_playwright

    from tests.support.dashboard import LIVE_MS

    program = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    assert program is not None, "there is no chromium: install it, or name it in CHROMIUM"
    expect.set_options(timeout=LIVE_MS)
    with sync_playwright() as playwright:
        # Chromium's sandbox refuses to run as root, as containers do.
        browser = playwright.chromium.launch(executable_path=program, chromium_sandbox=os.geteuid() != 0)
        try:
            yield browser
        finally:
            browser.close()
