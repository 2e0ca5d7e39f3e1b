"""What one client may take: bytes, time, connections (RELIABILITY B1, B2, B3, B4, B5, B6, A4)."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from contextlib import AsyncExitStack
from time import monotonic
from typing import Any

import pytest

from marserve.api.http.request_head import HttpLimits
from support.http_client import Cut, RawClient
from support.http_listener import Listening, listening

pytestmark = pytest.mark.anyio

HEAD = b"POST /predictions/echo HTTP/1.1\r\nHost: x\r\n"
GOOD = HEAD + b"Content-Length: 2\r\n\r\nhi"


async def refusal(client: RawClient) -> tuple[int, str]:
    """Read the one answer of a connection that is then closed: its status and its error type."""
    answer = await client.read()
    assert answer.header("connection") == "close"
    assert await client.is_at_end()
    return answer.status, json.loads(answer.body)["type"]


async def send_slowly(client: RawClient, data: bytes) -> None:
    """Send, and let the listener read it before anything else is sent."""
    await client.send(data)
    await asyncio.sleep(0.01)


# ------------------------------------------------------------------------------------------------- header bytes


@pytest.mark.parametrize("has_inference", [True, False])
async def test_a_header_within_the_limit_passes_and_one_over_it_is_431(has_inference: bool) -> None:
    """64 KiB of header lines, to the byte (RELIABILITY B2)."""
    limit = 64 * 1024
    spare = limit - len(b"Host: x\r\n") - len(b"A: \r\n")

    async with listening(has_inference=has_inference) as listener:
        async with listener.connect() as client:
            fits = await client.ask(b"GET /predictions/echo HTTP/1.1\r\nHost: x\r\nA: " + b"a" * spare + b"\r\n\r\n")
        async with listener.connect() as client:
            await client.send(b"GET /predictions/echo HTTP/1.1\r\nHost: x\r\nA: " + b"a" * (spare + 1) + b"\r\n\r\n")
            over = await refusal(client)

    assert fits.status == 200
    assert over == (431, "RequestHeaderFieldsTooLargeException")


async def test_a_header_in_two_reads_is_measured_as_one() -> None:
    """The bytes of the reads before count."""
    async with listening(HttpLimits(header_bytes=1000)) as listener, listener.connect() as client:
        await send_slowly(client, HEAD + b"A: " + b"a" * 600 + b"\r\n")
        await client.send(b"B: " + b"b" * 600 + b"\r\n\r\n")

        assert await refusal(client) == (431, "RequestHeaderFieldsTooLargeException")


async def test_the_end_of_a_body_is_not_counted_as_header() -> None:
    """A read that holds a large body and the beginning of the next header refuses nobody."""
    limits = HttpLimits(header_bytes=1000, request_line_bytes=1000)
    async with listening(limits) as listener, listener.connect() as client:
        await send_slowly(client, HEAD + b"Content-Length: 50000\r\n\r\n")
        await send_slowly(client, b"x" * 50_000 + HEAD)
        await client.send(b"Content-Length: 0\r\n\r\n")
        answers = [await client.read(), await client.read()]

    assert [answer.status for answer in answers] == [200, 200]


@pytest.mark.parametrize("endless", [b"a" * 65_536, b"A: b\r\n" * 10_000], ids=["value", "lines"])
async def test_a_header_without_end_is_refused_while_it_comes(endless: bytes) -> None:
    """200 MB of header cost what the limit is, not what was sent (RELIABILITY B2)."""
    async with listening() as listener, listener.connect() as client:
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        sent = 0
        await client.send(HEAD + b"A: ")
        try:
            while sent < 200_000_000:
                client.writer.write(endless)
                sent += len(endless)
                await client.writer.drain()
                if client.reader._buffer:  # type: ignore[attr-defined]
                    break
        except ConnectionError:
            pass
        answer = await client.read()
        grown = tracemalloc.get_traced_memory()[1] - before
        tracemalloc.stop()

    assert answer.status == 431
    assert grown < 2_000_000  # of which the client's own write is one copy


async def test_101_header_lines_are_431() -> None:
    """100 pass (in the table of malformed requests)."""
    async with listening() as listener, listener.connect() as client:
        await client.send(HEAD + b"A: b\r\n" * 100 + b"\r\n")

        assert await refusal(client) == (431, "RequestHeaderFieldsTooLargeException")


@pytest.mark.parametrize("is_in_one_read", [True, False])
async def test_a_request_line_over_its_limit_is_414(is_in_one_read: bool) -> None:
    """8 KiB, line end included."""
    target = b"/predictions/echo?" + b"a" * (8192 - len(b"GET /predictions/echo? HTTP/1.1\r\n"))

    async with listening() as listener:
        async with listener.connect() as client:
            fits = await client.ask(b"GET " + target + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        async with listener.connect() as client:
            line = b"GET " + target + b"a HTTP/1.1\r\nHost: x\r\n\r\n"
            if is_in_one_read:
                await client.send(line)
            else:
                await send_slowly(client, line[:5000])
                await send_slowly(client, b"a" * 9000)
            over = await refusal(client)

    assert fits.status == 200
    assert over == (414, "RequestUriTooLongException")


# ------------------------------------------------------------------------------------------------- body bytes


@pytest.mark.parametrize("has_inference", [True, False])
async def test_a_body_announced_too_large_is_refused_unread(has_inference: bool) -> None:
    """413 with the error object, before a byte of the body is sent (RELIABILITY B6, contract Q35)."""
    limits = HttpLimits(body_bytes=100)
    async with listening(limits, has_inference=has_inference) as listener, listener.connect() as client:
        await client.send(HEAD + b"Content-Length: 101\r\nExpect: 100-continue\r\n\r\n")

        assert await refusal(client) == (413, "RequestEntityTooLargeException")


@pytest.mark.parametrize("has_inference", [True, False])
async def test_a_chunked_body_is_refused_when_it_grows_too_large(has_inference: bool) -> None:
    """It announces nothing."""
    limits = HttpLimits(body_bytes=100)
    async with listening(limits, has_inference=has_inference) as listener:
        async with listener.connect() as client:
            await client.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n40\r\n" + b"a" * 64 + b"\r\n")
            await client.send(b"40\r\n" + b"a" * 64 + b"\r\n0\r\n\r\n")
            refused = await refusal(client)
        async with listener.connect() as client:
            again = await client.ask(GOOD)

    assert refused == (413, "RequestEntityTooLargeException")
    assert again.status == 200


async def test_a_client_that_sends_on_still_reads_the_refusal() -> None:
    """30 MB into a 413: the answer is not lost to a reset."""
    async with listening(HttpLimits(body_bytes=100)) as listener, listener.connect() as client:
        sending = asyncio.ensure_future(client.send(HEAD + b"Content-Length: 30000000\r\n\r\n" + b"x" * 30_000_000))
        answer = await client.read()
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)

    assert answer.status == 413


async def test_a_body_of_very_many_chunks_is_refused() -> None:
    """The limit passes, one more does not (RELIABILITY A4)."""
    async with listening(HttpLimits(body_chunks=1000)) as listener:
        async with listener.connect() as client:
            fits = await client.ask(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 1000 + b"0\r\n\r\n")
        async with listener.connect() as client:
            await client.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 1001)
            over = await refusal(client)

    assert (fits.status, len(fits.body)) == (200, 1000)
    assert over == (400, "BadRequestException")


@pytest.mark.parametrize("endless", [b"1;" + b"a" * 65_536, b"0\r\nA: " + b"a" * 65_536], ids=["extension", "trailer"])
async def test_what_surrounds_chunks_cannot_be_endless(endless: bytes) -> None:
    """Extensions and trailers are dropped, but not for ever."""
    async with listening() as listener, listener.connect() as client:
        await send_slowly(client, HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        await client.send(endless)
        for _ in range(100):
            client.writer.write(b"a" * 65_536)
            await asyncio.sleep(0.001)
            if client.reader._buffer:  # type: ignore[attr-defined]
                break

        assert await refusal(client) == (431, "RequestHeaderFieldsTooLargeException")


# ------------------------------------------------------------------------------------------------- time


async def test_200_slow_headers_are_refused_and_a_good_client_is_served() -> None:
    """Slowloris: each is closed at the limit, whatever it still dribbles (RELIABILITY B1)."""
    async with listening() as listener, AsyncExitStack() as stack:
        slow = [await stack.enter_async_context(listener.connect()) for _ in range(200)]
        good = await stack.enter_async_context(listener.connect())
        for client in slow:
            client.writer.write(b"POST /predictions/echo HTTP/1.1\r\nHost: x\r\nA")
        await asyncio.sleep(0.05)
        began = monotonic()

        listener.table.sweep(began + 5)
        for client in slow:
            client.writer.write(b"a")
        assert (await good.ask(GOOD)).status == 200
        listener.table.sweep(began + 10)
        refused = [await refusal(client) for client in slow]
        assert (await good.ask(GOOD)).status == 200

    assert refused == [(408, "RequestTimeoutException")] * 200
    assert listener.counts.refused == {"too_slow": 200}


async def test_a_connection_that_says_nothing_is_closed() -> None:
    """Without a word: it asked nothing (RELIABILITY B4)."""
    async with listening() as listener, listener.connect() as client:
        await asyncio.sleep(0.01)
        listener.table.sweep(monotonic() + 9)
        assert len(listener.table) == 1

        listener.table.sweep(monotonic() + 11)

        assert await client.read_all() == []


async def test_an_idle_connection_is_kept_for_its_time() -> None:
    """Much longer than a first request's header."""
    async with listening() as listener, listener.connect() as client:
        await client.ask(GOOD)
        await client.send(b"\r\n")
        await asyncio.sleep(0.01)
        listener.table.sweep(monotonic() + 70)
        assert (await client.ask(GOOD)).status == 200

        listener.table.sweep(monotonic() + 76)

        assert await client.read_all() == []


