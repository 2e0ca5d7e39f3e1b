"""Tests for a listening port: how many clients it takes, and how it ends."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from marserve.api.grpc.transport import port as ports
from marserve.api.grpc.transport.limits import GrpcLimits
from support.http2_client import framed
from support.http2_port import house
from support.processes import until

pytestmark = pytest.mark.anyio


async def test_a_client_too_many_is_hung_up_on() -> None:
    """At once; when one has gone another may come."""
    async with house(GrpcLimits(connections=1)) as it:
        async with it.client() as first:
            number = await first.call(framed(b"x"))
            await first.until_over(number)
            async with it.client() as second:
                await second.until_closed()
        await until(lambda: not len(it.port._clients), "the first has gone")
        async with it.client() as third:
            number = await third.call(framed(b"y"))
            await third.until_over(number)

    assert not second.seen
    assert third.data(number) == framed(b"y")


async def test_clients_that_are_turned_away_get_what_they_wait_for() -> None:
    """They are asked to open no further calls, and one that comes before they have heard it is answered, too."""
    async with house() as it, it.client() as client:
        it.may_read.clear()
        first = await client.call(framed(b"x"), "/house.Service/Talk")
        await until(lambda: it.begun, "it has begun")
        it.port.turn_away()
        with socket.socket() as sock:
            assert sock.connect_ex(("127.0.0.1", it.number)) != 0
        second = await client.call(framed(b"y"))
        it.may_read.set()
        await client.until_closed()

    assert (client.data(first), client.data(second)) == (framed(b"x"), framed(b"y"))
    assert client.sent_away() == (0, b"")


async def test_a_call_behind_the_last_one_is_refused_as_not_begun() -> None:
    """So that the client tries it elsewhere."""
    async with house() as it, it.client() as client:
        await client.call(framed(b"x"), "/house.Service/Never")
        await until(lambda: it.begun, "it has begun")
        it.port.turn_away()
        async with asyncio.timeout(20):
            while sum(1 for event in client.seen if type(event).__name__ == "ConnectionTerminated") < 2:
                await client.hear()
        late = await client.call(framed(b"y"))
        await client.until_over(late)
        [code] = [event.error_code for event in client.seen if getattr(event, "stream_id", None) == late]

        assert (int(code), len(it.begun)) == (7, 1)


async def test_a_port_that_is_cut_waits_for_no_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for one that takes nothing of what was written to it."""
    monkeypatch.setattr(ports, "CUT_LIMIT_S", 0.1)
    async with house() as it:
        _, writer = await asyncio.open_connection("127.0.0.1", it.number)
        writer.transport.pause_reading()
        settings = struct.pack(">HI", 4, 2**31 - 1)
        head = b"\x83\x86\x01\x04here\x04\x14/house.Service/Large\x0f\x10\x10application/grpc"
        frames = [
            (4, 0, 0, settings),
            (8, 0, 0, struct.pack(">I", 2**31 - 65_536)),
            (1, 4, 1, head),
            (0, 1, 1, framed(b"30000000")),
        ]
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        for kind, flags, stream, payload in frames:
            writer.write(
                struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload
            )
        await until(lambda: it.begun, "the call has begun")
        async with asyncio.timeout(10):
            await it.port.cut()
        writer.close()

    assert it.over == [1]


def test_limits_of_time_are_looked_at_often_enough() -> None:
    """Four times within the shortest, at most once a second, never in a frenzy."""
    assert GrpcLimits().sweep_s == 1.0
    assert GrpcLimits(age_s=2.0).sweep_s == 0.5
    assert GrpcLimits(keepalive_s=0.001).sweep_s == 0.05
