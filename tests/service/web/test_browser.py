"""The dashboard in a real Chromium: it loads without console errors, is live, executes actions, and can be
used by keyboard.

Screenshots of every page are left in the test's temporary directory. Those of the documentation are made with
`QUIRE_PICTURES=docs/images pytest tests/service/web/test_browser.py -k documentation`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys

from quire.manifest.records import JobKind, JobState
from quire.service.web.server import WebServer
from quire.store.store import Store
from tests.service.web.browser import Browser, browsing
from tests.service.web.http_client import HttpClient, admin_client, web_served

PAGES = {
    "#/": "Overview",
    "#/lineage": "Lineage",
    "#/feed": "Change feed",
    "#/jobs": "Jobs",
    "#/verification": "Verification",
    "#/why": "Why",
    "#/why/shop": "Why",
    "#/db/shop": "shop",
    "#/db/warehouse": "warehouse",
    "#/db/sessions": "sessions",
    "#/db/clicks": "clicks",
}


@pytest.fixture
def browser(web: WebServer, tmp_path: Path) -> Iterator[Browser]:
    with browsing(web.address, tmp_path) as opened:
        yield opened


def become_admin(browser: Browser, admin: HttpClient) -> None:
    browser.click("#who")
    browser.fill("#token input", admin.token)
    browser.press(Keys.ENTER)
    browser.wait(lambda: browser.text("#who") == "admin", "the token is accepted")


def test_it_loads_updates_live_and_creates_a_snapshot(
    browser: Browser, populated: Store, admin: HttpClient, tmp_path: Path
) -> None:
    """The smoke test: everything a user does in the first minute."""
    browser.open()
    assert "shop" in browser.text()
    assert "lakehouse tables that follow databases" in browser.text()
    populated.create("newcomer", "pages")
    browser.wait(lambda: "newcomer" in browser.text(), "a database that was just created")
    browser.open("#/db/shop")
    assert "@tuesday" not in browser.text()
    browser.click("main [data-key=snapshot]")  # without a token: it requests one first
    browser.fill("#token input", admin.token)
    browser.press(Keys.ENTER)
    browser.fill("#snapshot input", "tuesday")
    browser.press(Keys.ENTER)
    browser.wait(lambda: "@tuesday" in browser.text(), "the snapshot that was created here")
    assert [snapshot.name for snapshot in populated.manifest.snapshots.of("shop")] == ["monday", "tuesday"]
    assert browser.shot(tmp_path, "shop").stat().st_size > 20_000
    assert browser.complaints() == []
    assert admin.token not in str(
        browser.script("return location.href + document.cookie + JSON.stringify(localStorage)")
    )


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_loads_in_both_colour_schemes(
    browser: Browser, populated: Store, tmp_path: Path, scheme: str
) -> None:
    browser.scheme(scheme)
    for page, title in PAGES.items():
        browser.open(page)
        assert browser.text("main h1") == title
        assert title in browser.driver.title
        assert browser.shot(tmp_path, f"{scheme}-{title}").stat().st_size > 10_000
        assert browser.complaints() == [], page
        wide = browser.script("return document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, f"{page} scrolls sideways"
    shade = browser.script("return getComputedStyle(document.body).backgroundColor.match(/[0-9]+/)[0]")
    assert (int(shade) < 60) == (scheme == "dark")


HIDE_PATH = """
    const path = arguments[0];
    const hide = () => {
        const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
        for (let text; (text = texts.nextNode()); )
            if (text.data.includes(path)) text.data = text.data.replace(path, "/srv/quire");
    };
    hide();
    new MutationObserver(hide).observe(document.body, {subtree: true, childList: true, characterData: true});
"""
"""Shows a directory of the documentation instead of the test's, also after the page is refreshed."""


@pytest.mark.slow
def test_pictures_of_the_documentation(browser: Browser, populated: Store, tmp_path: Path) -> None:
    """docs/dashboard.md and the README show these four."""
    folder = Path(os.environ.get("QUIRE_PICTURES", tmp_path))
    browser.scheme("light")
    for page, name in {"#/": "overview", "#/lineage": "lineage", "#/db/shop": "database", "#/why/shop": "why"}.items():
        browser.open(page)
        browser.script(HIDE_PATH, populated.path)
        assert browser.shot(folder, f"dashboard-{name}").stat().st_size > 10_000
    assert browser.complaints() == []


