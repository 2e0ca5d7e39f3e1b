"""Downloads over HTTP: the list as its shape says, ending one, and what the metrics page has of them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from marserve.answers.management import DownloadsList, ModelDescription, NotThere
from marserve.api.rest.application import build_app
from marserve.api.rest.models.downloads import downloads_router
from marserve.store.addresses.fetch_guard import AllowedUrls
from marserve.store.fetching.download_list import FAMILIES, DownloadList
from marserve.store.fetching.fetcher import Fetcher
from marserve.store.sources.source import Failed
from marserve.telemetry.metrics.server_metrics import Metrics
from support.documents import document_of
from support.echo_archives import manifest, write_mar
from support.fault_proxy import Fault, FaultProxy, fault_proxy
from support.management_house import House, client_of
from support.range_origin import range_origin

pytestmark = pytest.mark.anyio


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
    document_of(DownloadsList, answer.json())
    kept, failed, listed = answer.json()["downloads"]
    assert (kept["state"], kept["fromCache"], kept["bytes"], kept["size"]) == ("done", True, 7, 7)
    assert (failed["state"], failed["reason"]) == ("failed", "the answer was 403")
    assert "size" not in failed
    assert list(kept) == ["id", "url", "name", "state", "bytes", "seconds", "fromCache", "size"]
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
    """Under the names that dashboards have."""
    metrics = Metrics("box")
    for name, read in FAMILIES:
        metrics.declare(name, functools.partial(read, downloads))

    with downloads.under_way("http://a/m.mar", "m.mar") as running:
        running.progress(5, 10)
        page = metrics.render().decode()

    assert 'marserve_downloads_total{result="cached"} 1.0\n' in page
    assert 'marserve_downloads_total{result="failed"} 1.0\n' in page
    assert 'marserve_downloads_total{result="fetched"} 0.0\n' in page
    assert "marserve_downloads 1.0\n" in page
    assert "marserve_download_bytes_total 8.0\n" in page


def test_in_the_mode_of_lines_there_is_no_page(downloads: DownloadList) -> None:
    """Nothing is declared that nobody shows."""
    metrics = Metrics("box", mode="log")
    name, read = FAMILIES[1]

    metrics.declare(name, functools.partial(read, downloads))

    assert b"marserve_downloads" not in metrics.render()


@contextlib.contextmanager
def stalled(folder: Path) -> Iterator[tuple[FaultProxy, str]]:
    """An origin that says half of an archive and no more until it is cleared; and the archive's address."""
    data = write_mar(folder / "made.mar", manifest("m", "2.0"), weights__dat=b"w" * 50_000).read_bytes()
    with range_origin() as origin, fault_proxy(origin.url) as proxy:
        origin.put("/m.mar", data)
        proxy.on(Fault(stall_at=len(data) // 2), times=50)
        yield proxy, f"{proxy.url}/m.mar"


async def arriving(client: httpx.AsyncClient, path: str) -> tuple[int, dict[str, Any]]:
    """Status of a describe, and what it says of an archive, once that has begun to come."""
    async with asyncio.timeout(20):
        while True:
            answer = await client.get(path)
            document = answer.json() if answer.status_code != 200 else answer.json()[0]
            told = document.get("arriving", [{}])[0]
            if told.get("bytes"):
                return answer.status_code, told
            await asyncio.sleep(0.01)


async def test_describe_shows_a_download_before_there_is_a_model(tmp_path: Path) -> None:
    """Still 404, in TorchServe's words, with what is on its way; ended by its number, the 404 is as ever."""
    with stalled(tmp_path) as (proxy, url):
        house = House(tmp_path / "house", fetcher=Fetcher(AllowedUrls([proxy.pattern])))
        async with client_of(house.application()) as client:
            call = asyncio.create_task(client.post("/models", params={"url": url}))
            status, told = await arriving(client, "/models/m")
            of_all, _ = await arriving(client, "/models/m/all")
            of_version, _ = await arriving(client, "/models/m/2.0")
            missing = document_of(NotThere, (await client.get("/models/m")).json())
            house.registry.refuse_new()
            ended = await call
            after = await client.get("/models/m")
        await house.registry.stop()

    assert (status, of_all, of_version) == (404, 404, 404)
    assert (missing.type, missing.message) == ("ModelNotFoundException", "Model not found: m")
    assert (told["state"], told["url"], told["size"] > told["bytes"]) == ("downloading", url, True)
    assert ended.status_code == 400
    assert after.json() == {"code": 404, "type": "ModelNotFoundException", "message": "Model not found: m"}


async def test_describe_shows_the_next_version_on_its_way(tmp_path: Path) -> None:
    """In the description of the version that serves; not any more when it is there."""
    with stalled(tmp_path) as (proxy, url):
        house = House(tmp_path / "house", fetcher=Fetcher(AllowedUrls([proxy.pattern])))
        house.put("first")
        async with client_of(house.application()) as client:
            first = {"url": "first-1.0.mar", "model_name": "m"}
            assert (await client.post("/models", params=first)).status_code == 200
            call = asyncio.create_task(client.post("/models", params={"url": url, "model_name": "m"}))
            status, told = await arriving(client, "/models/m")
            document = (await client.get("/models/m")).json()
            document_of(list[ModelDescription], document)
            house.registry.refuse_new()
            await call
            after = (await client.get("/models/m")).json()[0]
        await house.registry.stop()

    assert status == 200
    assert told["state"] == "downloading"
    assert "arriving" not in after
