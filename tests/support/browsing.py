"""A page of a true browser, for tests marked `browser`: what it showed is kept in `build/browser`, to be looked at."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.server import poll

PICTURES = Path(__file__).parents[2] / "build" / "browser"
DESK, PHONE = (1100, 900), (390, 844)

# What a screen reader would have no name for.
NAMELESS = """
(() => {
    const isNamed = each => each.ariaLabel || each.textContent.trim() || each.hasAttribute("alt")
        || [...each.labels || []].some(label => label.textContent.trim());
    const all = [...document.querySelectorAll("input, select, textarea, button, summary, img")];
    return all.filter(each => !isNamed(each)).map(each => each.outerHTML);
})()
"""


class Browsing:
    """One page of a browser, and what it did: requests, and complaints of its console."""

    def __init__(self, browser: Any, scheme: str = "light", size: tuple[int, int] = DESK) -> None:
        self.context = browser.new_context(color_scheme=scheme, viewport={"width": size[0], "height": size[1]})
        self.page = self.context.new_page()
        self.page.set_default_timeout(60_000)
        self.complaints: list[str] = []
        self.requests: list[Any] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.complaints.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request))

    def open(self, url: str, until: str) -> Any:
        """Go to a page and wait for an element."""
        self.page.goto(url)
        self.page.wait_for_selector(until)
        return self.page

    def until(self, condition: str, limit_s: float = 30) -> None:
        """Wait until JavaScript says so: Playwright's own way evaluates text in the page, which its policy forbids."""
        for _ in poll(limit_s, condition):
            if self.page.evaluate(condition):
                return

    def picture(self, name: str) -> None:
        """Keep what is seen."""
        PICTURES.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=PICTURES / f"{name}.png", full_page=True)

    def check_calm(self, base: str) -> None:
        """No complaint, no request to elsewhere, nothing wider than the window."""
        assert not self.complaints
        outside = [each.url for each in self.requests if not each.url.startswith((f"{base}/", "blob:"))]
        assert not outside
        assert self.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@contextlib.contextmanager
def launched() -> Iterator[Any]:
    """A headless Chromium; skips where Playwright or Chromium is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="`make test-browser` installs Playwright")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("There is no Chromium here (apt-get install chromium)")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=found, args=flags)
        yield browser
        browser.close()
