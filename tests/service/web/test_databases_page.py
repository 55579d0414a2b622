"""The dashboard's list of databases in a real Chromium: filters, orders and pages."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys

from quire.service.web.server import WebServer
from quire.store.store import Store
from tests.service.web.browser import Browser, browsing

pytestmark = pytest.mark.slow

NAMES = "return [...document.querySelectorAll('main tbody tr')].map((row) => row.cells[0].innerText)"
CHOOSE = """
    const field = document.querySelector(arguments[0]);
    field.value = arguments[1];
    field.dispatchEvent(new Event("change"));
"""


def has(browser: Browser, name: str) -> bool:
    return name in browser.text("#nav")


def shows(browser: Browser, *names: str) -> None:
    browser.wait(lambda: browser.script(NAMES) == list(names), f"the rows {names}")


def test_databases_are_filtered_sorted_and_paged(web: WebServer, populated: Store, tmp_path: Path) -> None:
    tenants = [f"tenant-{number:03d}" for number in range(150)]
    populated.create_many(tenants, "pages", tags={"plan": "free"})
    populated.create_many(["tenant-paid"], "stream", tags={"plan": "paid"})
    with browsing(web.address, tmp_path) as browser:
        browser.open("#/databases?prefix=tenant-")
        shows(browser, *tenants[:100])
        browser.click("main [data-key=next-page]")
        shows(browser, *tenants[100:], "tenant-paid")
        browser.click("main [data-key=first-page]")
        shows(browser, *tenants[:100])
        browser.fill("main [data-key=filter-prefix]", "*9")
        browser.press(Keys.ENTER)
        shows(browser, *tenants[9::10])
        browser.open("#/databases")
        browser.fill("main [data-key=filter-tag]", "plan=paid")
        browser.press(Keys.ENTER)
        shows(browser, "tenant-paid")
        browser.open("#/databases?prefix=tenant-")
        browser.script(CHOOSE, "main [data-key=filter-kind]", "stream")
        shows(browser, "tenant-paid")
        browser.script(CHOOSE, "main [data-key=filter-kind]", "")
        shows(browser, *tenants[:100])
        browser.script(CHOOSE, "main [data-key=filter-sort]", "written")
        browser.wait(lambda: browser.script(NAMES)[0] == "tenant-paid", "the newest change first")
        assert browser.complaints() == []
        browser.open("#/databases?kind=bogus")
        assert "unknown kind of database" in browser.text()


def test_a_live_update_keeps_what_is_typed(web: WebServer, populated: Store, tmp_path: Path) -> None:
    with browsing(web.address, tmp_path) as browser:
        browser.open("#/databases")
        browser.fill("main [data-key=filter-prefix]", "sho")
        populated.create("newcomer", "pages")
        browser.wait(lambda: "newcomer" in browser.text(), "a database that was just created")
        assert browser.script("return document.querySelector('[data-key=filter-prefix]').value") == "sho"
        assert browser.script("return document.activeElement.dataset.key") == "filter-prefix"


def test_a_live_update_does_not_move_the_caret_or_replace_an_open_list(
    web: WebServer, populated: Store, tmp_path: Path
) -> None:
    """What was typed after an update came before what was there, and the list of kinds closed under the mouse."""
    with browsing(web.address, tmp_path) as browser:
        for page, field in (("#/databases", "filter-prefix"), ("#/why", "why-subject")):
            browser.open(page)
            browser.fill(f"main [data-key={field}]", "sh")
            browser.press(Keys.ARROW_LEFT)
            browser.script("window.form = document.querySelector('main form')")
            for number in range(2):
                name = f"newcomer-{page[2:]}-{number}"
                populated.create(name, "pages")
                browser.wait(partial(has, browser, name), "a live update")
                browser.wait(
                    lambda: browser.script("return document.querySelector('main').dataset.stale") is None, "it"
                )
                browser.press(str(number))
            assert browser.script("return document.activeElement.value") == "s01h"
            assert browser.script("return window.form.isConnected")
        assert browser.complaints() == []


def test_an_address_with_a_lone_percent_sign(web: WebServer, populated: Store, tmp_path: Path) -> None:
    """The page stayed that of the address before, and the console had an error."""
    populated.create("50%", "pages")
    with browsing(web.address, tmp_path) as browser:
        browser.open("#/")
        browser.script("location.hash = '#/db/50%'")
        browser.wait(lambda: browser.text("main h1") == "50%", "the database")
        browser.script("location.hash = '#/why/50%'")
        browser.wait(lambda: browser.text("main h1") == "Why", "the page Why")
        assert browser.complaints() == []


def test_one_long_name_does_not_push_the_other_columns_away(web: WebServer, populated: Store, tmp_path: Path) -> None:
    populated.create("x" * 190, "pages")
    with browsing(web.address, tmp_path) as browser:
        browser.open("#/")
        right = "return document.querySelector('main table thead th:nth-child(9)').getBoundingClientRect().right"
        browser.wait(lambda: browser.script(right) < 1360, "the column of snapshots")


def test_the_status_is_announced_when_it_changes_only(web: WebServer, populated: Store, tmp_path: Path) -> None:
    with browsing(web.address, tmp_path) as browser:
        browser.open("#/")
        browser.script("""
            window.changes = 0;
            const words = document.getElementById("live").lastElementChild;
            new MutationObserver(() => { window.changes += 1; }).observe(words, { childList: true });
        """)
        head = browser.script("return document.getElementById('live').dataset.head")
        populated.create("newcomer", "pages")
        browser.wait(lambda: browser.script("return document.getElementById('live').dataset.head") != head, "an event")
        assert browser.script("return window.changes") == 0
