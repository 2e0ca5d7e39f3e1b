"""Tests for one connection: what clients of HTTP/2 may do to it, and what they may not. Real sockets."""

from __future__ import annotations

import asyncio
import random
import struct

import pytest
from h2.settings import SettingCodes

from marserve.api.byte_ledger import ByteLedger
from marserve.api.grpc.transport import connection as connections
from marserve.api.grpc.transport import stream as streams
from marserve.api.grpc.transport.floods import MOST_CREDIT
from marserve.api.grpc.transport.limits import GrpcLimits
from support.http2_client import framed, head, http2_client
from support.http2_port import House, house
from support.processes import until

pytestmark = pytest.mark.anyio

CALM, CANCEL, REFUSED = 11, 8, 7


async def answers(house: House) -> bool:
    """Whether a client that behaves is served."""
    async with house.client() as client:
        number = await client.call(framed(b"good"))
        await client.until_over(number)
        return client.data(number) == framed(b"good")


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A frame of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


async def test_a_call_is_answered_with_its_status() -> None:
    """A header, the message, and trailers."""
    async with house() as it, it.client() as client:
        number = await client.call(framed(b"hello"))
        await client.until_over(number)

    assert client.data(number) == framed(b"hello")
    assert client.fields(number) == {
        ":status": "200",
        "content-type": "application/grpc",
        "grpc-accept-encoding": "identity,gzip,deflate",
        "grpc-status": "0",
    }


async def test_calls_that_come_in_one_read_begin_before_any_is_answered() -> None:
    """So that they belong in one batch."""
    async with house() as it, it.client() as client:
        for _ in range(20):
            number = client.http2.get_next_available_stream_id()
            client.http2.send_headers(number, head("/house.Service/Never"))
            client.http2.send_data(number, framed(b"x"), end_stream=True)
        await client.send()
        await until(lambda: it.begun, "a call has begun")

        assert len(it.begun) == 20


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "has no message"),
        (b"\0\0\0", "in the middle of a message"),
        (framed(b"hello")[:-1], "in the middle of a message"),
        (b"\7\0\0\0\1x", "the byte 7"),
        (framed(b"x" * 1001), "max_request_size, 1000 bytes"),
    ],
)
async def test_a_call_without_a_whole_message_is_told_why(data: bytes, words: str) -> None:
    """And others are served."""
    async with house(GrpcLimits(message_bytes=1000)) as it, it.client() as client:
        number = await client.call(data)
        await client.until_over(number)
        is_good = await answers(it)

    assert client.fields(number)["grpc-status"] == "3"
    assert words in client.fields(number)["grpc-message"]
    assert is_good


async def test_a_defect_of_a_service_ends_its_call_alone(caplog: pytest.LogCaptureFixture) -> None:
    """With INTERNAL, and a traceback in the log."""
    async with house() as it, it.client() as client:
        number = await client.call(framed(b"x"), "/house.Service/Broken")
        await client.until_over(number)
        again = await client.call(framed(b"y"))
        await client.until_over(again)

    assert (client.fields(number)["grpc-status"], client.data(again)) == ("13", framed(b"y"))
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(("method", "kind", "status"), [("GET", "application/grpc", "405"), ("POST", "text/x", "415")])
async def test_a_request_that_is_no_call_is_answered_as_http(method: str, kind: str, status: str) -> None:
    """In the words of HTTP/2, and the connection stays."""
    async with house() as it, it.client() as client:
        number = client.http2.get_next_available_stream_id()
        given = {":method": method, "content-type": kind}
        client.http2.send_headers(number, [(name, given.get(name, value)) for name, value in head()], end_stream=True)
        await client.send()
        await client.until_over(number)
        again = await client.call(framed(b"y"))
        await client.until_over(again)

    assert client.fields(number)[":status"] == status
    assert client.data(again) == framed(b"y")


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", b"\x16\x03\x01\x02\x00", b"\0" * 30])
async def test_what_is_no_http2_is_hung_up_on(data: bytes) -> None:
    """A browser, a client of TLS, noise."""
    async with house() as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.number)
        writer.write(data)
        async with asyncio.timeout(20):
            while await reader.read(65_536):
                pass
        writer.close()

        assert await answers(it)