@pytest.mark.slow
def test_the_colour_switch_overrides_the_system_and_is_remembered(browser: Browser, populated: Store) -> None:
    browser.scheme("light")
    browser.open()

    def shade() -> int:
        return int(browser.script("return getComputedStyle(document.body).backgroundColor.match(/[0-9]+/)[0]"))

    assert shade() > 200
    browser.click("#theme")
    assert shade() > 200
    browser.click("#theme")
    assert shade() < 60
    browser.open()
    assert shade() < 60
    browser.click("#theme")
    assert browser.text("#theme").endswith("auto")
    assert shade() > 200


@pytest.mark.slow
def test_a_narrow_window_fits(browser: Browser, populated: Store) -> None:
    for page in PAGES:
        browser.size(400, 800)
        browser.open(page)
        assert browser.script("return document.documentElement.scrollWidth") <= 400, page
    assert browser.complaints() == []


@pytest.mark.slow
def test_changes_arrive_in_the_feed_and_unfold(browser: Browser, populated: Store) -> None:
    browser.open("#/feed")
    first = browser.text(".change summary b")
    populated.create("later", "stream")
    browser.wait(lambda: browser.text(".change summary b") != first, "a new line")
    assert "RegisterDb" in browser.text(".change summary")
    browser.script("document.querySelector('.change summary').focus()")
    browser.press(Keys.ENTER)
    browser.wait(lambda: '"name":"later"' in browser.text(".change pre"), "its operations")
    populated.create("last", "stream")
    browser.wait(lambda: "last" in browser.text(".change summary"), "the next one")
    assert len(browser.all(".change[open]")) == 1
    assert browser.complaints() == []


@pytest.mark.slow
def test_jobs_are_retried_and_cancelled_from_the_page(browser: Browser, populated: Store, admin: HttpClient) -> None:
    queue = populated.manifest.jobs
    running = queue.claim_job(queue.enqueue(JobKind.COMPACTION), "worker-1")
    assert running is not None
    browser.open("#/jobs")
    become_admin(browser, admin)
    queue.renew(running, "worker-1", done=3, total=4)
    browser.wait(lambda: "3 of 4" in browser.text(), "progress, which is not in the feed")
    assert browser.one("[role=progressbar]").get_attribute("aria-valuenow") == "75"
    browser.click(f"[data-key=cancel-{running.job_id}]")
    browser.wait(lambda: queue.get(running.job_id).state is JobState.CANCELLED, "the job is cancelled")
    browser.click(f"[data-key=retry-{running.job_id}]")
    browser.wait(lambda: any(job.state is JobState.PENDING for job in queue.jobs()), "it is queued again")
    assert browser.complaints() == []


@pytest.mark.slow
def test_everything_can_be_reached_by_keyboard(browser: Browser, populated: Store) -> None:
    browser.open()
    for key, title in (
        ("2", "Lineage"),
        ("3", "Change feed"),
        ("4", "Jobs"),
        ("5", "Verification"),
        ("6", "Why"),
        ("1", "Overview"),
    ):
        browser.press(key)
        browser.wait(lambda title=title: browser.text("main h1") == title, title)  # type: ignore[misc]
    browser.open()
    browser.press(Keys.TAB)
    assert browser.script("return document.activeElement.className") == "skip"
    browser.press(Keys.ENTER)
    assert browser.script("return document.activeElement.id") == "content"
    reached = set()
    for _ in range(40):
        browser.press(Keys.TAB)
        reached.add(
            browser.script("return document.activeElement.getAttribute('href') || document.activeElement.dataset.key")
        )
    assert {"#/db/shop", "#/db/branch", "snap-shop"} <= reached
    browser.open("#/lineage")
    browser.script("document.querySelector('svg a').focus()")
    browser.press(Keys.ENTER)
    browser.wait(lambda: browser.text("main h1") == "shop", "the selected database of the lineage")
    browser.open("#/db/warehouse")
    browser.script("document.querySelector('svg.map').focus()")
    browser.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    browser.wait(lambda: "slot 2: generation 2" in browser.text(), "the third square")
    browser.press("?")
    browser.wait(lambda: browser.one("#help").is_displayed(), "the list of keys")
    browser.press(Keys.ESCAPE)
    browser.wait(lambda: not browser.one("#help").is_displayed(), "the list of keys is hidden")
    assert browser.complaints() == []


