"""Stopping: what was accepted is answered, clients are told to go, idle connections end (RELIABILITY F1)."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from typing import Any

import pytest

from marserve.api.http.request_head import HttpLimits
from support.http_listener import Listening, listening

pytestmark = pytest.mark.anyio

HELD = b"POST /predictions/held HTTP/1.1\r\nHost: x\r\n\r\n"
ECHO = b"POST /predictions/echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi"


def stop(listener: Listening) -> asyncio.Task[None]:
    """Begin to stop as uvicorn's server does."""
    return asyncio.ensure_future(listener.server.shutdown())


async def test_a_request_under_way_is_answered_and_its_connection_closed() -> None:
    """With `connection: close`; the server waits for it."""
    async with listening(HttpLimits(linger_s=0.1)) as listener, listener.connect() as client:
        await client.send(HELD)
        job = await listener.plane.wait_for(1)
        stopping = stop(listener)
        await asyncio.sleep(0.02)
        assert not stopping.done()
        job.answer(b"finished")
        (answer,) = await client.read_all()
        await stopping

    assert (answer.body, answer.header("connection")) == (b"finished", "close")
    assert len(listener.table) == 0


async def test_a_stream_under_way_runs_to_its_end() -> None:
    """Its header said keep-alive; the connection closes all the same."""
    async with listening(HttpLimits(linger_s=0.1)) as listener, listener.connect() as client:
        await client.send(HELD)
        job = await listener.plane.wait_for(1)
        job.piece(b"one ")
        await client.reader.readuntil(b"one \r\n")
        stopping = stop(listener)
        await asyncio.sleep(0.02)
        job.piece(b"two", last=True)
        rest = await client.read_rest()
        await stopping

    assert rest == b"3\r\ntwo\r\n0\r\n\r\n"


async def test_before_the_end_answers_say_that_the_next_one_is_somebody_elses() -> None:
    """On the connections that are there, and on those that come; nothing else changes."""
    async with listening(HttpLimits(linger_s=0.1)) as listener, listener.connect() as here:
        await here.ask(ECHO)
        for connection in list(listener.server.server_state.connections):
            connection.part_after_next_answer()
            type(connection).listener.is_leaving = True
        async with listener.connect() as comes:
            for client in (here, comes):
                await client.send(ECHO)
                (answer,) = await client.read_all()
                assert (answer.status, answer.body, answer.header("connection")) == (200, b"hi", "close")


async def test_an_idle_connection_may_ask_once_more_and_is_told_to_go() -> None:
    """The request that a client is just sending is not lost."""
    async with listening(HttpLimits(drain_idle_s=60.0, linger_s=0.1)) as listener, listener.connect() as client:
        await client.ask(ECHO)
        (connection,) = listener.server.server_state.connections
        stopping = stop(listener)
        async with asyncio.timeout(10):
            while connection.keep_open:  # until it was told that the server goes
                await asyncio.sleep(0.001)
        await client.send(ECHO)
        (answer,) = await client.read_all()
        await stopping

    assert (answer.body, answer.header("connection")) == (b"hi", "close")


async def test_an_idle_connection_that_stays_silent_is_closed() -> None:
    """After a moment."""
    async with listening(HttpLimits(drain_idle_s=0.05, linger_s=0.1)) as listener, listener.connect() as client:
        await client.ask(ECHO)
        stopping = stop(listener)

        assert await client.read_all() == []
        await stopping


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})], ids=["uvloop"])
@pytest.mark.parametrize("end", ["the server goes", "it was idle for too long"])
async def test_a_request_that_came_while_the_loop_stalled_is_read_before_its_connection_is_closed(end: str) -> None:
    """uvloop runs its timers after what it has read, so the one that closes idle connections comes before the request
    that arrived while others were read.
    """
    is_going = end == "the server goes"
    limits = HttpLimits(drain_idle_s=0.01, linger_s=0.1, keep_alive_s=60.0 if is_going else 0.0)
    loop = asyncio.get_running_loop()
    ear, mouth = socket.socketpair()
    async with listening(limits) as listener, listener.connect() as client:
        await client.ask(ECHO)
        (connection,) = listener.server.server_state.connections
        wire = client.writer.get_extra_info("socket").fileno()

        def stall() -> None:
            loop.remove_reader(ear)
            if is_going:
                connection.shutdown()
            else:
                loop.call_later(0.01, connection.check, time.monotonic() + 1.0)
            assert os.write(wire, ECHO) == len(ECHO)
            time.sleep(0.03)

        loop.add_reader(ear, stall)
        mouth.send(b"x")
        answer = await client.read()
        loop.remove_reader(ear)
    ear.close()
    mouth.close()

    assert (answer.body, answer.header("connection") == "close") == (b"hi", is_going)


async def test_half_a_request_may_be_finished() -> None:
    """Its clock runs on; if it comes, it is answered."""
    async with listening(HttpLimits(drain_idle_s=0.0, linger_s=0.1)) as listener, listener.connect() as client:
        await client.send(ECHO[:-1])
        await asyncio.sleep(0.01)
        stopping = stop(listener)
        await asyncio.sleep(0.02)
        await client.send(ECHO[-1:])
        (answer,) = await client.read_all()
        await stopping

    assert answer.body == b"hi"


async def test_the_application_is_drained_too() -> None:
    """One that runs is waited for; one behind it is answered with `close`."""
    go = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async with listening(app=app) as listener, listener.connect() as client:
        await client.send(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(5):
            while not listener.table.answering:
                await asyncio.sleep(0.001)
        stopping = stop(listener)
        await asyncio.sleep(0.02)
        go.set()
        answers = await client.read_all()
        await stopping

    assert [answer.header("connection") for answer in answers] == ["close"]
