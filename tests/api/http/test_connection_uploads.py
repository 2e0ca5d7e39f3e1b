"""Bodies of uploaded archives: of any length, never held whole, and not read any more once they are answered."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Any

import pytest
from uvicorn.protocols.http.flow_control import FlowControl

from marserve.api.byte_ledger import ByteLedger
from marserve.api.http.request_head import HttpLimits
from support.http_listener import listening

pytestmark = pytest.mark.anyio

LIMITS = HttpLimits(body_bytes=1000, upload_bytes=3_000_000, body_chunks=3)
HEAD = b"PUT /archives/m.mar HTTP/1.1\r\nHost: x\r\n"


class Counter:
    """An application that answers with how many bytes came; it reads only while `goes_on` is set.

    `began` is set with its first request; `ended` has how each one ended.
    """

    def __init__(self) -> None:
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.largest = 0
        self.began = asyncio.Event()
        self.ended: asyncio.Queue[str] = asyncio.Queue()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Count one body."""
        self.began.set()
        total = 0
        while True:
            await self.goes_on.wait()
            message = await receive()
            if message["type"] == "http.disconnect":
                self.ended.put_nowait("gone")
                return
            total += len(message["body"])
            self.largest = max(self.largest, len(message["body"]))
            if not message["more_body"]:
                break
        text = b"%d" % total
        headers = [(b"content-length", b"%d" % len(text))]
        await send({"type": "http.response.start", "status": 201, "headers": headers})
        await send({"type": "http.response.body", "body": text})
        self.ended.put_nowait("answered")


async def test_an_upload_may_be_longer_than_a_request_and_than_the_memory_for_bodies() -> None:
    """It is handed on in pieces, and counts as held nowhere; the connection stays."""
    app, ledger = Counter(), ByteLedger(100_000)

    async with listening(LIMITS, app=app, ledger=ledger) as listener, listener.connect() as client:
        whole = await client.ask(HEAD + b"Content-Length: 2000000\r\n\r\n" + b"a" * 2_000_000)
        held = ledger.figures()
        chunked = await client.ask(
            HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"186a0\r\n%b\r\n" % (b"a" * 100_000) * 5 + b"0\r\n\r\n"
        )

    assert (whole.status, whole.body, chunked.body) == (201, b"2000000", b"500000")
    assert app.largest < 1_000_000
    assert set(held.values()) == {0}


async def test_an_upload_that_is_not_read_is_not_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client waits as long as the server does."""
    app = Counter()
    app.goes_on.clear()
    paused = asyncio.Event()
    pause = FlowControl.pause_reading

    def note(flow: FlowControl) -> None:
        pause(flow)
        paused.set()

    monkeypatch.setattr(FlowControl, "pause_reading", note)

    async with listening(LIMITS, app=app) as listener, listener.connect() as client:
        asking = asyncio.create_task(client.ask(HEAD + b"Content-Length: 2900000\r\n\r\n" + b"a" * 2_900_000))
        async with asyncio.timeout(10):
            await paused.wait()
        app.goes_on.set()
        response = await asking

    assert response.body == b"2900000"
    assert app.largest < 1_000_000


@pytest.mark.parametrize(
    "request_bytes",
    [
        HEAD + b"Content-Length: 3000001\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"186a0\r\n%b\r\n" % (b"a" * 100_000) * 31,
    ],
)
async def test_a_longer_one_is_refused(request_bytes: bytes) -> None:
    """By its length at once, else when it passes the limit; its setting is named."""
    async with listening(LIMITS, app=Counter()) as listener, listener.connect() as client:
        response = await client.ask(request_bytes)

    assert response.status == 413
    assert b"max_upload_size, 3000000 bytes" in response.body


@pytest.mark.parametrize(
    "line", [b"POST /archives/m.mar", b"PUT /archive/m.mar", b"PUT /models/m", b"PUT /predictions/archives/m.mar"]
)
async def test_other_requests_have_their_own_limit(line: bytes) -> None:
    """And so has every request of a listener that takes no archives."""
    rest = b" HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n"
    async with listening(LIMITS, app=Counter()) as listener, listener.connect() as client:
        other = await client.ask(line + rest)
    async with listening(HttpLimits(body_bytes=1000), app=Counter()) as listener, listener.connect() as client:
        closed = await client.ask(b"PUT /archives/m.mar" + rest)

    assert (other.status, closed.status) == (413, 413)
    assert b"max_request_size" in closed.body


async def test_an_upload_that_is_answered_unread_closes_its_connection() -> None:
    """After the answer, which says so; a client that still sends gets it before the end."""

    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 409, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"no"})

    async with listening(LIMITS, app=refuse) as listener, listener.connect() as client:
        await client.send(HEAD + b"Content-Length: 2900000\r\n\r\n" + b"a" * 1_000_000)
        response = await client.read()
        await client.send(b"a" * 1_000_000)
        ended = await client.is_at_end()

    assert (response.status, response.body, response.header("connection")) == (409, b"no", "close")
    assert ended


async def test_an_upload_that_comes_whole_with_its_refusal_leaves_no_doubt() -> None:
    """A short body may be there when its answer is: then the connection stays."""

    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 409, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"no"})

    async with listening(LIMITS, app=refuse) as listener, listener.connect() as client:
        first = await client.ask(HEAD + b"Content-Length: 3\r\n\r\nabc")
        second = await client.ask(HEAD + b"Content-Length: 3\r\n\r\nabc")

    assert (first.status, second.status) == (409, 409)


async def test_100_continue_is_said_only_when_the_upload_is_read() -> None:
    """So that a refused client sends nothing."""
    app = Counter()

    async with listening(LIMITS, app=app) as listener, listener.connect() as client:
        await client.send(HEAD + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n")
        said = await client.read()
        await client.send(b"abcde")
        response = await client.read()

    assert said.status == 100
    assert response.body == b"5"


async def test_a_client_that_stalls_is_answered_and_the_application_hears() -> None:
    """As with every body."""
    app = Counter()

    async with listening(LIMITS, app=app) as listener, listener.connect() as client:
        await client.send(HEAD + b"Content-Length: 500\r\n\r\n")
        async with asyncio.timeout(10):
            await app.began.wait()
            [connection] = listener.server.server_state.connections
            connection.check(monotonic() + LIMITS.body_timeout_s)
            response = await client.read()
            ended = await app.ended.get()

    assert response.status == 408
    assert ended == "gone"


async def test_a_client_that_hangs_up_is_noticed() -> None:
    """In the middle of its body."""
    app = Counter()

    async with listening(LIMITS, app=app) as listener:
        async with listener.connect() as client:
            await client.send(HEAD + b"Content-Length: 500\r\n\r\nabc")
        async with asyncio.timeout(10):
            ended = await app.ended.get()

    assert ended == "gone"
