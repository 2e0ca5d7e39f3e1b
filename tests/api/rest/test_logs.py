"""The logs over HTTP: asked for, followed, and their level."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from marserve.answers.management import LoggingLevels, LogLines
from marserve.api.rest.application import build_app
from marserve.api.rest.logs import logs_router
from marserve.errors import ModelNotFound
from marserve.telemetry.logs import log_book
from marserve.telemetry.logs.log_book import LogBook
from marserve.telemetry.logs.recent_lines import MAX_WAITING_BYTES, RecentLines
from support.documents import document_of
from support.management_house import client_of

pytestmark = pytest.mark.anyio


class Levels:
    """Levels that are only kept."""

    def __init__(self) -> None:
        self.server = self.workers = "info"
        self.of_models: dict[str, str] = {}

    def set(self, level: str, model: str | None) -> None:
        """Keep it."""
        if model is None:
            self.server = self.workers = level
        else:
            self.of_models[model] = level


class House:
    """The routes over a book with one outlet, and the model `m`."""

    def __init__(self) -> None:
        self.outlet = RecentLines(most_bytes=1 << 20)
        self.book = LogBook(None, [self.outlet])
        self.levels = Levels()
        self.app = build_app([logs_router(self.book, self.levels, lambda model: ["1"], self.check)], title="t")

    def check(self, model: str) -> None:
        """Only `m` is there."""
        if model != "m":
            raise ModelNotFound(model)

    def write(self, *texts: str, request: str = "r-1") -> None:
        """Lines of the model log."""
        head = f"2026-01-31T12:00:00,000 [INFO ] W-9000-m_1-stdout MODEL_LOG [{request}] - "
        self.outlet.add("".join(f"{head}{text}\n" for text in texts).encode())

    async def get(self, **query: str) -> httpx.Response:
        """One question."""
        async with client_of(self.app) as client:
            return await client.get("/logs", params=query)


class Client:
    """A client that follows: it takes what it is sent as it likes."""

    def __init__(self, house: House, query: str = "") -> None:
        self.sent: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()
        self.may_send = asyncio.Event()
        self.may_send.set()
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._messages.put_nowait({"type": "http.request", "body": b"", "more_body": False})
        scope = {
            "type": "http",
            "method": "GET",
            "path": "/logs",
            "raw_path": b"/logs",
            "headers": [],
            "state": {},
            "query_string": f"follow=true{query}".encode(),
            "http_version": "1.1",
            "scheme": "http",
            "server": ("h", 1),
            "client": ("c", 2),
            "root_path": "",
        }
        self.answer = asyncio.ensure_future(house.app(scope, self._messages.get, self._send))

    async def _send(self, message: Any) -> None:
        await self.may_send.wait()
        self.sent.put_nowait(message)

    async def text(self) -> str:
        """The next piece of the body."""
        message = await asyncio.wait_for(self.sent.get(), 10)
        return str(message["body"].decode())

    async def begin(self) -> str:
        """The status and the first piece."""
        start = await asyncio.wait_for(self.sent.get(), 10)
        assert (start["status"], dict(start["headers"])[b"content-type"]) == (200, b"text/event-stream; charset=utf-8")
        return await self.text()

    def hang_up(self) -> None:
        """Go."""
        self._messages.put_nowait({"type": "http.disconnect"})


async def test_lines_are_as_their_shape_says() -> None:
    """The newest ones, filtered; a record with all of its lines."""
    house = House()
    house.write("one", "two")
    house.write("three", request="r-2")

    answer = await house.get(request="r-1", model="m", level="INFO", tail="5", log="model,server")

    assert answer.status_code == 200
    document_of(LogLines, answer.json())
    [line] = answer.json()["lines"]
    assert (line["log"], line["level"], line["requestId"]) == ("model", "INFO", "r-1")
    assert [part.rpartition(" - ")[2] for part in line["text"].split("\n")] == ["one", "two"]
    assert answer.json()["complete"] is True


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"level": "loud"}, "level is 'loud'; it must be one of debug, info, warning, error"),
        ({"tail": "0"}, "from 1 to 10000"),
        ({"tail": "-1"}, "from 1 to 10000"),
        ({"tail": "10001"}, "from 1 to 10000"),
        ({"tail": "x"}, "tail is 'x'; it must be a whole number"),
        ({"log": "model,diary"}, "log is 'diary'; it must be one of server, model, access"),
        ({"requestid": "x"}, "requestid"),
        ({"request": "x" * 10_000}, "request has 10000 characters; a request's id has at most 128"),
    ],
)
async def test_a_question_that_cannot_be_answered_is_refused(query: dict[str, str], words: str) -> None:
    """With what could be asked."""
    answer = await House().get(**query)

    assert answer.status_code == 400
    assert words in answer.json()["message"]


@pytest.mark.parametrize("request_id", ["a\nb", "a b", "<x>", "é"])
async def test_an_id_that_no_request_has_finds_nothing(request_id: str) -> None:
    """It is not a mistake of the form."""
    house = House()
    house.write("one")

    assert (await house.get(request=request_id)).json()["lines"] == []


async def test_too_many_searches_are_refused_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client may come again."""
    monkeypatch.setattr(log_book, "MOST_SEARCHES", 0)
    monkeypatch.setattr(log_book, "MOST_WAITING", 0)

    answer = await House().get()

    assert answer.status_code == 503
    assert "retry-after" in answer.headers


