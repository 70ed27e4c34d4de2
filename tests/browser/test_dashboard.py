"""The dashboard of a running server, clicked through in Chromium."""

import os
import re
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="make test-browser installs it")

from playwright.sync_api import Browser, Page, expect

from benchmarks.server import ServerProcess
from tests.support.dashboard import barriers, give_key, opened
from tests.support.settings import API_KEY
from tests.support.waiting import eventually

pytestmark = [pytest.mark.browser, pytest.mark.ray, pytest.mark.model]

ANSWER_MS = 240_000  # on a busy machine
NUM_TRIES = 4  # whether drafts pay is decided by times, and a busy machine changes those
DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
PLOTS = (
    "Time to first token",
    "Time per token",
    "End-to-end time",
    "Waiting requests",
    "KV cache",
    "Errors and aborts",
    "Draft length by load",
    "Speed-up by drafting",
    "Wasted verification",
    "Acceptance by position",
    "Tokens per second",
    "Objectives met",
    "Scale",
)


def test_it_asks_for_the_key_and_keeps_it_in_this_tab(chromium: Browser, server: ServerProcess) -> None:
    with opened(chromium, server.url, key=None) as watched:
        page = watched.page
        expect(page.get_by_label("Key of this server")).to_be_focused()
        expect(page.locator("#connection")).to_have_text("needs a key")
        assert watched.complaints == []
        give_key(page, "sk-wrong")
        expect(page.get_by_role("alert").filter(has_text="unknown")).to_be_visible()
        assert [one for one in watched.complaints if "401" not in one] == [], "Chromium itself reports a 401"
        watched.complaints.clear()
        give_key(page, API_KEY)
        expect(page.locator("#connection")).to_have_text("live")
        expect(page.locator("#key-panel")).to_be_hidden()
        assert page.evaluate("[Object.values(sessionStorage), Object.values(localStorage)]") == [[API_KEY], []]
        assert API_KEY not in page.content()
        page.reload()
        expect(page.locator("#connection")).to_have_text("live")
        page.get_by_role("button", name="API key").click()
        page.get_by_role("button", name="Forget it").click()
        expect(page.locator("#connection")).to_have_text("needs a key")
        assert page.evaluate("sessionStorage.length") == 0
        assert watched.complaints == []


def test_it_is_clicked_through_without_a_complaint(chromium: Browser, busy_server: ServerProcess) -> None:
    with opened(chromium, busy_server.url, viewport=DESKTOP) as watched:
        page = watched.page
        drafters = served_drafters(busy_server)
        pool = page.locator("#pool svg")
        for drafter in drafters:
            expect(pool).to_have_attribute("aria-label", re.compile(rf"\b{drafter} for \d+ request"))
        for summary in page.locator("summary").all():
            summary.click()
        expect(page.get_by_role("table", name="Drafters").get_by_role("row")).to_have_count(1 + len(drafters))
        expect(page.locator("#timelines-table tbody tr").first).to_be_visible()
        expect(page.locator("#timelines path.accepted").first).to_have_attribute("d", re.compile("M"), timeout=ANSWER_MS)
        page.get_by_label("by time").check()
        expect(page.locator("#timelines svg")).to_contain_text("now")
        page.get_by_label("by token").check()
        for title in PLOTS:
            plot = page.get_by_role("region", name=title)
            expect(plot.get_by_role("img")).to_have_attribute("aria-label", re.compile(re.escape(title)))
        for theme in ("light", "dark", "auto"):
            page.get_by_label("Theme").select_option(theme)
            expect(page.locator("html")).to_have_attribute("data-theme", theme)
        page.get_by_role("button", name="Pause motion").click()
        expect(page.get_by_role("button", name="Pause motion")).to_have_attribute("aria-pressed", "true")
        expect(page.locator(".moving")).to_have_count(0)
        _play(page)
        _switch_policy(page)
        assert watched.complaints == []
        page.get_by_label("Most tokens").fill("4096")
        page.get_by_role("button", name="Send").click()
        expect(page.locator("#play-error")).to_contain_text("max_tokens", timeout=ANSWER_MS)
        assert [one for one in watched.complaints if "400" not in one] == [], "Chromium itself reports a 400"


def served_drafters(server: ServerProcess) -> list[str]:
    """Names; asked for until the status is not late."""
    names: list[str] = []

    def told() -> bool:
        status = http.get("/v1/outrider/status", headers={"authorization": f"Bearer {API_KEY}"}).json()
        names[:] = [drafter["name"] for drafter in status.get("drafters", ())]
        return bool(names)

    with server.client() as http:
        eventually(told)
    return names


def _switch_policy(page: Page) -> None:
    now = page.locator("#policy-now")
    expect(now).to_contain_text("follows the policy epsilon-greedy")
    page.get_by_label("Try", exact=True).select_option("off")
    expect(page.get_by_role("button", name="Try it")).to_be_disabled()
    page.get_by_label("never their tokens").check()
    page.get_by_role("button", name="Try it").click()
    expect(now).to_contain_text("tries the policy fixed for another", timeout=ANSWER_MS)
    page.get_by_role("button", name="End the trial").click()
    expect(now).to_contain_text("follows the policy epsilon-greedy", timeout=ANSWER_MS)
    expect(page.locator("#policy-error")).to_have_text("")