def test_the_why_box_explains_what_keeps_something(browser: Browser, populated: Store, tmp_path: Path) -> None:
    browser.open()
    browser.press("/")
    browser.wait(
        lambda: browser.script("return document.activeElement.dataset.key") == "why-subject",
        "the focus is in the why box",
    )
    browser.fill("[data-key=why-subject]", "shop")
    browser.press(Keys.ENTER)
    browser.wait(lambda: "quire snapshot drop shop monday" in browser.text(), "what would release it")
    populated.create("another", "pages")
    browser.wait(lambda: "another" in browser.text("nav"), "a change")
    assert "quire snapshot drop shop monday" in browser.text()
    browser.open("#/why/nobody")
    assert "Held by" not in browser.text()
    assert browser.all("main p.bad"), "an unknown name is reported"
    assert browser.shot(tmp_path, "why").stat().st_size > 10_000
    assert [message for message in browser.complaints() if "404" not in message and "400" not in message] == []


@pytest.mark.slow
def test_the_focus_is_kept_when_the_store_changes(browser: Browser, populated: Store) -> None:
    browser.open()
    browser.script("document.querySelector('[data-key=snap-shop]').focus()")
    populated.create("another", "pages")
    browser.wait(lambda: "another" in browser.text(), "the change")
    assert browser.script("return document.activeElement.dataset.key") == "snap-shop"


@pytest.mark.slow
def test_a_wrong_token_is_reported_and_a_forgotten_one_is_removed(
    browser: Browser, populated: Store, admin: HttpClient
) -> None:
    browser.open()
    browser.press("t")
    browser.fill("#token input", "not-the-token-not-the-token")
    browser.press(Keys.ENTER)
    browser.wait(lambda: "token is wrong" in browser.text("#token .error"), "the refusal")
    browser.click("#token [data-act=close]")
    become_admin(browser, admin)
    browser.driver.refresh()
    browser.wait(lambda: browser.text("#who") == "admin", "the tab remembers")
    browser.click("#who")
    browser.click("#token [data-act=forget]")
    browser.wait(lambda: browser.text("#who") == "read-only", "the token is forgotten")
    assert browser.script("return sessionStorage.length") == 0
    assert [message for message in browser.complaints() if "401" not in message] == []


@pytest.mark.slow
def test_names_are_shown_as_text_whatever_they_contain(browser: Browser, populated: Store) -> None:
    name = '<img src=x onerror="document.title=1">'
    populated.create(name, "pages")
    populated.snapshot(name, "<b>bold")
    for page in ("#/", "#/lineage", "#/feed", "#/db/%3Cimg%20src%3Dx%20onerror%3D%22document.title%3D1%22%3E"):
        browser.open(page)
        assert browser.all("main img, main b b") == []
    assert browser.text("main h1") == name
    assert browser.complaints() == []


@pytest.mark.slow
def test_a_hidden_page_releases_its_connection(browser: Browser, populated: Store, web: WebServer) -> None:
    """Hazard: a browser has six connections per server, so the seventh tab, or a page in the back/forward cache, would
    hang."""
    browser.open()
    browser.wait(lambda: web.figures().pages_now == 1, "one page is connected")
    for _ in range(8):
        browser.driver.switch_to.new_window("tab")
        browser.open("#/jobs")
    first = browser.driver.window_handles[0]
    browser.driver.switch_to.window(first)
    browser.open("#/feed")
    populated.create("newcomer", "pages")
    browser.wait(lambda: "newcomer" in browser.text(), "the first tab is live again")
    assert web.figures().pages_now <= 6


@pytest.mark.slow
def test_a_page_that_needs_a_token_asks_for_it(path: Path, tmp_path: Path) -> None:
    with web_served(path, http_ask_readers=True) as (store, web), browsing(web.address, tmp_path) as browser:
        store.create("shop", "pages")
        browser.driver.get(web.address)
        browser.fill("#token input", admin_client(web, store).token)
        browser.press(Keys.ENTER)
        browser.wait(lambda: "shop" in browser.text("main"), "the overview")
        browser.wait(lambda: browser.one("#live").get_attribute("data-state") == "live", "live updates")


@pytest.mark.slow
def test_the_page_recovers_after_the_owner_restarts(path: Path, tmp_path: Path) -> None:
    with web_served(path) as (_, web), browsing(web.address, tmp_path) as browser:
        browser.open()
        address = web.address.removeprefix("http://")
        web.close()
        browser.wait(lambda: browser.one("#live").get_attribute("data-state") != "live", "the owner is gone")
        with web._web.watched.store.serve_http(address):  # type: ignore[attr-defined]
            browser.wait(lambda: browser.one("#live").get_attribute("data-state") == "live", "the owner is back")
