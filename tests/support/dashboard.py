"""The dashboard in a browser: what it complains of, and what readers with a screen reader would."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect

from tests.support.settings import API_KEY

LIVE_MS = 120_000  # on a busy machine
_AXE = Axe()


class Watched:
    """A page with all that went wrong in it: console messages, exceptions, failed and foreign requests."""

    def __init__(self, page: Page, origin: str) -> None:
        self.page = page
        self.complaints: list[str] = []
        self._origin = origin
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.complaints.append(f"exception: {error}"))
        page.on("requestfailed", self._failed)
        page.on("request", self._request)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"console {message.type}: {message.text}")

    def _failed(self, request: Request) -> None:
        if request.failure != "net::ERR_ABORTED":  # the page left, or stopped a stream
            self.complaints.append(f"failed: {request.url}: {request.failure}")

    def _request(self, request: Request) -> None:
        if not request.url.startswith(f"{self._origin}/"):
            self.complaints.append(f"foreign request: {request.url}")


@contextmanager
def opened(browser: Browser, url: str, *, key: str | None = API_KEY, **context: Any) -> Iterator[Watched]:
    """The dashboard of the server at ``url``. With a key, it is typed in, and the page is live."""
    with browser.new_context(**context) as session:
        session.set_default_timeout(LIVE_MS)
        watched = Watched(session.new_page(), url)
        watched.page.goto(f"{url}/dashboard")
        if key is not None:
            give_key(watched.page, key)
            expect(watched.page.locator("#connection")).to_have_text("live", timeout=LIVE_MS)
        yield watched


def give_key(page: Page, key: str) -> None:
    page.get_by_label("Key of this server").fill(key)
    page.get_by_role("button", name="Use this key").click()


def barriers(page: Page) -> list[str]:
    """Violations of WCAG 2.2 A and AA and of axe's best practices."""
    found = _AXE.run(page).response["violations"]
    return [f"{one['id']}: {one['help']}: {[node['target'] for node in one['nodes']][:5]}" for one in found]
