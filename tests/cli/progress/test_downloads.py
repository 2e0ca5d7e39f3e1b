"""The download that a registration waits for, as `marserve register` shows it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from marserve.answers.management import DownloadEntry
from marserve.cli.output import Step
from marserve.cli.progress.downloads import AwaitedDownload, step_of
from marserve.cli.remote import Management
from support.documents import document_of
from support.fake_apis import FakeApis, fake_apis


def entry(**changes: Any) -> dict[str, Any]:
    """One of the list."""
    facts = {"id": 2, "url": "http://a/m.mar?…", "name": "m.mar", "state": "downloading", "bytes": 0, "seconds": 0.1}
    return {**facts, "fromCache": False, **changes}


@pytest.fixture
def apis() -> Iterator[FakeApis]:
    """A server without downloads, and then with some."""
    with fake_apis() as running:
        running.answer("GET /downloads", {"downloads": [entry(id=1)]})
        yield running


def test_the_download_of_the_address_is_shown_while_it_is_under_way(apis: FakeApis) -> None:
    """Not an earlier one of the same address, nor one of another."""
    running = entry(bytes=5_000_000, size=50_000_000, seconds=2.0)
    apis.answer("GET /downloads", {"downloads": [entry(id=1), entry(id=3, url="http://b/m.mar"), running]})
    apis.answer("GET /downloads", {"downloads": [entry(id=1), entry(state="done")]})

    with Management(apis.url) as server:
        download = AwaitedDownload(server, f"http://a/m.mar?key=secret#sha256={'0' * 64}")

        assert download.steps() == [Step("m.mar: 5.0 of 50.0 MB, 2.5 MB/s", 5_000_000, 50_000_000)]
        assert download.steps() == []


def test_a_name_in_the_store_is_no_download(apis: FakeApis) -> None:
    """The server is not even asked."""
    with Management(apis.url) as server:
        download = AwaitedDownload(server, "m.mar")

        assert (download.steps(), download.cancel()) == ([], False)

    assert apis.orders("GET") == []


def test_a_cancelled_command_ends_its_download(apis: FakeApis) -> None:
    """And says so only where there was one to end."""
    apis.answer("GET /downloads", {"downloads": [entry()]})
    apis.answer("GET /downloads", {"downloads": [entry(state="done")]})
    apis.answer("DELETE /downloads/2", {"status": "Download 2 is cancelled"})

    with Management(apis.url) as server:
        download = AwaitedDownload(server, "http://a/m.mar?key=secret")

        assert download.cancel()
        assert not download.cancel()

    assert [order.path for order in apis.orders("DELETE")] == ["/downloads/2"]


def test_a_server_without_the_list_shows_nothing() -> None:
    """An older one answers 404."""
    with fake_apis() as apis, Management(apis.url) as server:
        assert AwaitedDownload(server, "http://a/m.mar").steps() == []


@pytest.mark.parametrize(
    ("changes", "step"),
    [
        ({"state": "waiting"}, Step("m.mar: waiting for its origin")),
        ({"bytes": 1_500_000}, Step("m.mar: 1.5 MB", 1_500_000, None)),
        ({"bytes": 1, "size": 2_000_000}, Step("m.mar: 0.0 of 2.0 MB", 1, 2_000_000)),
    ],
)
def test_a_line_says_what_is_known(changes: dict[str, Any], step: Step) -> None:
    """The speed once it means something."""
    assert step_of(document_of(DownloadEntry, entry(**changes))) == step