async def test_a_client_that_says_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while."""
    monkeypatch.setattr(connections, "PREFACE_S", 0.1)
    async with house(GrpcLimits(keepalive_s=0.2)) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.number)
        async with asyncio.timeout(20):
            while await reader.read(65_536):
                pass
        writer.close()


async def test_metadata_over_the_limit_end_their_call_alone() -> None:
    """Far beyond it the connection, for the header is not even read to its end."""
    async with house(GrpcLimits(header_bytes=2000)) as it, it.client() as client:
        number = await client.call(framed(b"x"), x_long="a" * 3000)
        await client.until_over(number)
        again = await client.call(framed(b"y"))
        await client.until_over(again)
        assert client.fields(number)["grpc-status"] == "8"
        assert "max_header_bytes, 2000" in client.fields(number)["grpc-message"]
        assert client.data(again) == framed(b"y")

        await client.call(framed(b"x"), x_long="a" * 20_000)
        await client.until_closed()
        assert await answers(it)


async def test_more_calls_than_a_connection_may_have_are_refused() -> None:
    """As not begun, so that clients try them elsewhere; when one has ended another may begin."""
    async with house(GrpcLimits(calls_per_connection=3)) as it, it.client() as client:
        numbers = [await client.call(framed(b"x"), "/house.Service/Never") for _ in range(3)]
        await until(lambda: len(it.begun) == 3, "three have begun")
        # The client has not heard of the limit yet.
        fourth = await client.call(framed(b"x"))
        await client.until_over(fourth)
        codes = [int(event.error_code) for event in client.seen if getattr(event, "error_code", None) is not None]
        client.http2.reset_stream(numbers[0], CANCEL)
        await client.send()
        await until(lambda: it.cancelled == 1, "the first has ended")
        fifth = await client.call(framed(b"y"))
        await client.until_over(fifth)

    assert codes == [REFUSED]
    assert client.data(fifth) == framed(b"y")
    assert it.cancelled == 3


async def test_rapid_resets_begin_no_more_work_than_may_run_at_once() -> None:
    """CVE-2023-44487. What was reset is cancelled, and another client is served meanwhile."""
    async with house(GrpcLimits(calls_per_connection=10)) as it, it.client() as client:
        for _ in range(100):
            for _ in range(20):
                number = client.http2.get_next_available_stream_id()
                client.http2.send_headers(number, head("/house.Service/Never"))
                client.http2.send_data(number, framed(b"x"), end_stream=True)
                client.http2.reset_stream(number, CANCEL)
            await client.send()
            assert it.port.open_calls <= 10
        assert await answers(it)
        await until(lambda: not it.port.open_calls, "all are over")
        async with asyncio.timeout(20):  # it may be refused itself, as one of too many, while the last are cancelled
            answered = b""
            while not answered and not client.is_closed:
                number = await client.call(framed(b"mine"))
                await client.until_over(number)
                answered = client.data(number)

        assert answered == framed(b"mine")


@pytest.mark.parametrize(
    "one",
    [
        frame(4, 0, 0, struct.pack(">HI", 4, 65_535)),
        frame(6, 0, 0, b"12345678"),
        frame(2, 0, 1, struct.pack(">IB", 0, 1)),
        frame(0xAA, 0, 0, b"what is this"),
        frame(8, 0, 0, struct.pack(">I", 1)),
    ],
    ids=["settings", "pings", "priorities", "unknown", "windows"],
)
async def test_a_flood_of_frames_without_calls_is_sent_away(one: bytes) -> None:
    """By GOAWAY with ENHANCE_YOUR_CALM, whether the client reads or not; others are served meanwhile."""
    async with house() as it, it.client() as client:
        for _ in range(40):
            await client.send(one * (int(MOST_CREDIT) // 20))
        assert await answers(it)
        await client.until_closed()

    sent_away = client.sent_away()
    assert sent_away is None or sent_away[0] == CALM  # what was written may be lost with a connection that is reset
    assert client.is_closed


async def test_a_turn_of_the_loop_hands_on_few_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many came in one read; others run in between, and nothing is lost or reordered."""
    turns: list[int] = []
    feed = connections.Connection._feed

    def count(self: connections.Connection, data: bytes) -> None:
        turns.append(len(data))
        feed(self, data)

    monkeypatch.setattr(connections.Connection, "_feed", count)
    async with house() as it, it.client() as client:
        number = await client.call(framed(b"hello")[:3], ends=False)
        await client.send(frame(2, 0, 99, struct.pack(">IB", 0, 1)) * 1000)
        client.http2.send_data(number, framed(b"hello")[3:], end_stream=True)
        await client.send()
        await client.until_over(number)

    assert client.data(number) == framed(b"hello")
    assert max(turns) <= 14 * connections.MOST_FRAMES + 200
    assert len(turns) >= 1000 // connections.MOST_FRAMES


