"""What the connection hands on to the ASGI application: unchanged, within the limits, with everybody's headers."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from marserve.api.http.request_head import HttpLimits
from marserve.errors import VersionConflict
from support.http_client import Cut
from support.http_listener import listening

pytestmark = pytest.mark.anyio

HEAD = b"POST /models HTTP/1.1\r\nHost: x\r\n"


def answer_of(status: int = 200, body: bytes = b"ok", **headers: str) -> Any:
    """An application that answers so, and keeps its last scope in `.scopes`."""
    scopes: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(scope)
        lines = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": lines})
        await send({"type": "http.response.body", "body": body})

    app.scopes = scopes  # type: ignore[attr-defined]
    return app


async def test_the_scope_is_as_uvicorn_makes_it() -> None:
    """Names in lower case, the path decoded, the query raw; and the request id in its state."""
    app = answer_of()

    async with listening(app=app) as listener, listener.connect() as client:
        head = b"GET /models/a%20b?c=%20d HTTP/1.1\r\nHost: x\r\nX-Case: V\r\nDescribe: True\r\n\r\n"
        response = await client.ask(head)

    (scope,) = app.scopes
    assert (scope["method"], scope["path"], scope["query_string"]) == ("GET", "/models/a b", b"c=%20d")
    assert scope["headers"] == [(b"host", b"x"), (b"x-case", b"V"), (b"describe", b"True")]
    assert scope["state"]["sent_headers"] == [(b"Host", b"x"), (b"X-Case", b"V")]  # what a handler may see
    assert scope["state"]["request_id"] == response.header("x-request-id")


async def test_its_answers_have_the_headers_of_all_answers() -> None:
    """Once each; what the application set itself stays (contract §1.4)."""
    app = answer_of(201, content_length="2", cache_control="max-age=1")

    async with listening(app=app) as listener, listener.connect() as client:
        response = await client.ask(HEAD + b"\r\n")

    assert response.status == 201
    assert re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", response.header("x-request-id") or "")
    assert response.header("pragma") == "no-cache"
    assert response.header("expires") == "Thu, 01 Jan 1970 00:00:00 UTC"
    assert response.header("cache-control") == "max-age=1"
    assert re.search(r'"POST /models HTTP/1\.1" 201 \d+$', listener.log.lines[0])
    assert listener.counts.responses[2] == 1


async def test_bodies_arrive_whole_and_connections_stay() -> None:
    """With a length and in chunks, large and small."""
    async with listening() as listener, listener.connect() as client:
        first = await client.ask(HEAD + b"Content-Length: 300000\r\n\r\n" + b"a" * 300_000)
        second = await client.ask(HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nbc\r\n1\r\nd\r\n0\r\nX: y\r\n\r\n")
        third = await client.ask(HEAD + b"\r\n")

    assert first.body == b"POST /models " + b"a" * 300_000
    assert second.body == b"POST /models bcd"
    assert third.body == b"POST /models "


async def test_100_continue_is_said_when_the_application_reads() -> None:
    """Not before: it may refuse unread."""
    async with listening() as listener, listener.connect() as client:
        go_on = await client.ask(HEAD + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        answer = await client.ask(b"ab")

    assert (go_on.status, answer.body) == (100, b"POST /models ab")


async def test_a_crash_is_an_error_object(caplog: pytest.LogCaptureFixture) -> None:
    """500 without its text, which is in the log; the connection goes on."""
    async with listening() as listener, listener.connect() as client:
        response = await client.ask(b"GET /crash HTTP/1.1\r\nHost: x\r\n\r\n")
        again = await client.ask(HEAD + b"\r\n")

    assert response.status == 500
    assert sorted(json.loads(response.body)) == ["code", "message", "type"]
    assert b"secret" not in response.body
    assert "secret" in caplog.text
    assert response.header("x-request-id")
    assert listener.counts.responses[5] == 1
    assert again.status == 200


async def test_a_typed_error_that_nobody_caught_keeps_its_status() -> None:
    """The table holds here too."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise VersionConflict("m", "1.0")

    async with listening(app=app) as listener, listener.connect() as client:
        response = await client.ask(HEAD + b"\r\n")

    assert response.status == 409
    assert json.loads(response.body)["type"] == "ConflictStatusException"


async def test_a_crash_inside_an_answer_breaks_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    """Half an answer must not pass for a whole one."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise RuntimeError("broken")

    async with listening(app=app) as listener, listener.connect() as client:
        await client.send(HEAD + b"\r\n")
        with pytest.raises(Cut):
            await client.read()
        await listener.wait_until_empty()

    assert "broken" in caplog.text


async def test_an_application_that_answers_without_reading_is_left_alone() -> None:
    """The rest of the body is dropped, the next request found."""
    async with listening() as listener, listener.connect() as client:
        response = await client.ask(b"POST /unread HTTP/1.1\r\nHost: x\r\nContent-Length: 8\r\n\r\nabcd")
        again = await client.ask(b"efgh" + HEAD + b"\r\n")

    assert (response.status, again.body) == (200, b"POST /models ")


async def test_a_refusal_after_the_answer_says_nothing_more() -> None:
    """The application has answered; a body that then breaks the rules only ends the connection."""
    async with listening(HttpLimits(linger_s=0.05)) as listener, listener.connect() as client:
        await client.ask(b"POST /unread HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
        await client.send(b"broken\r\n")
        rest = await client.read_all()

    assert rest == []


async def test_a_refusal_inside_an_answer_cuts_it() -> None:
    """Two answers to one request would be worse."""
    begun = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass

    async with listening(app=app) as listener, listener.connect() as client:
        await client.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
        await begun.wait()
        await client.send(b"broken\r\n")
        with pytest.raises(Cut):
            await client.read()


async def test_a_broken_body_of_a_waiting_request_is_refused_in_its_turn() -> None:
    """Its application never runs."""
    async with listening(HttpLimits(linger_s=0.05)) as listener, listener.connect() as client:
        await client.send(b"POST /predictions/held HTTP/1.1\r\nHost: x\r\n\r\n")
        job = await listener.plane.wait_for(1)
        await client.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\nbroken\r\n")
        await asyncio.sleep(0.01)
        job.answer(b"first")
        answers = await client.read_all()

    assert [answer.status for answer in answers] == [200, 400]
    assert len(listener.log.lines) == 2


async def test_a_client_that_hangs_up_is_told_to_the_application() -> None:
    """As `http.disconnect`, also to one that waits for its turn."""
    seen: list[str] = []
    reading = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reading.set()
        seen.append((await receive())["type"])
        seen.append((await receive())["type"])

    async with listening(app=app) as listener, listener.connect() as client:
        await client.send(HEAD + b"\r\n" + HEAD + b"\r\n")
        await reading.wait()
        await asyncio.sleep(0.01)
        client.hang_up()
        await listener.wait_until_empty()

    assert seen == ["http.request", "http.disconnect"]