async def test_a_request_that_waits_for_its_answer_is_not_idle() -> None:
    """How long it may take is the model's matter."""
    async with listening() as listener, listener.connect() as client:
        await client.send(HEAD.replace(b"echo", b"held") + b"\r\n")
        job = await listener.plane.wait_for(1)

        listener.table.sweep(monotonic() + 3600)
        job.answer(b"at last")

        assert (await client.read()).body == b"at last"


@pytest.mark.parametrize("has_inference", [True, False])
async def test_a_body_that_never_comes_is_408(has_inference: bool) -> None:
    """Announced, then silence for 30 s (RELIABILITY B3)."""
    async with listening(has_inference=has_inference) as listener, listener.connect() as client:
        await send_slowly(client, HEAD + b"Content-Length: 100\r\n\r\n")
        listener.table.sweep(monotonic() + 29)
        assert len(listener.table) == 1

        listener.table.sweep(monotonic() + 31)

        assert await refusal(client) == (408, "RequestTimeoutException")


async def test_a_body_that_drips_is_408() -> None:
    """Less than 1 KiB a second over 10 s; a faster one goes on (RELIABILITY B3)."""
    async with listening() as listener, listener.connect() as client:
        await send_slowly(client, HEAD + b"Content-Length: 100000\r\n\r\n" + b"x")
        began = monotonic()
        await send_slowly(client, b"x" * 11_000)
        listener.table.sweep(began + 10.5)
        assert len(listener.table) == 1
        await send_slowly(client, b"x" * 1000)
        listener.table.sweep(began + 15)
        assert len(listener.table) == 1

        listener.table.sweep(began + 21)

        assert await refusal(client) == (408, "RequestTimeoutException")