async def test_a_bad_call_that_is_reset_at_once_ends_no_other() -> None:
    """Its answer cannot be sent any more."""
    async with house(GrpcLimits(header_bytes=2000)) as it, it.client() as client:
        for fields in ([(":method", "GET"), *head()[1:]], [*head(), ("x-long", "a" * 3000)]):
            number = client.http2.get_next_available_stream_id()
            client.http2.send_headers(number, fields)
            client.http2.reset_stream(number, CANCEL)
            await client.send()
        good = await client.call(framed(b"good"))
        await client.until_over(good)

        assert client.data(good) == framed(b"good")


async def test_a_flood_of_empty_data_is_sent_away() -> None:
    """Each frame costs its sender nine bytes, and no window bounds them."""
    async with house() as it, it.client() as client:
        number = await client.call(framed(b"x")[:3], ends=False)
        for _ in range(40):
            await client.send(frame(0, 0, number) * (int(MOST_CREDIT) // 20))
        await client.until_closed()

        assert await answers(it)


async def test_a_client_that_pings_too_often_is_sent_away_in_grpcs_words() -> None:
    """Which its libraries know: they ask less often after it."""
    async with house(GrpcLimits(least_ping_interval_s=60)) as it, it.client() as client:
        for _ in range(4):
            client.http2.ping(b"12345678")
            await client.send()
        await client.until_closed()

    assert client.sent_away() == (CALM, b"too_many_pings")


async def test_a_header_without_end_is_hung_up_on() -> None:
    """A million bytes of continuation."""
    async with house() as it, it.client() as client:
        await client.send(frame(1, 0, 1, b"\x82"))
        for _ in range(70):
            await client.send(frame(9, 0, 1, b"\0\1a\1b" * 3000))
        await client.until_closed()

        assert await answers(it)


@pytest.mark.parametrize("hundreds", [5, pytest.param(100, marks=pytest.mark.long)])
async def test_many_calls_of_one_connection_leave_nothing(hundreds: int) -> None:
    """And the connection holds no more than those that run."""
    async with house() as it, it.client() as client:
        for _ in range(hundreds):
            numbers = [await client.call(framed(b"x")) for _ in range(100)]
            await client.until_over(numbers[-1])
            client.seen.clear()
        assert len(it.begun) == 100 * hundreds
        assert it.port.open_calls == 0


async def test_an_answer_waits_for_a_client_whose_window_is_shut() -> None:
    """Whole, in pieces as large as the client takes; others on the connection pass it."""
    async with house() as it, it.client() as client:
        client.http2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})
        await client.send()
        large = await client.call(framed(b"100000"), "/house.Service/Large")
        await until(lambda: it.begun, "it has begun")
        never_sent = client.data(large)
        client.http2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1000})
        await client.send()
        await client.until_over(large)

    assert never_sent == b""
    assert client.data(large) == framed(b"y" * 100_000)


async def test_an_answer_that_nobody_takes_is_given_up() -> None:
    """After twice the time that a service would wait, and its bytes count no longer."""
    async with house(GrpcLimits(stall_timeout_s=0.1, keepalive_s=0.4)) as it, it.client() as client:
        client.http2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})
        await client.send()
        number = await client.call(framed(b"100000"), "/house.Service/Large")
        await client.until_over(number)

        assert it.over == [number]


