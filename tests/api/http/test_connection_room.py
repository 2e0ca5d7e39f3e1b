"""How many bytes connections may hold together: over real sockets, with a small bound (`byte_ledger.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any, cast

import pytest

from marserve.api.byte_ledger import LEAST_RESERVE_BYTES, PATIENCE_S, SMALL_BYTES, ByteLedger
from marserve.api.http.connection import READ_AHEAD, HttpConnection
from marserve.api.http.request_head import HttpLimits
from marserve.api.http.slowness import Flow
from support.http_client import Cut, RawClient, Response
from support.http_listener import Listening, listening

pytestmark = pytest.mark.anyio

MIB = 1024 * 1024
HEAD = b"POST /predictions/%b HTTP/1.1\r\nHost: x\r\n"
NOTHING = {"bodies": 0, "small_bodies": 0, "waiting": 0, "answers": 0}


async def wait_for_room(listener: Listening, ledger: ByteLedger) -> None:
    """Wait until nothing is held."""
    async with asyncio.timeout(10):
        while ledger.figures() != NOTHING:
            await asyncio.sleep(0.005)


async def send_all(client: RawClient, data: bytes) -> None:
    """Send what the server may stop to read."""
    with contextlib.suppress(Cut, ConnectionError):
        await client.send(data)


def read_error(answer: Response) -> tuple[int, str | None, bool]:
    """Status and cause of a refusal, and whether it says to come back soon."""
    return answer.status, answer.header("x-marserve-cause"), answer.header("retry-after") in {"1", "2", "3"}


@pytest.mark.parametrize(
    ("path", "is_chunked"),
    [
        (b"/predictions/echo", False),
        (b"/elsewhere", True),
        pytest.param(b"/predictions/echo", True, marks=pytest.mark.long),
        pytest.param(b"/elsewhere", False, marks=pytest.mark.long),
    ],
)
async def test_four_hundred_large_bodies_keep_the_bound_and_small_ones_pass(path: bytes, is_chunked: bool) -> None:
    """Each is answered or refused with 503 and when to come again; at the end nothing is held."""
    ledger = ByteLedger(4 * MIB)
    size, highest, ends = MIB, 0, []
    framing = b"Transfer-Encoding: chunked" if is_chunked else b"Content-Length: %d" % size
    piece = b"x" * 65_536
    body = (b"%x\r\n%b\r\n" % (len(piece), piece)) * 16 + b"0\r\n\r\n" if is_chunked else piece * 16

    # A refused client is heard out until it has read the refusal.
    async with listening(HttpLimits(linger_s=60.0), ledger=ledger) as listener:

        async def large() -> None:
            try:
                async with listener.connect() as client:
                    client.patience_s = None  # it may come behind all the others; the test as a whole has its limit
                    await client.send(b"POST %b HTTP/1.1\r\nHost: x\r\n%b\r\n\r\n" % (path, framing))
                    sending = asyncio.create_task(send_all(client, body))
                    answer = await client.read()
                    sending.cancel()
                    await asyncio.wait([sending])
                    ends.append(answer.status)
                    if answer.status == 503:
                        assert read_error(answer)[2]
            except (Cut, ConnectionError):
                ends.append(0)

        async def small() -> None:
            nonlocal highest
            async with listener.connect() as client:
                while any(not one.done() for one in running):
                    answer = await client.ask(HEAD % b"echo" + b"Content-Length: 2\r\n\r\nhi")
                    assert answer.status == 200
                    figures = ledger.figures()
                    assert figures["waiting"] <= ledger.reserve + 256 * 1024
                    highest = max(highest, figures["bodies"])
                    listener.plane.submitted.clear()
                    await asyncio.sleep(0.001)

        running = [asyncio.create_task(large()) for _ in range(400)]
        await asyncio.gather(small(), *running)
        listener.plane.submitted.clear()
        await wait_for_room(listener, ledger)

    assert len(ends) == 400
    assert set(ends) <= {200, 503, 0}
    assert ends.count(200) > 0
    assert ends.count(0) < 40
    assert 0 < highest <= 4 * MIB


async def test_a_body_larger_than_all_of_it_is_413_before_it_comes() -> None:
    """By its length, also where the client waits to be asked for it, and by its bytes where it is chunked."""
    ledger = ByteLedger(MIB)
    async with listening(ledger=ledger) as listener:
        for more in (b"", b"Expect: 100-continue\r\n"):
            async with listener.connect() as client:
                await client.send(HEAD % b"echo" + more + b"Content-Length: %d\r\n\r\n" % (MIB + 1))
                answer = await client.read()
                assert answer.status == 413
                assert "max_bytes_in_flight" in json.loads(answer.body)["message"]
        async with listener.connect() as client:
            fits = await client.ask(HEAD % b"echo" + b"Content-Length: %d\r\n\r\n" % MIB + b"x" * MIB)
        listener.plane.submitted.clear()
        async with listener.connect() as client:
            await client.send(HEAD % b"echo" + b"Transfer-Encoding: chunked\r\n\r\n")
            for _ in range(17):
                await send_all(client, b"10000\r\n" + b"x" * 65_536 + b"\r\n")
            chunked = await client.read()
        assert fits.status == 200
        assert chunked.status == 413
        await wait_for_room(listener, ledger)


async def test_a_body_waits_for_room_and_is_then_read() -> None:
    """One that asks before it sends is asked for its body when there is room."""
    ledger = ByteLedger(MIB)
    async with listening(ledger=ledger) as listener:
        held = ledger.take(MIB)
        assert held is not None
        async with listener.connect() as client, listener.connect() as asking:
            body = HEAD % b"echo" + b"Content-Length: 300000\r\n\r\n" + b"x" * 300_000
            sending = asyncio.create_task(send_all(client, body))
            await asking.send(HEAD % b"echo" + b"Expect: 100-continue\r\nContent-Length: 300000\r\n\r\n")
            async with asyncio.timeout(10):
                while len(ledger.waiting) < 2:
                    await asyncio.sleep(0.001)
            assert ledger.ahead <= LEAST_RESERVE_BYTES

            held.close()

            assert (await client.read()).status == 200
            assert (await asking.read()).status == 100
            await asking.send(b"y" * 300_000)
            assert (await asking.read()).body == b"y" * 300_000
            await sending
            listener.plane.submitted.clear()
        await wait_for_room(listener, ledger)


async def test_a_body_that_finds_no_room_in_time_is_503() -> None:
    """With its cause, and counted by it."""
    ledger = ByteLedger(MIB)
    held = ledger.take(MIB)
    async with listening(ledger=ledger) as listener, listener.connect() as client:
        await client.send(HEAD % b"echo" + b"Content-Length: 300000\r\n\r\nx")
        async with asyncio.timeout(10):
            while not ledger.waiting:
                await asyncio.sleep(0.001)
        now = ledger.waiting[0].waits_since
        assert now is not None
        listener.table.sweep(now + PATIENCE_S)

        assert read_error(await client.read()) == (503, "bytes_in_flight", True)
        assert listener.counts.refused == {"bytes_in_flight": 1}
    assert held is not None


async def test_small_bodies_are_refused_when_their_reserve_is_full() -> None:
    """Those that wait for their turn on a connection count, and are let go of with it."""
    ledger = ByteLedger(SMALL_BYTES)
    held = ledger.take_small(ledger.reserve // 2 + ledger.limit - 1000)
    request = HEAD % b"slow" + b"Content-Length: 600\r\n\r\n" + b"x" * 600
    async with listening(ledger=ledger) as listener:
        async with listener.connect() as client:
            await client.send(request * 3)
            async with asyncio.timeout(10):
                while listener.counts.refused.get("bytes_in_flight", 0) < 2:
                    await asyncio.sleep(0.001)
            (await listener.plane.wait_for(1)).answer(b"one")
            assert (await client.read()).body == b"one"
            assert read_error(await client.read()) == (503, "bytes_in_flight", True)
        await listener.wait_until_empty()
        assert ledger.small == ledger.reserve // 2 + ledger.limit - 1000
    assert held


async def test_a_body_keeps_its_room_as_long_as_its_request_is_known() -> None:
    """Until the answer, or after the client has gone until the request is forgotten."""
    ledger = ByteLedger(MIB)
    async with listening(ledger=ledger) as listener:
        async with listener.connect() as client:
            await client.send(HEAD % b"slow" + b"Content-Length: 300000\r\n\r\n" + b"x" * 300_000)
            job = await listener.plane.wait_for(1)
            assert ledger.bodies == 300_000
        await listener.wait_until_empty()
        assert ledger.room == MIB - 300_000
        del job
        listener.plane.submitted.clear()
        assert ledger.room == MIB


URLENCODED = b"a=" + b"x" * 200_000
MULTIPART = b'--b\r\nContent-Disposition: form-data; name="f"\r\n\r\n' + b"x" * 200_000 + b"\r\n--b--\r\n"


@pytest.mark.parametrize(
    ("kind", "form"),
    [(b"application/x-www-form-urlencoded", URLENCODED), (b"multipart/form-data; boundary=b", MULTIPART)],
)
async def test_a_form_keeps_its_room_though_its_parts_have_replaced_its_body(kind: bytes, form: bytes) -> None:
    """Decoded by a thread or at once; until the answer, or until the client has gone."""
    ledger = ByteLedger(MIB)
    whole = HEAD % b"slow" + b"Content-Type: %b\r\nContent-Length: %d\r\n\r\n" % (kind, len(form)) + form
    async with listening(ledger=ledger) as listener:
        async with listener.connect() as client:
            await client.send(whole)
            job = await listener.plane.wait_for(1)
            assert ledger.room == MIB - len(form)
            job.answer(b"")
            await client.read()
            await wait_for_room(listener, ledger)
            await client.send(whole)
            await listener.plane.wait_for(2)
            assert ledger.room == MIB - len(form)
        await listener.wait_until_empty()
        await wait_for_room(listener, ledger)


@pytest.mark.parametrize("size", [20_000, 100_000])
@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("is_at_once", [False, True])
async def test_a_body_that_came_in_pieces_counts_while_its_request_runs(
    size: int, is_chunked: bool, is_at_once: bool
) -> None:
    """Also one that has no hold of its own: a short one, and one whose chunks came in one read."""
    ledger = ByteLedger(MIB)
    first = second = b"x" * (size // 2)
    framing = b"Content-Length: %d" % size
    if is_chunked:
        framing = b"Transfer-Encoding: chunked"
        first = b"%x\r\n%b\r\n" % (len(first), first)
        second = first + b"0\r\n\r\n"
    async with listening(ledger=ledger) as listener, listener.connect() as client:
        await client.send(HEAD % b"slow" + framing + b"\r\n\r\n" + first + (second if is_at_once else b""))
        if not is_at_once:
            async with asyncio.timeout(10):
                while ledger.figures() == NOTHING:
                    await asyncio.sleep(0.001)
            await client.send(second)
        await listener.plane.wait_for(1)
        assert ledger.small + ledger.bodies == size


async def test_a_body_that_is_read_no_more_gives_its_room_back() -> None:
    """The answer before it closes the connection: what had come of the body, and what was to come, is not held."""
    ledger = ByteLedger(MIB)
    async with listening(ledger=ledger) as listener, listener.connect() as client:
        await client.send(HEAD % b"slow" + b"\r\n" + HEAD % b"slow" + b"Content-Length: 300000\r\n\r\n" + b"x" * 9)
        job = await listener.plane.wait_for(1)
        async with asyncio.timeout(10):
            while ledger.bodies != 300_000:
                await asyncio.sleep(0.001)
        for connection in listener.server.server_state.connections:
            cast("HttpConnection", connection).part_after_next_answer()
        job.answer(b"")
        assert (await client.read()).header("connection") == "close"
        assert ledger.figures() == NOTHING


class Valve(asyncio.Transport):
    """A transport of which only reading is looked at."""

    is_open = True

    def pause_reading(self) -> None:
        """Shut."""
        self.is_open = False

    def resume_reading(self) -> None:
        """Open."""
        self.is_open = True


async def test_reading_rests_while_there_is_any_reason_for_it() -> None:
    """The end of one reason does not end another: requests that wait for their turn keep a connection unread."""
    valve = Valve()
    flow = Flow(valve)
    steps: list[tuple[Callable[[], None], bool]] = [
        (flow.pause_reading, False),
        (lambda: flow.hold("room"), False),
        (lambda: flow.let_go("room"), False),
        (lambda: flow.let_go("room"), False),
        (flow.resume_reading, True),
        (lambda: flow.hold("room"), False),
        (flow.resume_reading, False),
        (lambda: flow.let_go("room"), True),
    ]
    for step, is_open in steps:
        step()
        assert (valve.is_open, flow.read_paused) == (is_open, not is_open)


async def test_answers_count_while_their_clients_do_not_take_them() -> None:
    """And no longer when they have gone."""
    ledger = ByteLedger(MIB)
    async with listening(ledger=ledger) as listener:
        async with listener.connect(read_ahead=1024) as client:
            await client.send(HEAD % b"slow" + b"\r\n")
            (await listener.plane.wait_for(1)).answer(b"x" * 20 * MIB)
            async with asyncio.timeout(10):
                while ledger.answers < 10 * MIB:
                    await asyncio.sleep(0.001)
            assert ledger.room < 0
        await listener.wait_until_empty()
        await wait_for_room(listener, ledger)


@pytest.mark.parametrize("is_ahead", [False, True])
async def test_a_client_that_takes_no_answer_keeps_no_room_for_a_body_that_it_does_not_send(is_ahead: bool) -> None:
    """Behind requests that it sent ahead, or with an answer that has begun before the body was there."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000):  # more than a client that takes nothing lets it write; ended soon when it has gone
            await send({"type": "http.response.body", "body": b"x" * 65_536, "more_body": True})

    ledger = ByteLedger(MIB)
    async with listening(ledger=ledger, app=app) as listener:
        async with listener.connect(read_ahead=1024) as deaf, listener.connect() as client:
            ahead = b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n" * 20 * is_ahead
            path = b"/predictions/slow" if is_ahead else b"/endless"
            begun = b"x" * 100_000
            await deaf.send(ahead + b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path, MIB) + begun)
            async with asyncio.timeout(10):
                while ledger.bodies < MIB or not ledger.answers:
                    await asyncio.sleep(0.001)
            answer = await client.ask(HEAD % b"echo" + b"Content-Length: %d\r\n\r\n" % 300_000 + b"x" * 300_000)
            assert answer.status == 200
            listener.plane.submitted.clear()
        await listener.wait_until_empty()
        await wait_for_room(listener, ledger)


@pytest.mark.parametrize("path", [b"/predictions/slow", b"/elsewhere"])
async def test_a_body_behind_slow_requests_of_its_connection_keeps_no_room_against_others(path: bytes) -> None:
    """Its connection is not read, by no fault of its client; others would wait for ever all the same."""
    ledger = ByteLedger(MIB)
    async with listening(ledger=ledger) as listener, listener.connect() as ahead, listener.connect() as client:
        body = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path, MIB) + b"x" * 1000
        await ahead.send((HEAD % b"slow" + b"\r\n") * (READ_AHEAD + 1) + body)
        async with asyncio.timeout(10):
            while ledger.bodies < MIB:
                await asyncio.sleep(0.001)
        answer = await client.ask(HEAD % b"echo" + b"Content-Length: %d\r\n\r\n" % 300_000 + b"x" * 300_000)
        assert answer.status == 200