def _play(page: Page) -> None:
    """Sends, compares, stops."""
    page.get_by_label("Most tokens").fill("96")
    figures = page.locator("#play-figures")
    for _ in range(NUM_TRIES):
        page.get_by_role("button", name="Send").click()
        expect(figures).to_contain_text("tokens at", timeout=ANSWER_MS)
        if page.locator("#answer .drafted").count():
            break
    expect(page.locator("#answer .drafted").first).to_be_visible()
    expect(figures).to_contain_text("tokens per pass")
    label = re.search(r"Request (\w+):", figures.inner_text())
    assert label is not None
    expect(page.locator("#timelines-table")).to_contain_text(label[1])
    for text in page.locator("#timelines-table th[scope=row]").all_inner_texts():
        assert re.fullmatch(r"[0-9a-f]{6}(\.\d+)?", text), "a request is known by the end of a random id"
    assert "class" not in page.locator("#timelines").inner_text(), "neither prompt nor answer is shown there"
    page.get_by_role("button", name="Compare with no drafts").click()
    expect(figures).to_contain_text("no drafter had seen the answer", timeout=4 * ANSWER_MS)
    page.get_by_label("Most tokens").fill("1000")
    for _ in range(NUM_TRIES):
        page.get_by_role("button", name="Send").click()
        expect(page.locator("#answer span").first).to_be_visible(timeout=ANSWER_MS)
        page.get_by_role("button", name="Stop").dispatch_event("click")  # of no effect if the answer has ended
        expect(figures).to_have_text(re.compile("stopped|tokens at"), timeout=ANSWER_MS)
        if figures.inner_text() == "stopped":
            break
    expect(figures).to_have_text("stopped")


@pytest.mark.parametrize(("scheme", "viewport"), [("dark", DESKTOP), ("light", DESKTOP), ("light", PHONE)])
def test_it_has_no_barriers(chromium: Browser, busy_server: ServerProcess, scheme: str, viewport: dict[str, int]) -> None:
    with opened(chromium, busy_server.url, viewport=viewport, color_scheme=scheme) as watched:
        page = watched.page
        page.get_by_role("button", name="API key").click()
        for summary in page.locator("summary").all():
            summary.click()
        assert barriers(page) == []


def test_what_the_checks_are_worth(chromium: Browser, server: ServerProcess) -> None:
    """Each check fails on a page that is made worse."""
    with opened(chromium, server.url) as watched:
        page = watched.page
        assert (watched.complaints, barriers(page)) == ([], [])
        page.evaluate("console.error('on purpose')")
        assert watched.complaints == ["console error: on purpose"]
        with page.expect_event("pageerror"):
            page.evaluate("setTimeout(() => { throw new Error('thrown on purpose') })")
        page.evaluate("document.body.setAttribute('style', 'color: red')")  # refused by the policy
        with page.expect_console_message(lambda message: "Refused to connect" in message.text):
            page.evaluate("fetch('http://127.0.0.1:9/').catch(() => null)")  # so is this
        text = "\n".join(watched.complaints)
        for complaint in ("thrown on purpose", "Applying inline style violates", "Refused to connect"):
            assert complaint in text
        page.evaluate("document.querySelector('label[for=prompt]').remove()")
        page.evaluate("document.querySelector('#pool svg').removeAttribute('aria-label')")
        found = " ".join(barriers(page))
        assert "label:" in found
        assert "svg-img-alt:" in found


def test_it_is_used_by_keyboard(chromium: Browser, server: ServerProcess) -> None:
    with opened(chromium, server.url) as watched:
        page = watched.page
        page.reload()  # focus begins at the top
        expect(page.locator("#connection")).to_have_text("live")
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.get_by_role("main")).to_be_focused()
        reached = set()
        for _ in range(40):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
        assert {"prompt", "drafting", "compare", "As a table", "Send"} <= reached
        assert watched.complaints == []


@pytest.mark.parametrize("preference", ["reduce", "no-preference"])
def test_motion_follows_the_readers_preference(chromium: Browser, busy_server: ServerProcess, preference: str) -> None:
    with opened(chromium, busy_server.url, viewport=DESKTOP, reduced_motion=preference) as watched:
        if preference == "no-preference":
            expect(watched.page.locator(".moving").first).to_be_attached(timeout=ANSWER_MS)
        else:
            for _ in range(20):
                watched.page.wait_for_timeout(200)
                assert watched.page.locator(".moving").count() == 0


@pytest.mark.parametrize("width", [320, 390, 768])
def test_nothing_is_wider_than_the_screen(chromium: Browser, busy_server: ServerProcess, width: int) -> None:
    with opened(chromium, busy_server.url, viewport={"width": width, "height": 800}) as watched:
        for summary in watched.page.locator("summary").all():
            summary.click()
        assert watched.page.evaluate("document.documentElement.scrollWidth") <= width


def test_pictures_of_it(chromium: Browser, busy_server: ServerProcess, tmp_path: Path) -> None:
    """Written to the folder that OUTRIDER_SCREENSHOTS names (docs/images holds those of the documentation)."""
    folder = Path(os.environ.get("OUTRIDER_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    tall = {"width": 1280, "height": 1090}
    for name, scheme, viewport, top in (
        ("dark", "dark", tall, ".top"),
        ("light", "light", tall, "section:has(#play)"),
        ("phone", "dark", {"width": 390, "height": 1180}, ".top"),
    ):
        with opened(chromium, busy_server.url, viewport=viewport, color_scheme=scheme, reduced_motion="reduce") as watched:
            page = watched.page
            page.get_by_role("button", name="Send").click()
            expect(page.locator("#play-figures")).to_contain_text("tokens at", timeout=ANSWER_MS)
            page.locator(top).evaluate("element => element.scrollIntoView()")
            page.wait_for_timeout(2500)  # of further rounds
            file = folder / f"dashboard-{name}.png"
            page.screenshot(path=file)
            assert file.stat().st_size > 30_000, "a picture of an empty page is smaller"
            assert watched.complaints == []