async def test_a_follower_gets_what_was_there_and_what_comes() -> None:
    """As events of one JSON document each; at the end of the server an event says so."""
    house = House()
    house.write("one")
    client = Client(house, "&request=r-1")
    first = await client.begin()
    house.write("other", request="r-2")
    house.write("two")
    second = await client.text()
    house.book.end_following()
    last = await client.text()
    await asyncio.wait_for(client.answer, 10)

    assert [json.loads(each.removeprefix("data: "))["text"][-3:] for each in (first, second)] == ["one", "two"]
    assert last == "event: end\ndata: {}\n\n"
    assert house.outlet.followers == ()


async def test_a_follower_that_hangs_up_is_forgotten() -> None:
    """Nothing goes on for it."""
    house = House()
    client = Client(house, "&tail=0")
    await client.begin()
    client.hang_up()
    await asyncio.wait_for(client.answer, 10)

    assert house.outlet.followers == ()


async def test_a_follower_that_is_too_slow_is_dropped() -> None:
    """What waits for it is bounded; when it takes something again, it is told."""
    house = House()
    client = Client(house, "&tail=0")
    await client.begin()
    client.may_send.clear()
    for _ in range(4):
        house.write("x" * (MAX_WAITING_BYTES // 2))
    client.may_send.set()

    texts = [await client.text()]
    while not texts[-1].startswith("event: error"):
        texts.append(await client.text())
    await asyncio.wait_for(client.answer, 10)

    assert "taken too slowly" in texts[-1]
    assert sum(map(len, texts)) < 4 * MAX_WAITING_BYTES
    assert house.outlet.followers == ()


async def test_a_follower_beyond_the_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its answer begins."""
    monkeypatch.setattr(log_book, "MOST_FOLLOWERS", 0)

    answer = await House().get(follow="true")

    assert answer.status_code == 503
    assert "followed by 0 calls" in answer.json()["message"]


async def test_levels_are_shown_and_changed() -> None:
    """By query or JSON, of all or of one model's workers."""
    house = House()
    async with client_of(house.app) as client:
        first = await client.get("/logging")
        second = await client.put("/logging", params={"level": "DEBUG"})
        third = await client.put("/logging", json={"level": "error", "model": "m"})

    assert first.json() == {"level": "info", "workers": "info", "models": {}}
    assert second.json() == {"level": "debug", "workers": "debug", "models": {}}
    assert third.json() == {"level": "debug", "workers": "debug", "models": {"m": "error"}}
    document_of(LoggingLevels, third.json())


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"level": "loud"}, 400, "it must be one of debug, info, warning, error"),
        ({}, 400, "Parameter level is required; it is one of debug, info, warning, error"),
        ({"level": "debug", "model": "n"}, 404, "n"),
    ],
)
async def test_a_level_that_cannot_be_set_is_refused(body: dict[str, str], status: int, words: str) -> None:
    """Nothing has changed then."""
    house = House()
    async with client_of(house.app) as client:
        answer = await client.put("/logging", json=body)

    assert answer.status_code == status
    assert words in answer.json()["message"]
    assert (house.levels.server, house.levels.of_models) == ("info", {})


async def test_files_are_searched_off_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop goes on while a thread reads."""
    import threading

    house, threads = House(), []
    house.book = LogBook(tmp_path, [])
    search = log_book.search_files

    def note(*given: Any) -> Any:
        threads.append(threading.current_thread())
        return search(*given)

    monkeypatch.setattr(log_book, "search_files", note)
    app = build_app([logs_router(house.book, house.levels, lambda model: [], house.check)], title="t")
    async with client_of(app) as client:
        assert (await client.get("/logs")).json() == {"lines": [], "complete": True}

    assert threads
    assert threads[0] is not threading.main_thread()