async def test_a_slow_body_behind_an_unanswered_request_waits_for_its_turn() -> None:
    """The refusal comes after the answer before it."""
    async with listening() as listener, listener.connect() as client:
        await send_slowly(client, HEAD.replace(b"echo", b"held") + b"\r\n" + HEAD + b"Content-Length: 9\r\n\r\n")
        job = await listener.plane.wait_for(1)
        listener.table.sweep(monotonic() + 31)
        job.answer(b"first")
        answers = await client.read_all()

    assert [answer.status for answer in answers] == [200, 408]


async def test_a_client_that_waits_for_100_continue_is_not_slow() -> None:
    """As long as it is the server that keeps it waiting."""
    async with listening() as listener, listener.connect() as client:
        expecting = HEAD + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n"
        await send_slowly(client, HEAD.replace(b"echo", b"held") + b"\r\n" + expecting)
        job = await listener.plane.wait_for(1)
        listener.table.sweep(monotonic() + 31)
        job.answer(b"")
        statuses = [(await client.read()).status, (await client.read()).status, (await client.ask(b"hi")).status]

    assert statuses == [200, 100, 200]


async def test_the_table_sweeps_by_itself() -> None:
    """Once started, it looks about once a second; stopped, no more."""
    async with listening(HttpLimits(header_timeout_s=0.0)) as listener, listener.connect() as client:
        listener.table.start()
        listener.table.start()

        assert await client.read_all() == []
        listener.table.stop()
        listener.table.stop()


# ------------------------------------------------------------------------------------------------- slow readers