async def test_a_stream_is_made_no_faster_than_its_client_takes_it() -> None:
    """And goes on when it does."""
    async with house() as it, it.client() as client:
        client.acknowledges = False
        number = await client.call(framed(b"50"), "/house.Service/Drip")
        async with asyncio.timeout(20):
            while len(client.data(number)) < 65_535:
                await client.hear()
        assert it.written == 6
        client.acknowledges = True
        client.http2.acknowledge_received_data(65_535, number)
        await client.send()
        await client.until_over(number)

    assert (it.written, len(client.data(number))) == (50, 50 * 10_005)


async def test_a_dialogue_that_is_not_read_shuts_its_clients_window() -> None:
    """So that its messages do not pile up; it opens as they are read."""
    async with house() as it, it.client() as client:
        it.may_read.clear()
        number = await client.call(framed(b"m" * 10_000), "/house.Service/Talk", ends=False)
        sent = 1
        await client.hear()
        while client.http2.local_flow_control_window(number) > 20_000:
            client.http2.send_data(number, framed(b"m" * 10_000))
            await client.send()
            sent += 1
        assert 50 < sent < 120
        it.may_read.set()
        client.http2.end_stream(number)
        await client.send()
        await client.until_over(number)

    assert client.data(number) == framed(b"m" * 10_000) * sent


async def test_a_message_that_comes_in_pieces_is_one() -> None:
    """Each byte in a frame of its own."""
    async with house() as it, it.client() as client:
        number = await client.call(b"", ends=False)
        for byte in framed(b"slowly"):
            client.http2.send_data(number, bytes([byte]))
            await client.send()
        client.http2.end_stream(number)
        await client.send()
        await client.until_over(number)

    assert client.data(number) == framed(b"slowly")


async def test_a_message_without_room_is_refused_while_it_comes() -> None:
    """By what it announces; what it held is given back."""
    async with house(ledger=ByteLedger(1024 * 1024)) as it, it.client() as client:
        number = await client.call(framed(b"x" * 6_000_000)[:10_000], ends=False)
        await until(lambda: it.ledger.waiting, "it waits for room")
        it.ledger.turn(asyncio.get_running_loop().time() + 3600)
        await client.until_over(number)

    assert client.fields(number)["grpc-status"] == "3"
    assert "max_bytes_in_flight" in client.fields(number)["grpc-message"]


async def test_a_message_that_comes_too_slowly_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that never begins."""
    monkeypatch.setattr(streams, "MESSAGE_S", 0.1)
    async with house(GrpcLimits(keepalive_s=0.4)) as it, it.client() as client:
        begun = await client.call(framed(b"hello")[:-1], ends=False)
        silent = await client.call(b"", ends=False)
        for number in (begun, silent):
            await client.until_over(number)
            assert "did not arrive in time" in client.fields(number)["grpc-message"]


@pytest.mark.parametrize("path", ["Never", "Echo"])
async def test_a_deadline_ends_a_call_whatever_it_waits_for(path: str) -> None:
    """Its service, or its client's message."""
    async with house() as it, it.client() as client:
        data = framed(b"x") if path == "Never" else b""
        number = await client.call(data, f"/house.Service/{path}", ends=False, grpc_timeout="50m")
        await client.until_over(number)

    assert client.fields(number)["grpc-status"] == ("4" if path == "Never" else "3")
    assert "deadline" in client.fields(number)["grpc-message"]


async def test_a_client_that_is_silent_is_asked_and_cut() -> None:
    """Without an answer; one that answers stays."""
    async with house(GrpcLimits(keepalive_s=0.2, keepalive_timeout_s=0.3)) as it:
        async with it.client() as client:
            await client.call(framed(b"x"), "/house.Service/Never")
            await until(lambda: it.begun, "it has begun")
            # The socket's buffer takes the ping, and nobody answers it.
            await until(lambda: it.cancelled == 1, "its call is cancelled")
        async with it.client() as client:
            number = await client.call(framed(b"x"), "/house.Service/Never")
            hearing = asyncio.ensure_future(client.until_over(number, 60))
            await asyncio.sleep(1.2)
            assert not hearing.done()
            hearing.cancel()


