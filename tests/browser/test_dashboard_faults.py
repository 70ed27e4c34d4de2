"""The dashboard while the cluster is away, and after the reader's machine slept."""

import asyncio
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

pytest.importorskip("playwright", reason="make test-browser installs it")

import uvicorn
from playwright.sync_api import Browser, expect

from cluster.config import PolicyConfig
from cluster.errors import LinkClosed
from tests.support.api import app_of, model_info, saying
from tests.support.dashboard import give_key, opened
from tests.support.scripted import ScriptedClient
from tests.support.settings import API_KEY

pytestmark = pytest.mark.browser

# What the page sees of a sleep: this clock stands still, and the server's goes on.
SLEEP = "window.slept_ms = 0; const now = performance.now.bind(performance); performance.now = () => now() - window.slept_ms"


@contextmanager
def _served(folder: Path) -> Iterator[tuple[str, ScriptedClient]]:
    """The API over a scripted cluster, without Ray."""
    keys = folder / "keys"
    keys.write_text(API_KEY)
    keys.chmod(0o600)
    cluster = ScriptedClient(model_info(), saying("the answer"))

    async def try_policy(policy: PolicyConfig | None, for_s: float) -> bool:
        return True

    app = app_of(cluster, try_policy=try_policy, api_keys_file=keys, operator_keys_file=keys, status_ttl_s=0.01)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}", cluster
        finally:
            server.should_exit = True
            thread.join()


def test_the_playground_and_the_policy_work_with_what_was_known(chromium: Browser, tmp_path: Path) -> None:
    with _served(tmp_path) as (url, cluster), opened(chromium, url) as watched:
        page = watched.page
        assert page.locator("#policy-form").is_visible()
        headers = {"authorization": f"Bearer {API_KEY}"}
        httpx.get(f"{url}/v1/models", headers=headers, trust_env=False).raise_for_status()  # asks the cluster once
        cluster.failure = LinkClosed("away")
        expect(page.locator("#connection")).to_have_text("the cluster does not answer")
        page.locator("#max-tokens").fill("20")
        page.locator("#play button[type=submit]").click()
        expect(page.locator("#play-error")).to_be_empty()
        expect(page.locator("#answer")).to_contain_text("the answer")
        page.locator("#sure").check()
        page.locator("#try").click()
        expect(page.locator("#policy-error")).not_to_be_empty()
        assert [one for one in watched.complaints if "503" not in one] == [], "Chromium itself reports a 503"


def test_a_cluster_that_never_answered_is_said_to_be_away(chromium: Browser, tmp_path: Path) -> None:
    with _served(tmp_path) as (url, cluster), opened(chromium, url, key=None) as watched:
        page = watched.page
        cluster.failure = LinkClosed("away")
        give_key(page, API_KEY)
        expect(page.locator("#connection")).to_have_text("the cluster does not answer")
        page.locator("#play button[type=submit]").click()
        expect(page.locator("#play-error")).to_have_text("the cluster does not answer")
        page.locator("#sure").check()
        page.locator("#try").click()
        expect(page.locator("#policy-error")).to_have_text("the cluster does not answer")
        assert watched.complaints == []


def test_plots_go_on_after_a_sleep(chromium: Browser, tmp_path: Path) -> None:
    with _served(tmp_path) as (url, _), opened(chromium, url, key=None) as watched:
        page = watched.page
        page.add_init_script(SLEEP)
        page.reload()
        give_key(page, API_KEY)
        curves = page.locator("path.curve")
        expect(curves).not_to_have_count(0)
        page.evaluate("window.slept_ms = 3_600_000")
        for _ in range(2):  # once the second poll is answered, the first one is shown
            with page.expect_response(re.compile("/v1/outrider/dashboard")):
                pass
        expect(curves).not_to_have_count(0)
        assert watched.complaints == []
