"""The dashboard's list of databases in a real Chromium: filters, orders and pages."""

from __future__ import annotations

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