async def test_a_client_that_will_leave_gets_its_answers() -> None:
    """GOAWAY of a client says only that it takes no calls of the server's."""
    async with house() as it, it.client() as client:
        number = await client.call(framed(b"300000"), "/house.Service/Large", ends=False)
        await client.send(frame(7, 0, 0, struct.pack(">II", 0, 0)))
        client.http2.end_stream(number)
        await client.send()
        await client.until_over(number)

    assert len(client.data(number)) == 300_005


async def test_an_old_connection_is_asked_to_go_and_what_runs_is_answered() -> None:
    """First without a last call, then with it; it is closed when the last call has ended."""
    async with house(GrpcLimits(age_s=0.1, age_grace_s=30)) as it, it.client() as client:
        it.may_read.clear()
        number = await client.call(framed(b"x"), "/house.Service/Talk")
        async with asyncio.timeout(20):
            while client.sent_away() is None:
                await client.hear()
        it.may_read.set()
        await client.until_closed()

    assert client.data(number) == framed(b"x")
    assert client.sent_away() == (0, b"")


async def test_a_connection_without_a_call_is_asked_to_go() -> None:
    """When it has had none for so long; one whose call runs stays however long that takes."""
    async with house(GrpcLimits(idle_s=0.2)) as it, it.client() as idle, it.client() as busy:
        it.may_read.clear()
        number = await busy.call(framed(b"x"), "/house.Service/Talk")
        await idle.until_closed()
        it.may_read.set()
        await busy.until_closed()

    assert (idle.sent_away(), busy.sent_away()) == ((0, b""), (0, b""))
    assert busy.data(number) == framed(b"x")


@pytest.mark.parametrize("seed", [*range(3), pytest.param(99, marks=pytest.mark.long)])
async def test_no_bytes_break_the_port(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """Frames that are nearly right, cut, repeated and changed; a good client is served after each."""
    dice = random.Random(seed)
    async with house() as it:
        for _ in range(5000 if seed == 99 else 150):
            async with http2_client("127.0.0.1", it.number) as client:
                client.acknowledges = dice.random() < 0.5
                await client.send(b"".join(nonsense(dice) for _ in range(dice.randrange(12))))
        assert await answers(it)
    assert not [record for record in caplog.records if record.exc_info]


def nonsense(dice: random.Random) -> bytes:
    """A frame that is nearly one."""
    kind, stream = dice.randrange(12), dice.choice((0, 1, 1, 3, 5, 2, 2**31 - 1))
    payload = dice.choice(
        (
            b"",
            dice.randbytes(dice.randrange(40)),
            framed(b"hello"),
            framed(b"100000"),
            b"\x83\x86\x01\x04here\x04\x13/house.Service/Talk\x0f\x10\x10application/grpc",
            struct.pack(">I", dice.choice((0, 1, 2**31 - 1))),
            struct.pack(">HI", dice.randrange(9), dice.choice((0, 1, 16_384, 2**31 - 1, 2**32 - 1))),
        )
    )
    data = bytearray(frame(kind, dice.choice((0, 1, 4, 5, 8, 32, 255)), stream, payload))
    if dice.random() < 0.2:
        data[dice.randrange(len(data))] = dice.randrange(256)
    return bytes(data[: dice.randrange(len(data) + 1)] if dice.random() < 0.1 else data)


@pytest.mark.parametrize(
    "first", [b"GET /ping HTTP/1.1\r\nhost: x\r\n\r\n", b"OPTIONS / HTTP/1.0\r\n", b"POST /predict"]
)
async def test_a_client_of_http_1_is_told_where_it_is_in_its_own_protocol(first: bytes) -> None:
    """One answer, before anything of HTTP/2; then the connection is closed. Others are served."""
    async with house(GrpcLimits(rest="http://127.0.0.1:8080")) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.number)
        writer.write(first)
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()

        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert f"content-length: {len(body)}".encode() in head
        assert (
            body
            == b"This port takes gRPC alone, which is HTTP/2. The same over HTTP/1.1 is at http://127.0.0.1:8080.\n"
        )
        assert await answers(it)


async def test_a_client_that_waits_for_the_servers_settings_gets_them() -> None:
    """Within a second, though it has sent nothing: clients of HTTP/2 need not wait, and some do."""
    async with house() as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.number)
        settings = await asyncio.wait_for(reader.readexactly(9), 10)
        writer.close()

    assert settings[3] == 4
