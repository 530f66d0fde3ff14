"""A real headless Chromium, and what a user does with a page in it."""

from __future__ import annotations

import os
import shutil
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import wait_until

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is missing: keyshard[dev]")
ActionChains, Keys = webdriver.ActionChains, webdriver.Keys
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
SHOTS = os.environ.get("KEYSHARD_SCREENSHOTS")
"""Folder for screenshots; unset: none are made."""
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="no Chromium here; on Debian: apt-get install chromium chromium-driver",
)


@contextmanager
def browser() -> Iterator[Any]:
    """A browser, which ends with the block."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--window-size=1300,1500",
    ):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    made.set_page_load_timeout(30)
    try:
        yield made
    finally:
        made.quit()


class Tab:
    """The page of one run, in the browser."""

    def __init__(self, browser: Any, port: int) -> None:
        self.browser = browser
        self.url = f"http://127.0.0.1:{port}/"
        # The page of an earlier test may ask its source, which has ended, until it is left.
        browser.get("about:blank")
        browser.get_log("browser")
        browser.get(self.url)

    def text(self, css: str) -> str:
        """The text that an element shows now; empty without one."""
        script = (
            "const found = document.querySelector(arguments[0]);"
            "return found?.innerText ?? found?.textContent ?? ''"
        )
        return str(self.browser.execute_script(script, css))

    def count(self, css: str) -> int:
        script = "return document.querySelectorAll(arguments[0]).length"
        return int(self.browser.execute_script(script, css))

    def click(self, css: str) -> None:
        # By script: a table that is drawn again each second replaces its elements.
        script = "new MouseEvent('click', {bubbles: true})"
        self.browser.execute_script(
            f"document.querySelector(arguments[0]).dispatchEvent({script})", css
        )

    def press_button(self, css: str, name: str) -> None:
        """Click the button of a table that has a name."""
        script = (
            "const [css, name] = arguments;"
            "[...document.querySelectorAll(`${css} button`)]"
            ".find((one) => one.ariaLabel === name).click()"
        )
        self.browser.execute_script(script, css, name)

    def type(self, css: str, text: str) -> None:
        """Replace the text of a field."""
        field = self.browser.find_element("css selector", css)
        field.clear()
        field.send_keys(text)

    def select(self, css: str, text: str) -> None:
        script = (
            "const [css, text] = arguments; const found = document.querySelector(css);"
            "found.value = text; found.dispatchEvent(new Event('change'))"
        )
        self.browser.execute_script(script, css, text)

    def press(self, *keys: str) -> None:
        """Press keys, one after the other, where the focus is."""
        ActionChains(self.browser).send_keys(*keys).perform()

    def press_with_shift(self, key: str) -> None:
        ActionChains(self.browser).key_down(Keys.SHIFT).send_keys(key).key_up(Keys.SHIFT).perform()

    def is_focused(self, css: str) -> bool:
        script = "return document.activeElement.matches(arguments[0])"
        return bool(self.browser.execute_script(script, css))

    def tab_to(self, css: str) -> None:
        """Press the tab key until an element has the focus."""
        for _ in range(100):
            if self.is_focused(css):
                return
            self.press(Keys.TAB)
        pytest.fail(f"the tab key does not reach {css}")

    def shows(self, css: str, *wanted: str) -> None:
        wait_until(lambda: all(one in self.text(css) for one in wanted))

    def shows_row(self, css: str, *wanted: str) -> None:
        """Wait until one of the rows has all texts, wherever it is sorted."""
        script = "return [...document.querySelectorAll(arguments[0])].map(one => one.innerText)"

        def found() -> bool:
            rows: list[str] = self.browser.execute_script(script, css)
            return any(all(one in row for one in wanted) for row in rows)

        wait_until(found)

    def shot(self, name: str, css: str = "html") -> None:
        """Store a picture of an element, by default of the whole page, if a folder is set."""
        if SHOTS is not None:
            script = (
                "const one = document.querySelector(arguments[0]).getBoundingClientRect();"
                "return {x: one.x + scrollX, y: one.y + scrollY,"
                " width: one.width, height: one.height, scale: 1}"
            )
            # A dialog is in the window, which the page may exceed.
            taken = self.browser.execute_cdp_cmd(
                "Page.captureScreenshot",
                {
                    "captureBeyondViewport": css != "#plan",
                    "clip": self.browser.execute_script(script, css),
                },
            )
            (Path(SHOTS) / f"{name}.png").write_bytes(b64decode(taken["data"]))

    def errors(self) -> list[str]:
        """Messages of the console that are no hints."""
        levels = ("WARNING", "SEVERE")
        return [one["message"] for one in self.browser.get_log("browser") if one["level"] in levels]
