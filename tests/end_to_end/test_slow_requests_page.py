"""The pictures of docs/slow-requests.md: its case on a real server. `MARSERVE_WRITE_PICTURES=1` writes them anew."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from support.browsing import Browsing, launched
from support.explained import explained
from support.server import Server, make_archive
from support.summaries import SHORT, SUMMARISE, ask, write_round

pytestmark = pytest.mark.browser

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
MOST_BYTES = 80_000


def test_the_case_of_the_page_is_as_it_says(tmp_path: Path) -> None:
    """A short request waits behind a long one: the list counts it, and its page names the other one."""
    pillow = pytest.importorskip("PIL.Image")
    make_archive(tmp_path / "summaries.mar", SUMMARISE)
    settings = {"load_models": "summaries.mar", "default_workers_per_model": "1"}
    with Server(tmp_path, entry="marserve", store=tmp_path, settings=settings) as server, launched() as browser:
        for number in range(20):
            ask(server, f"note-{number}", SHORT)
        browsing = Browsing(browser, size=(900, 900))
        page = browsing.open(f"{server.management}/#/models/summaries", ".charts")
        for round_number in range(4):
            write_round(server, round_number)
        explained(server, "mail-35")
        pictures: dict[str, bytes] = {}
        page.wait_for_timeout(2500)  # the next figures
        pictures["slow-model.png"] = page.screenshot(clip={"x": 0, "y": 0, "width": 900, "height": 265})
        page.goto(f"{server.management}/#/requests?model=summaries")
        page.wait_for_selector(".requests tbody tr")
        pictures["slow-list.png"] = page.screenshot(clip={"x": 0, "y": 0, "width": 900, "height": 720})
        page.goto(f"{server.management}/#/requests/mail-30")
        page.wait_for_selector(".waterfall")
        why = page.inner_text(".why-panel")
        pictures["slow-request.png"] = page.screenshot(clip={"x": 0, "y": 50, "width": 900, "height": 690})
        listed = server.client.get(f"{server.management}/requests?model=summaries&slower_than=1s").json()["requests"]

    assert {each["cause"] for each in listed} == {"queue", "handler"}
    assert "request contract-3" in why
    for name, picture in pictures.items():
        image = pillow.open(io.BytesIO(picture)).convert("RGB").quantize(160)
        small = io.BytesIO()
        image.save(small, "PNG", optimize=True)
        assert small.tell() < MOST_BYTES
        if os.environ.get("MARSERVE_WRITE_PICTURES"):
            PICTURES.mkdir(exist_ok=True)
            (PICTURES / name).write_bytes(small.getvalue())
