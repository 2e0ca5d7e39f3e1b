"""Downloads over HTTP: the list as its shape says, ending one, and what the metrics page has of them."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from marserve.api.application import build_app
from marserve.api.downloads import downloads_router
from marserve.api.schemas import DownloadsList
from marserve.store.download_list import FAMILIES, DownloadList
from marserve.store.source import Failed
from marserve.telemetry.metrics import Metrics
from support.management_house import client_of

pytestmark = pytest.mark.anyio

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def downloads() -> DownloadList:
    """One that was kept, one that failed."""
    listed = DownloadList()
    with listed.under_way("http://a/kept.mar?…", "kept.mar") as kept:
        kept.found(7)

    def fail() -> None:
        with listed.under_way("http://a/failed.mar", "failed.mar") as failed:
            failed.progress(3, None)
            raise Failed("the answer was 403")

    with pytest.raises(Failed):
        fail()
    return listed


async def test_the_list_is_as_its_shape_says(downloads: DownloadList) -> None:
    """What is not known is left out."""
    with downloads.under_way("http://a/m.mar", "m.mar") as running:
        running.progress(5, 10)
        async with client_of(build_app([downloads_router(downloads, enable_model_api=True)], title="t")) as client:
            answer = await client.get("/downloads")

    assert answer.status_code == 200
    DownloadsList.model_validate(answer.json())
    kept, failed, listed = answer.json()["downloads"]
    assert (kept["state"], kept["fromCache"], kept["bytes"], kept["size"]) == ("done", True, 7, 7)
    assert (failed["state"], failed["reason"]) == ("failed", "the answer was 403")
    assert "size" not in failed
    assert (listed["state"], listed["bytes"], listed["size"]) == ("downloading", 5, 10)
    assert "reason" not in listed


async def test_one_that_is_under_way_is_ended(downloads: DownloadList) -> None:
    """And no other; its number is in the list."""
    with downloads.under_way("http://a/m.mar", "m.mar") as running:
        async with client_of(build_app([downloads_router(downloads, enable_model_api=True)], title="t")) as client:
            missing = [
                (await client.delete(f"/downloads/{number}")).status_code
                for number in ("1", "99", "x", "-3", "9" * 5000)
            ]
            ended = await client.delete(f"/downloads/{running.id}")

        assert missing == [404] * 5
        assert ended.json() == {"status": f"Download {running.id} is cancelled"}
        assert running.cancel.is_set


async def test_without_the_model_api_none_is_ended(downloads: DownloadList) -> None:
    """Whoever may not register may not keep others from it."""
    with downloads.under_way("http://a/m.mar", "m.mar") as running:
        async with client_of(build_app([downloads_router(downloads, enable_model_api=False)], title="t")) as client:
            ended = await client.delete(f"/downloads/{running.id}")
            listed = await client.get("/downloads")

        assert ended.status_code in (404, 405)
        assert listed.status_code == 200
        assert not running.cancel.is_set


def test_the_metrics_page_counts_downloads(downloads: DownloadList) -> None:
    """Each family is documented, with its type."""
    metrics = Metrics("box")
    for name, kind, text, label, read in FAMILIES:
        metrics.declare(name, kind, text, label, functools.partial(read, downloads))

    with downloads.under_way("http://a/m.mar", "m.mar") as running:
        running.progress(5, 10)
        page = metrics.render().decode()

    assert 'marserve_downloads_total{result="cached"} 1.0\n' in page
    assert 'marserve_downloads_total{result="failed"} 1.0\n' in page
    assert 'marserve_downloads_total{result="fetched"} 0.0\n' in page
    assert "marserve_downloads 1.0\n" in page
    assert "marserve_download_bytes_total 8.0\n" in page
    rows = [line for line in (DOCS / "metrics.md").read_text().splitlines() if line.startswith("| `")]
    for name, kind, *_ in FAMILIES:
        assert any(f"`{name}`" in row and f"| {kind}" in row for row in rows), name
        assert re.search(rf"^# TYPE {name} {kind}$", page, re.MULTILINE)


def test_in_the_mode_of_lines_there_is_no_page(downloads: DownloadList) -> None:
    """Nothing is declared that nobody shows."""
    metrics = Metrics("box", mode="log")
    name, kind, text, label, read = FAMILIES[1]

    metrics.declare(name, kind, text, label, functools.partial(read, downloads))

    assert b"marserve_downloads" not in metrics.render()
