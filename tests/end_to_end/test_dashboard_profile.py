"""The dashboard's page of a profile in a true browser: one is made there, followed, shown, and its trace saved.

`make test-browser` runs these; what the browser showed is in `build/browser`, to be looked at.
"""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.browsing import NAMELESS, PHONE, Browsing, launched
from support.server import Server, make_archive

pytestmark = pytest.mark.browser

HOSTILE = "<img src=x onerror='window.hit = 1'>"
HANDLER = f"""
import time
import torch

weights = torch.randn(200, 200)

def handle(data, context):
    if data is None:
        return None
    with torch.profiler.record_function({HOSTILE!r}):
        value = weights
        for _ in range(20):
            value = torch.tanh(value @ weights)
    time.sleep(0.005)
    return ["done"] * len(data)
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium; skips where Playwright or Chromium is missing."""
    with launched() as found:
        yield found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose model gets requests all the time."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("profiled")
    make_archive(folder / "mix.mar", HANDLER)
    settings = {"load_models": "mix.mar", "default_workers_per_model": "1", "worker_threads": "1"}
    with Server(folder, entry="marserve", store=folder, settings=settings) as running:
        assert running.predict("mix", "x").status_code == 200
        is_over = threading.Event()

        def ask() -> None:
            while not is_over.is_set():
                running.predict("mix", "x")

        asking = threading.Thread(target=ask)
        asking.start()
        yield running
        is_over.set()
        asking.join()


def test_a_profile_is_made_followed_and_its_trace_saved(browser: Any, server: Server, tmp_path: Path) -> None:
    """From the model's page; the shares are those that the server answered."""
    browsing = Browsing(browser)
    page = browsing.open(f"{server.management}/#/models/mix", "a:text-is('Profile')")
    page.click("a:text-is('Profile')")
    page.wait_for_selector("button:text-is('Profile')")
    page.fill("label:has-text('Number') input", "2000000")
    page.click("button:text-is('Profile')")
    assert "from 1 to 20000" in page.inner_text("[role=alert]")
    page.fill("label:has-text('Number') input", "60")
    page.click("button:text-is('Profile')")
    page.wait_for_selector("progress")
    browsing.until("/ of 60,/.test(document.body.innerText)")
    browsing.picture("profile-progress-light-1100")
    page.wait_for_selector("table.parts")
    browsing.picture("profile-light-1100")

    last = server.client.get(f"{server.management}/models/mix/profile").json()["last"]
    assert "60 requests of the 60 asked for" in page.inner_text("main")
    shown = page.locator("table.parts tbody tr td:last-child").all_inner_texts()
    assert shown == [f"{100 * each['share']:.1f} %" for each in last["parts"]]
    assert "aten::mm" in page.inner_text("main")
    assert "batches; 1 thread each." in page.inner_text("main")
    with page.expect_download() as saved:
        page.click("button:text-is('Download the trace')")
    saved.value.save_as(tmp_path / "trace.json.gz")
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    assert any(each.get("name", "").startswith("marserve batch") for each in events)
    assert not page.evaluate(NAMELESS)
    assert page.evaluate("window.hit") is None
    browsing.check_calm(server.management)


def test_a_profile_that_is_left_is_ended(browser: Any, server: Server) -> None:
    """The server ends it with the page's call; a phone and a dark screen show it as well."""
    browsing = Browsing(browser, scheme="dark", size=PHONE)
    page = browsing.open(f"{server.management}/#/profile/mix", "button:text-is('Profile')")
    page.select_option("select", "seconds")
    page.fill("label:has-text('Number') input", "500")
    page.click("button:text-is('Profile')")
    page.click("button:text-is('Give up')")
    page.wait_for_selector("button:text-is('Profile')")
    browsing.picture("profile-dark-390")

    browsing.until("!document.querySelector('progress')")
    assert not server.client.get(f"{server.management}/models/mix/profile").json()["isRunning"]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_an_unknown_model_is_said_to_be(browser: Any, server: Server) -> None:
    """With a way back."""
    browsing = Browsing(browser)
    page = browsing.open(f"{server.management}/#/profile/nope", "[role=alert]")

    assert "Model not found: nope" in page.inner_text("[role=alert]")
