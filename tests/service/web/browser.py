"""A headless Chromium, driven by Selenium: Debian's `chromium` and `chromium-driver`, or those that the environment
names."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=1360,900",
)
SECONDS = 20.0


def programs() -> tuple[str, str]:
    """The paths of the browser and its driver; skips the test if either is missing."""
    binaries = [
        os.environ.get("CHROMIUM") or shutil.which("chromium"),
        os.environ.get("CHROMEDRIVER") or shutil.which("chromedriver"),
    ]
    if not all(binaries):
        pytest.skip("needs a browser: apt-get install chromium chromium-driver (or set CHROMIUM and CHROMEDRIVER)")
    return str(binaries[0]), str(binaries[1])


class Browser:
    """One tab."""

    def __init__(self, driver: Any, base: str) -> None:
        self.driver = driver
        self.base = base

    def open(self, page: str = "#/") -> None:
        """Load the page and wait until it is drawn."""
        self.driver.get("about:blank")
        self.driver.get(f"{self.base}/{page}")
        self.wait(lambda: self.all("main h1"), f"{page} is drawn")
        self.wait(lambda: self.one("#live").get_attribute("data-state") == "live", "live updates")

    def all(self, css: str) -> list[WebElement]:
        elements: list[WebElement] = self.driver.find_elements(By.CSS_SELECTOR, css)
        return elements

    def one(self, css: str) -> WebElement:
        return self.all(css)[0]

    def text(self, css: str = "main") -> str:
        return str(self.script("return document.querySelector(arguments[0])?.innerText ?? ''", css))

    def script(self, code: str, *arguments: Any) -> Any:
        return self.driver.execute_script(code, *arguments)

    def press(self, *keys: str) -> None:
        """Send keys to the focused element."""
        for key in keys:
            webdriver.ActionChains(self.driver).send_keys(key).perform()

    def click(self, css: str) -> None:
        self.wait(lambda: self.all(css), css)
        self.script("document.querySelector(arguments[0]).click()", css)

    def fill(self, css: str, text: str) -> None:
        self.wait(lambda: self.one(css).is_displayed(), css)
        self.one(css).send_keys(text)

    def wait(self, condition: Callable[[], Any], message: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"{message}: timed out; the page shows {self.text('body')[:500]}"
            time.sleep(0.05)

    def scheme(self, name: str) -> None:
        """The colour scheme that the system prefers: "light" or "dark"."""
        feature = {"name": "prefers-color-scheme", "value": name}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def size(self, width: int, height: int) -> None:
        values = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", values)

    def shot(self, folder: Path, name: str) -> Path:
        """A screenshot of the whole page."""
        height = min(4000, int(self.script("return document.documentElement.scrollHeight")))
        self.size(1360, max(700, height))
        file = folder / f"{name}.png"
        assert self.driver.save_screenshot(str(file))
        self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        return file

    def complaints(self) -> list[str]:
        """Console messages since the last call: errors, warnings, blocked content."""
        return [f"{entry['level']}: {entry['message']}" for entry in self.driver.get_log("browser")]


@contextmanager
def browsing(base: str, folder: Path) -> Iterator[Browser]:
    """A browser with its own profile, closed at the end."""
    browser, driver = programs()
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (*FLAGS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield Browser(started, base)
    finally:
        started.quit()