async def fill(listener: Listening, client: RawClient) -> Any:
    """Begin a stream that the client does not read, until something of it waits in the server."""
    client.reader._transport.pause_reading()  # type: ignore[attr-defined]
    await client.send(HEAD.replace(b"echo", b"held") + b"\r\n")
    job = await listener.plane.wait_for(1)
    (connection,) = listener.table._connections
    for _ in range(1000):
        job.piece(b"x" * 65_536)
        if connection.unsent:  # type: ignore[attr-defined]
            break
        await asyncio.sleep(0)
    return job


async def test_a_reader_that_takes_nothing_is_cut_off() -> None:
    """After 60 s without a byte of progress; its request is cancelled (RELIABILITY B5)."""
    async with listening() as listener, listener.connect() as client:
        job = await fill(listener, client)
        now = monotonic()
        listener.table.sweep(now)
        listener.table.sweep(now + 59)
        assert not job.is_cancelled

        listener.table.sweep(now + 61)
        await listener.wait_until_empty()

    assert job.is_cancelled
    assert listener.counts.refused == {"slow_reader": 1}


async def test_a_reader_that_takes_something_is_not() -> None:
    """However much more is written meanwhile: what counts is what went out."""
    async with listening() as listener, listener.connect() as client:
        job = await fill(listener, client)
        now = monotonic()
        listener.table.sweep(now)
        client.reader._transport.resume_reading()  # type: ignore[attr-defined]
        await client.reader.read(10)
        await asyncio.sleep(0.02)
        client.reader._transport.pause_reading()  # type: ignore[attr-defined]
        for _ in range(20):
            job.piece(b"x" * 65_536)
        await asyncio.sleep(0.01)
        listener.table.sweep(now + 59)
        listener.table.sweep(now + 61)

        assert not job.is_cancelled


async def test_what_waits_for_a_slow_reader_is_bounded() -> None:
    """A stream that runs far ahead of its client is cut."""
    async with listening(HttpLimits(stream_buffer_bytes=1_000_000)) as listener, listener.connect() as client:
        job = await fill(listener, client)
        for _ in range(20):
            job.piece(b"x" * 65_536)
        await listener.wait_until_empty()

    assert job.is_cancelled
    assert listener.counts.refused == {"slow_reader": 1}


async def test_a_closed_connection_does_not_wait_for_ever_for_its_reader() -> None:
    """An answer that nobody takes is thrown away after 60 s, though the server has closed already."""
    async with listening() as listener, listener.connect() as client:
        client.reader._transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(HEAD.replace(b"echo", b"held") + b"Connection: close\r\n\r\n")
        (await listener.plane.wait_for(1)).answer(b"x" * 50_000_000)
        now = monotonic()
        listener.table.sweep(now)
        assert len(listener.table) == 1

        listener.table.sweep(now + 61)
        await listener.wait_until_empty()

        client.reader._transport.resume_reading()  # type: ignore[attr-defined]
        with pytest.raises((Cut, asyncio.LimitOverrunError)):
            await client.read()


# ------------------------------------------------------------------------------------------------- connections


async def test_connections_over_the_limit_are_told_so() -> None:
    """503 with the error object and `Retry-After`; when one goes, the next is served."""
    async with listening(HttpLimits(connections=2, linger_s=0.05)) as listener, AsyncExitStack() as stack:
        first = await stack.enter_async_context(listener.connect())
        second = await stack.enter_async_context(listener.connect())
        assert (await first.ask(GOOD)).status == (await second.ask(GOOD)).status == 200
        async with listener.connect() as third:
            answer = await third.read()
            assert await third.is_at_end()
        first.hang_up()
        async with asyncio.timeout(5):
            while len(listener.table) > 1:
                await asyncio.sleep(0.001)
        async with listener.connect() as fourth:
            assert (await fourth.ask(GOOD)).status == 200

    assert answer.status == 503
    assert answer.header("retry-after") in {"1", "2", "3"}
    assert json.loads(answer.body)["type"] == "ServiceUnavailableException"
    assert listener.counts.refused == {"connections": 1}


async def test_one_address_leaves_the_others_their_share() -> None:
    """Its connections are counted by themselves (RELIABILITY B8)."""
    async with listening(HttpLimits(connections=10, connections_per_address=2, linger_s=0.05)) as listener:
        async with listener.connect() as first, listener.connect() as second, listener.connect() as third:
            statuses = [(await client.ask(GOOD)).status for client in (first, second)]
            refused = await third.read()
        await listener.wait_until_empty()
        async with listener.connect() as again:
            statuses.append((await again.ask(GOOD)).status)

    assert statuses == [200, 200, 200]
    assert refused.status == 503
    assert b"your address" in refused.body
