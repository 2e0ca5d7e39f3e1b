"""One connection, request by request: what goes in, what comes out, in which order; plain and over TLS."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from marserve.api.errors import ErrorRules
from marserve.api.http.request_head import HttpLimits
from marserve.api.http.response_headers import ResponseHeaders
from marserve.errors import HandlerFailed, ModelNotFound, QueueFull, Thrown
from marserve.messages import Answer
from marserve.telemetry.logs.access_log import Sampling
from support.http_client import Cut, Response
from support.http_listener import Lines, Listening, listening

pytestmark = pytest.mark.anyio

UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


@pytest.fixture(
    params=[
        ("uvloop", "plain"),
        ("asyncio", "tls"),
        pytest.param(("uvloop", "tls"), marks=pytest.mark.long),
        pytest.param(("asyncio", "plain"), marks=pytest.mark.long),
    ],
    ids="-".join,
)
def way(request: pytest.FixtureRequest) -> tuple[str, str]:
    """The event loop, for users have uvloop, other platforms asyncio's own; and whether TLS is spoken."""
    loop, kind = request.param
    return loop, kind


@pytest.fixture
def anyio_backend(way: tuple[str, str]) -> Any:
    """Both event loops."""
    return "asyncio", {"use_uvloop": way[0] == "uvloop"}


@pytest.fixture
async def listener(way: tuple[str, str], tmp_path: Path) -> AsyncIterator[Listening]:
    """A listener, once plain and once over TLS."""
    limits = HttpLimits(linger_s=0.1)
    async with listening(limits, tls_folder=tmp_path if way[1] == "tls" else None) as running:
        yield running


def post(body: bytes = b"hello", target: str = "/predictions/echo", *headers: str) -> bytes:
    """A request with a length."""
    lines = "".join(f"{line}\r\n" for line in headers)
    return f"POST {target} HTTP/1.1\r\nHost: x\r\n{lines}Content-Length: {len(body)}\r\n\r\n".encode() + body


def chunked(*pieces: bytes, target: str = "/predictions/echo", tail: bytes = b"\r\n") -> bytes:
    """A request in chunks; `tail` is what follows the last one: trailers and an empty line."""
    head = f"POST {target} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return head + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n" + tail


# ------------------------------------------------------------------------------------------------- plain requests


async def test_a_request_is_answered_with_the_headers_of_the_contract(listener: Listening) -> None:
    """An answer without a reason, type or anything else that the handler did not set (contract §1.4)."""
    async with listener.connect() as client:
        response = await client.ask(post(b"hello"))

    assert response.head.startswith(b"HTTP/1.1 200 \r\n")
    assert response.body == b"hello"
    assert UUID.fullmatch(response.header("x-request-id") or "")
    assert sorted(name for name, _ in response.headers) == [
        "cache-control", "connection", "content-length", "expires", "pragma", "x-request-id"
    ]  # fmt: skip
    assert response.header("pragma") == "no-cache"
    assert response.header("cache-control") == "no-cache; no-store, must-revalidate, private"
    assert response.header("expires") == "Thu, 01 Jan 1970 00:00:00 UTC"
    assert response.header("connection") == "keep-alive"


async def test_the_handler_sees_headers_as_the_client_wrote_them(listener: Listening) -> None:
    """Names keep their case; the request id it sees is the answer's."""
    async with listener.connect() as client:
        response = await client.ask(post(b"x", "/predictions/echo/2.0/a/b", "X-Case: Seen", "x-request-id: mine"))

    request = listener.plane.submitted[0].request
    assert listener.plane.submitted[0].version == "2.0"
    assert request.headers == [
        (b"Host", b"x"), (b"X-Case", b"Seen"), (b"x-request-id", b"mine"), (b"Content-Length", b"1")
    ]  # fmt: skip
    assert request.server_headers == [("url_path", "a/b"), ("explain", "False")]
    assert request.id == response.header("x-request-id")


async def test_a_client_cannot_speak_in_the_servers_name(listener: Listening) -> None:
    """Client headers `describe`, `explain` and `url_path` are dropped in any case (contract, Q4)."""
    async with listener.connect() as client:
        await client.ask(post(b"x", "/predictions/echo", "describe: True", "EXPLAIN: True", "Url_Path: x", "A: b"))

    assert [name for name, _ in listener.plane.submitted[0].request.headers] == [b"Host", b"A", b"Content-Length"]


async def test_request_ids_differ(listener: Listening) -> None:
    """Every request has its own, also the thousandth with the same header."""
    async with listener.connect() as client:
        ids = {(await client.ask(post())).header("x-request-id") for _ in range(50)}

    assert len(ids) == 50


@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE", "POST", "TRACE"])
async def test_no_inference_route_looks_at_the_method(listener: Listening, method: str) -> None:
    """Every method predicts; without a body the input is empty (contract §1.2, §1.3)."""
    async with listener.connect() as client:
        response = await client.ask(f"{method} /predictions/echo HTTP/1.1\r\nHost: x\r\n\r\n".encode())

    assert (response.status, response.body) == (200, b"")
    assert [(part.name, part.body) for part in listener.plane.submitted[0].request.parts] == [("body", b"")]


async def test_head_gets_the_length_but_no_body(listener: Listening) -> None:
    """And the next answer on the connection is found where it should be."""
    async with listener.connect() as client:
        await client.send(b"HEAD /predictions/echo HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc" + post(b"next"))
        first = await client.read(to_head=True)
        second = await client.read()

    assert first.header("content-length") == "3"
    assert second.body == b"next"


async def test_options_on_a_model_is_left_to_the_application(listener: Listening) -> None:
    """It asks for a description, not for a prediction."""
    async with listener.connect() as client:
        response = await client.ask(b"OPTIONS /predictions/echo HTTP/1.1\r\nHost: x\r\n\r\n")

    assert response.body == b"OPTIONS /predictions/echo "
    assert not listener.plane.submitted


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 70_000, 1_000_000])
async def test_bodies_of_any_size_come_back_whole(listener: Listening, size: int) -> None:
    """Also those that arrive in several reads and leave in several writes."""
    body = bytes(range(256)) * (size // 256 + 1)
    body = body[:size]

    async with listener.connect() as client:
        first = await client.ask(post(body))
        second = await client.ask(post(body))

    assert first.body == second.body == body


async def test_a_body_of_crumbs_is_put_together(listener: Listening) -> None:
    """Byte by byte, the header too."""
    async with listener.connect() as client:
        for byte in post(b"slow but sure"):
            await client.send(bytes([byte]))
            await asyncio.sleep(0)
        response = await client.read()

    assert response.body == b"slow but sure"


async def test_pieces_large_and_small_keep_their_order(listener: Listening) -> None:
    """Crumbs are gathered, larger pieces kept as they are."""
    pieces = [b"a" * 3, b"b" * 2000, b"c", b"d" * 5, b"e" * 1024, b"f" * 1023, b"g" * 4000]

    async with listener.connect() as client:
        response = await client.ask(chunked(*pieces))

    assert response.body == b"".join(pieces)


async def test_a_known_header_with_another_body_is_still_read_right(listener: Listening) -> None:
    """Equal headers are parsed once; where the body is cut differently the parser takes over (and gives back)."""
    request = post(b"12345")

    async with listener.connect() as client:
        for _ in range(3):
            assert (await client.ask(request)).body == b"12345"
        await client.send(request[:-2])
        await asyncio.sleep(0.01)
        assert (await client.ask(request[-2:])).body == b"12345"
        await client.send(request[:20])
        await asyncio.sleep(0.01)
        assert (await client.ask(request[20:])).body == b"12345"
        await client.send(request + request + request[:-1])
        assert [(await client.read()).body for _ in range(2)] == [b"12345", b"12345"]
        assert (await client.ask(b"!")).body == b"1234!"
        assert (await client.ask(request)).body == b"12345"

    assert len(listener.plane.submitted) == 9


async def test_a_line_end_before_a_request_is_overlooked(listener: Listening) -> None:
    """Old clients send one after a body (RFC 9112 §2.2)."""
    async with listener.connect() as client:
        first = await client.ask(post() + b"\r\n")
        second = await client.ask(post())
        third = await client.ask(b"\r\n" + post())

    assert [first.status, second.status, third.status] == [200, 200, 200]


async def test_a_target_may_be_absolute(listener: Listening) -> None:
    """As a proxy sends it (RFC 9112 §3.2.2)."""
    async with listener.connect() as client:
        response = await client.ask(b"GET http://elsewhere/predictions/echo?x HTTP/1.1\r\nHost: x\r\n\r\n")

    assert response.status == 200


# ------------------------------------------------------------------------------------------------- what handlers set


async def test_status_reason_and_headers_of_the_handler_go_out(listener: Listening) -> None:
    """Any status with any reason; an error status does not close the connection (contract, Q5)."""
    async with listener.connect() as client:
        await client.send(post(b"", "/predictions/held"))
        (await listener.plane.wait_for(1)).answer(b"tea", 418, "Bad dog", content_type="image/png", X_Answer="42")
        response = await client.read()
        again = await client.ask(post(b"still there"))

    assert (response.status, response.reason, response.body) == (418, "Bad dog", b"tea")
    assert response.header("content-type") == "image/png"
    assert b"\r\nX-Answer: 42\r\n" in response.head
    assert response.header("connection") == "keep-alive"
    assert again.body == b"still there"


@pytest.mark.parametrize("status", [204, 304])
async def test_an_answer_without_a_body_has_no_length_either(listener: Listening, status: int) -> None:
    """204 and 304 end with their header, whatever the handler returned."""
    async with listener.connect() as client:
        await client.send(post(b"", "/predictions/held"))
        (await listener.plane.wait_for(1)).answer(b"ignored", status)
        response = await client.read()
        again = await client.ask(post())

    assert response.status == status
    assert response.header("content-length") is None
    assert again.status == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [("X-A", "b\r\nSet-Cookie: c"), ("X-A", "b\nc"), ("X-A", "b\0c"), ("X-A", "\u4f60"), ("X A", "b"), ("", "b"),
     ("X:A", "b"), ("X\r\nB", "c"), ("X-\u00e9", "b")],
)  # fmt: skip
async def test_a_header_that_is_no_http_fails_its_own_request_only(listener: Listening, name: str, value: str) -> None:
    """500 with a sentence, one answer on the wire, the connection goes on (contract Q9, RELIABILITY A11)."""
    async with listener.connect() as client:
        await client.send(post(b"", "/predictions/held"))
        job = await listener.plane.wait_for(1)
        job.receiver.on_answer(Answer(b"body", headers=[(name, value)]))
        response = await client.read()
        again = await client.ask(post())

    assert response.status == 500
    assert b"InternalServerException" in response.body
    assert b"set a response header" in response.body or b"set response header" in response.body
    assert response.header("x-marserve-cause") == "handler"
    assert again.status == 200


async def test_a_line_break_in_the_reason_cannot_split_the_answer(listener: Listening) -> None:
    """It becomes a space (RELIABILITY A11)."""
    async with listener.connect() as client:
        await client.send(post(b"", "/predictions/held"))
        (await listener.plane.wait_for(1)).answer(b"", 200, "OK\r\nX-Evil: 1\r\n\r\nHTTP/1.1 200 OK")
        response = await client.read()

    assert response.reason == "OK X-Evil: 1 HTTP/1.1 200 OK"
    assert response.header("x-evil") is None


async def test_a_handler_cannot_change_the_framing(listener: Listening) -> None:
    """Length, encoding and connection are not its to say."""
    async with listener.connect() as client:
        await client.send(post(b"", "/predictions/held"))
        (await listener.plane.wait_for(1)).answer(
            b"four", content_length="1", Transfer_Encoding="chunked", connection="close", x_request_id="mine"
        )
        response = await client.read()
        again = await client.ask(post())

    assert response.body == b"four"
    assert response.header("connection") == "keep-alive"
    assert UUID.fullmatch(response.header("x-request-id") or "")
    assert again.status == 200


@pytest.mark.parametrize("status", [0, 100, 101, 199, 1000, -1])
async def test_a_status_that_ends_no_request_is_an_error(listener: Listening, status: int) -> None:
    """1xx would keep the client waiting."""
    async with listener.connect() as client:
        await client.send(post(b"", "/predictions/held"))
        (await listener.plane.wait_for(1)).answer(b"", status)
        response = await client.read()

    assert response.status == 500


# ------------------------------------------------------------------------------------------------- errors


async def test_what_the_data_plane_refuses_is_an_error_object(listener: Listening) -> None:
    """Exactly code, type and message; and the connection stays, for the body was read (contract, Q5)."""
    listener.plane.errors["nobody"] = ModelNotFound("nobody")

    async with listener.connect() as client:
        response = await client.ask(post(b"x", "/predictions/nobody"))
        again = await client.ask(post())

    assert response.head.startswith(b"HTTP/1.1 404 Not Found\r\n")
    assert response.header("content-type") == "application/json"
    assert response.body == (
        b'{\n  "code": 404,\n  "type": "ModelNotFoundException",\n  "message": "Model not found: nobody"\n}\n'
    )
    assert again.status == 200


async def test_a_full_queue_says_when_to_come_back(listener: Listening) -> None:
    """503 with `Retry-After` in whole seconds, and the cause."""
    listener.plane.errors["full"] = QueueFull("full", retry_after_s=2.3)

    async with listener.connect() as client:
        response = await client.ask(post(b"x", "/predictions/full"))

    assert response.status == 503
    assert response.header("retry-after") in {"3", "4", "5"}
    assert response.header("x-marserve-cause") == "queue_full"


async def test_a_failure_after_submission_is_answered(listener: Listening) -> None:
    """The handler's status and message are the client's."""
    async with listener.connect() as client:
        await client.send(post(b"", "/predictions/held"))
        (await listener.plane.wait_for(1)).fail(HandlerFailed("custom failure", 513))
        response = await client.read()

    assert response.status == 513
    assert b'"message": "custom failure"' in response.body


async def test_a_defect_of_ours_says_nothing_of_itself(listener: Listening, caplog: pytest.LogCaptureFixture) -> None:
    """500, logged with its traceback, and the connection lives."""
    listener.plane.errors["broken"] = RuntimeError("secret /etc/passwd")

    async with listener.connect() as client:
        response = await client.ask(post(b"x", "/predictions/broken"))
        again = await client.ask(post())

    assert response.status == 500
    assert b"secret" not in response.body
    assert "secret" in caplog.text
    assert again.status == 200


async def test_an_answer_after_the_end_is_nobodys(listener: Listening) -> None:
    """A data plane that answers twice cannot answer somebody else's request."""
    async with listener.connect() as client:
        await client.send(post(b"", "/predictions/held"))
        job = await listener.plane.wait_for(1)
        job.answer(b"first")
        job.answer(b"second")
        job.fail(HandlerFailed())
        job.piece(b"third")
        first = await client.read()
        again = await client.ask(post(b"echo"))

    assert (first.body, again.body) == (b"first", b"echo")


# ------------------------------------------------------------------------------------------------- chunks, Expect, 1.0


async def test_a_chunked_body_is_one_input(listener: Listening) -> None:
    """However it was cut, with extensions and trailers, which are dropped."""
    async with listener.connect() as client:
        plain = await client.ask(chunked(b"a body ", b"in several", b" pieces"))
        await client.send(
            b"POST /predictions/echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"3;name=value\r\nabc\r\n0\r\nX-Trailer: 1\r\nExplain: True\r\n\r\n"
        )
        trailed = await client.read()
        after = await client.ask(post(b"after"))

    assert plain.body == b"a body in several pieces"
    assert trailed.body == b"abc"
    assert [name for name, _ in listener.plane.submitted[1].request.headers] == [b"Host", b"Transfer-Encoding"]
    assert [name for name, _ in listener.plane.submitted[2].request.headers] == [b"Host", b"Content-Length"]
    assert after.body == b"after"


async def test_100_continue_is_said_before_the_body(listener: Listening) -> None:
    """And at once, whether the body is there or not."""
    head = post(b"hi", "/predictions/echo", "Expect: 100-continue")[:-2]

    async with listener.connect() as client:
        go_on = await client.ask(head)
        answer = await client.ask(b"hi")
        await client.send(head + b"hi")
        together = [await client.read(), await client.read()]

    assert (go_on.status, answer.body) == (100, b"hi")
    assert [response.status for response in together] == [100, 200]


async def test_100_continue_waits_for_the_answers_before_it(listener: Listening) -> None:
    """Bytes of a later exchange never stand before those of an earlier one."""
    head = post(b"hi", "/predictions/echo", "Expect: 100-continue")[:-2]

    async with listener.connect() as client:
        await client.send(post(b"", "/predictions/held") + head)
        job = await listener.plane.wait_for(1)
        await asyncio.sleep(0.01)
        job.answer(b"first")
        answers = [await client.read(), await client.read(), await client.ask(b"hi")]

    assert [response.status for response in answers] == [200, 100, 200]
    assert answers[2].body == b"hi"


async def test_an_unknown_expectation_is_417(listener: Listening) -> None:
    """The body is not waited for; the connection closes (RELIABILITY B6)."""
    async with listener.connect() as client:
        await client.send(post(b"hi", "/predictions/echo", "Expect: 200-maybe")[:-2])
        answers = await client.read_all()

    assert [(response.status, response.header("connection")) for response in answers] == [(417, "close")]


async def test_http_10_closes_unless_asked_to_stay(listener: Listening) -> None:
    """And needs no Host."""
    async with listener.connect() as client:
        stays = await client.ask(b"GET /predictions/echo HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        await client.send(b"GET /predictions/echo HTTP/1.0\r\n\r\n")
        goes = await client.read_all()

    assert stays.header("connection") == "keep-alive"
    assert [response.header("connection") for response in goes] == ["close"]


async def test_connection_close_is_honoured(listener: Listening) -> None:
    """The answer says so, then the server closes; what was sent after is not read (contract, Q5)."""
    async with listener.connect() as client:
        await client.send(post(b"last", "/predictions/echo", "Connection: close") + post(b"ghost"))
        answers = await client.read_all()

    assert [response.body for response in answers] == [b"last"]
    assert answers[0].header("connection") == "close"
    assert len(listener.plane.submitted) == 1


@pytest.mark.parametrize("is_stream", [False, True], ids=["answer", "stream"])
@pytest.mark.parametrize(
    ("value", "words"),
    [("a\nb", "'x' to a value that is no HTTP"), ("v" * 70_000, "of 70005 bytes; they may have 65536 in all")],
)
async def test_headers_that_cannot_be_sent_are_a_500_that_is_logged(
    listener: Listening, caplog: pytest.LogCaptureFixture, is_stream: bool, value: str, words: str
) -> None:
    """Under the request's id, and with its client, whose share of the log is limited; the connection stays."""
    async with listener.connect() as client:
        await client.send(post(b"", "/predictions/held"))
        job = await listener.plane.wait_for(1)
        if is_stream:
            job.piece(b"piece", x=value)
        else:
            job.answer(b"answer", x=value)
        answer = await client.read()
        again = await client.ask(post(b"again"))

    [record] = caplog.records
    assert (answer.status, again.body) == (500, b"again")
    assert words in answer.body.decode()
    assert words in record.getMessage()
    assert (answer.header("x-request-id") or "-") in record.getMessage()
    assert vars(record)["client"] == "127.0.0.1"


async def test_an_offer_with_a_body_that_is_too_large_is_413(caplog: pytest.LogCaptureFixture) -> None:
    """As without the offer: what refuses the request is not lost in the second reading."""
    async with listening(HttpLimits(body_bytes=10, linger_s=0.1)) as listener, listener.connect() as client:
        lines = "Connection: upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: chunked"
        head = f"POST /predictions/echo HTTP/1.1\r\nHost: x\r\n{lines}\r\n\r\n"
        await client.send(head.encode() + b"14\r\n" + b"x" * 20 + b"\r\n0\r\n\r\n")
        answers = await client.read_all()

    assert [response.status for response in answers] == [413]
    assert not caplog.records


async def test_an_offer_of_http2_is_overlooked_and_the_body_kept(listener: Listening) -> None:
    """Java's client makes that offer with its first request, body and all."""
    request = post(b"hello", "/predictions/echo", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "A: b")

    async with listener.connect() as client:
        first = await client.ask(request)
        await client.send(request[:-3])
        await asyncio.sleep(0.01)
        second = await client.ask(request[-3:])
        third = await client.ask(post(b"plain"))

    assert [first.body, second.body, third.body] == [b"hello", b"hello", b"plain"]
    assert (b"A", b"b") in listener.plane.submitted[0].request.headers


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("/ping", "", 200),
        ("/ping/", "", 200),
        ("/ping?deep=1", "", 200),
        ("/ping", "Host: x\r\nHost: y\r\n", 400),
        ("/ping", "Host: a b\r\n", 400),
        ("/pingx", "", 400),
        ("/ping/../models", "", 400),
        ("/readyz", "", 400),
        ("/predictions/echo", "", 400),
    ],
)
async def test_the_ping_of_an_old_balancer_needs_no_host(
    listener: Listening, target: str, host: str, status: int
) -> None:
    """Everything else in HTTP/1.1 does; of a Host that is there, there is one, and it is one."""
    async with listener.connect() as client:
        answer = await client.ask(f"GET {target} HTTP/1.1\r\n{host}\r\n".encode())

    assert answer.status == status


@pytest.mark.parametrize(("stays", "offer"), [(False, "Upgrade"), (True, "keep-alive, Upgrade")])
async def test_an_offer_of_another_protocol_does_not_make_http10_http11(
    listener: Listening, stays: bool, offer: str
) -> None:
    """It still needs no Host, and its connection closes unless it asks for more."""
    head = f"POST /predictions/echo HTTP/1.0\r\nConnection: {offer}\r\nUpgrade: h2c\r\nContent-Length: 5\r\n\r\n"

    async with listener.connect() as client:
        answer = await client.ask(head.encode() + b"hello")
        if not stays:
            assert await client.read_all() == []

    assert (answer.status, answer.body) == (200, b"hello")
    assert answer.header("connection") == ("keep-alive" if stays else "close")
    assert [line.split('"')[1] for line in listener.log.lines] == ["POST /predictions/echo HTTP/1.0"]


async def test_offers_of_another_protocol_may_follow_each_other_without_end(
    listener: Listening, caplog: pytest.LogCaptureFixture
) -> None:
    """Each is overlooked in its turn; how many come with one read does not matter."""
    offers = post(b"hi", "/predictions/echo", "Connection: upgrade", "Upgrade: h2c") * 1500

    async with listener.connect() as client:
        await client.send(offers[:-3])
        answers = [await client.read() for _ in range(1499)]
        answers.append(await client.ask(offers[-3:]))
        plain = await client.ask(post(b"plain"))

    assert {(response.status, response.body) for response in answers} == {(200, b"hi")}
    assert plain.body == b"plain"
    assert not caplog.records


# ------------------------------------------------------------------------------------------------- pipelining


@pytest.mark.parametrize("offer", [(), ("Connection: upgrade", "Upgrade: h2c")], ids=["no_offer", "upgrade"])
async def test_too_many_requests_ahead_are_400(caplog: pytest.LogCaptureFixture, offer: tuple[str, ...]) -> None:
    """In their turn, whether they offer another protocol or not; nothing of it is logged but a line for each answer."""
    ahead = 20

    async with listening(HttpLimits(pipelined_requests=ahead, linger_s=0.1)) as listener, listener.connect() as client:
        await client.send(post(b"", "/predictions/held", *offer))
        job = await listener.plane.wait_for(1)
        await client.send(post(b"", "/predictions/echo", *offer) * (ahead + 5))
        async with asyncio.timeout(10):
            while "malformed" not in listener.counts.refused:
                await asyncio.sleep(0.001)
        job.answer(b"")
        answers = await client.read_all()

    assert [response.status for response in answers] == [200] * (1 + ahead) + [400]
    assert f"more than {ahead} requests were sent ahead" in answers[-1].body.decode()
    assert len(listener.log.lines) == ahead + 2
    assert not caplog.records


async def test_pipelined_requests_are_answered_in_order(listener: Listening) -> None:
    """Also where an earlier one takes longer, and some belong to the application."""
    async with listener.connect() as client:
        await client.send(
            post(b"", "/predictions/held")
            + post(b"2")
            + b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n"
            + post(b"4", "/other")
            + chunked(b"5")
            + b"GET /ping2 HTTP/1.1\r\nHost: x\r\n\r\n"
        )
        job = await listener.plane.wait_for(1)
        await asyncio.sleep(0.01)
        assert len(listener.plane.submitted) == 1
        job.answer(b"1")
        bodies = [(await client.read()).body for _ in range(6)]
        again = await client.ask(post(b"7"))

    assert bodies == [b"1", b"2", b"GET /ping ", b"POST /other 4", b"5", b"GET /ping2 "]
    assert again.body == b"7"


async def test_hundreds_of_pipelined_requests_need_no_stack(listener: Listening) -> None:
    """Those that are answered at once start one another without recursion."""
    listener.plane.errors["nobody"] = ModelNotFound("nobody")

    async with listener.connect() as client:
        await client.send(post(b"", "/predictions/held") + post(b"x", "/predictions/nobody") * 200)
        (await listener.plane.wait_for(1)).answer(b"")
        statuses = [(await client.read()).status for _ in range(201)]

    assert statuses == [200] + [404] * 200


async def test_garbage_after_a_request_waits_for_its_answer(listener: Listening) -> None:
    """The request is answered, then the garbage refused, then the connection closed."""
    async with listener.connect() as client:
        await client.send(post(b"", "/predictions/held") + b"garbage\r\n\r\n")
        job = await listener.plane.wait_for(1)
        await asyncio.sleep(0.01)
        job.answer(b"good")
        answers = await client.read_all()

    assert [response.status for response in answers] == [200, 400]


async def test_ever_more_pipelined_requests_are_refused() -> None:
    """What waits is bounded; what was accepted before is still answered."""
    async with listening(HttpLimits(pipelined_requests=3)) as listener, listener.connect() as client:
        await client.send(post(b"", "/predictions/held") + post(b"x") * 50)
        (await listener.plane.wait_for(1)).answer(b"")
        answers = await client.read_all()

    assert [response.status for response in answers] == [200, 200, 200, 200, 400]


# ------------------------------------------------------------------------------------------------- clients that go


async def test_a_client_that_hangs_up_cancels_its_request(listener: Listening) -> None:
    """The data plane hears of it, and what it still says is dropped."""
    async with listener.connect() as client:
        await client.send(post(b"", "/predictions/held") + post(b"never"))
        job = await listener.plane.wait_for(1)
        client.hang_up()
        await listener.wait_until_empty()

    assert job.is_cancelled
    job.answer(b"too late")
    assert len(listener.plane.submitted) == 1


async def test_a_client_that_closes_its_half_has_gone(listener: Listening) -> None:
    """As for TorchServe: nobody is known to read the answer."""
    async with listener.connect() as client:
        await client.send(post(b"", "/predictions/held"))
        job = await listener.plane.wait_for(1)
        if client.writer.can_write_eof():
            client.writer.write_eof()
        else:
            client.writer.close()
        await listener.wait_until_empty()

    assert job.is_cancelled


async def test_an_answered_request_is_not_cancelled(listener: Listening) -> None:
    """A job that has ended is left alone."""
    async with listener.connect() as client:
        await client.send(post(b"", "/predictions/held"))
        job = await listener.plane.wait_for(1)
        job.answer(b"")
        await client.read()
    await listener.wait_until_empty()

    assert not job.is_cancelled


async def test_a_client_that_leaves_inside_a_body_leaves_nothing(listener: Listening) -> None:
    """Half a request never reaches the data plane."""
    async with listener.connect() as client:
        await client.send(post(b"x" * 1000)[:-500])
        await asyncio.sleep(0.01)
    await listener.wait_until_empty()

    assert not listener.plane.submitted


# ------------------------------------------------------------------------------------------------- streams


async def test_a_stream_goes_out_piece_by_piece(listener: Listening) -> None:
    """One chunk a piece; headers of the first only; the connection stays (contract §1.8)."""
    async with listener.connect() as client:
        await client.send(post(b"", "/predictions/held"))
        job = await listener.plane.wait_for(1)
        job.piece(b"part 0;", ts_stream_next="true", content_type="text/event-stream")
        head = await client.reader.readuntil(b"part 0;\r\n")
        job.piece(b"", x_late="1")
        job.piece(b"part 1;", x_late="1")
        job.piece(b"end", last=True, ts_stream_next="false")
        rest = await client.reader.readuntil(b"0\r\n\r\n")
        again = await client.ask(post())

    assert b"\r\ntransfer-encoding: chunked\r\n" in head
    assert b"\r\nts-stream-next: true\r\n" in head
    assert b"content-length" not in head
    assert rest == b"7\r\npart 1;\r\n3\r\nend\r\n0\r\n\r\n"
    assert again.status == 200


@pytest.mark.parametrize("kind", [bytes, bytearray])
@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_large_pieces_of_a_stream_arrive_as_they_are(
    listener: Listening, kind: type[bytes | bytearray], version: str
) -> None:
    """Between small ones, whatever holds their bytes; a chunk each where there are chunks."""
    bodies = [b"first", kind(b"a" * 65_536), kind(b"b" * 65_537), kind(b"c" * 3_000_000), b"last"]
    async with listener.connect() as client:
        await client.send(post(b"", "/predictions/held").replace(b"HTTP/1.1", f"HTTP/{version}".encode()))
        job = await listener.plane.wait_for(1)
        for body in bodies:
            job.piece(body, last=body is bodies[-1])

        answer = await client.read()

    assert answer.body == b"".join(bodies)
    if version == "1.1":
        assert answer.pieces == tuple(map(bytes, bodies))


async def test_a_stream_of_one_piece_is_an_ordinary_answer(listener: Listening) -> None:
    """Nothing was streamed, so nothing need be chunked."""
    async with listener.connect() as client:
        await client.send(post(b"", "/predictions/held"))
        (await listener.plane.wait_for(1)).piece(b"all", last=True)
        response = await client.read()

    assert (response.body, response.header("content-length")) == (b"all", "3")


async def test_a_stream_that_fails_cannot_pass_for_a_whole_one(listener: Listening) -> None:
    """The connection ends without the last chunk."""
    async with listener.connect() as client:
        await client.send(post(b"", "/predictions/held"))
        job = await listener.plane.wait_for(1)
        job.piece(b"part")
        job.fail(HandlerFailed())
        with pytest.raises(Cut):
            await client.read()


async def test_a_client_that_leaves_a_stream_cancels_it(listener: Listening) -> None:
    """The worker is told at once."""
    async with listener.connect() as client:
        await client.send(post(b"", "/predictions/held"))
        job = await listener.plane.wait_for(1)
        job.piece(b"part")
        await client.reader.readuntil(b"part")
        client.hang_up()
        await listener.wait_until_empty()

    assert job.is_cancelled


async def test_a_stream_to_http_10_ends_with_the_connection(listener: Listening) -> None:
    """It knows no chunks."""
    async with listener.connect() as client:
        await client.send(b"GET /predictions/held HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        job = await listener.plane.wait_for(1)
        job.piece(b"one ")
        job.piece(b"two", last=True)
        response = await client.read()

    assert (response.body, response.header("connection")) == (b"one two", "close")


async def test_a_stream_to_head_has_no_body(listener: Listening) -> None:
    """Its header is all there is."""
    async with listener.connect() as client:
        await client.send(b"HEAD /predictions/held HTTP/1.1\r\nHost: x\r\n\r\n")
        job = await listener.plane.wait_for(1)
        job.piece(b"one")
        job.piece(b"two", last=True)
        response = await client.read(to_head=True)
        again = await client.ask(post())

    assert response.status == 200
    assert again.status == 200


async def test_a_stream_with_an_illegal_header_is_cancelled(listener: Listening) -> None:
    """Nothing has gone out yet, so the client gets the sentence."""
    async with listener.connect() as client:
        await client.send(post(b"", "/predictions/held"))
        job = await listener.plane.wait_for(1)
        job.piece(b"one", x_bad="a\r\nb")
        job.piece(b"two", last=True)
        response = await client.read()

    assert response.status == 500
    assert job.is_cancelled


# ------------------------------------------------------------------------------------------------- the books


async def test_access_lines_end_with_the_id_that_the_client_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of the data plane, streams, errors and ASGI alike."""
    monkeypatch.setattr(Lines, "has_ids", True)
    async with listening() as listener, listener.connect() as client:
        answers = [
            await client.ask(post(b"", "/predictions/echo")),
            await client.ask(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n"),
        ]
        await client.send(post(b"", "/predictions/held"))
        job = await listener.plane.wait_for(2)
        job.piece(b"x")
        job.piece(b"y", last=True)
        answers.append(await client.read())
        answers.append(await client.ask(b"nonsense\r\n\r\n"))

    assert [line.rsplit(" ", 1)[1] for line in listener.log.lines] == [each.header("x-request-id") for each in answers]


async def test_a_stream_is_logged_at_its_end_with_the_whole_time() -> None:
    """Where that is chosen; it is counted then, too, and once."""
    async with listening(logs_streams_at_end=True) as listener, listener.connect() as client:
        await client.send(post(b"", "/predictions/held"))
        job = await listener.plane.wait_for(1)
        job.piece(b"x")
        await client.reader.readuntil(b"x\r\n")
        assert listener.log.lines == []
        await asyncio.sleep(0.05)  # the claim is about time that passes
        job.piece(b"y", last=True)
        await client.reader.readuntil(b"0\r\n\r\n")

        [line] = listener.log.lines
        found = re.search(r' "POST /predictions/held HTTP/1.1" 200 (\d+)$', line)
        assert found is not None
        assert int(found[1]) >= 50
        assert listener.counts.responses[2] == 1


@pytest.mark.parametrize("has_ids", [True, False])
async def test_a_stream_without_an_end_is_logged_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, *, has_ids: bool
) -> None:
    """Behind the ids: the cause of the failure, or that the client has gone."""
    monkeypatch.setattr(Lines, "has_ids", has_ids)
    async with listening(logs_streams_at_end=True) as listener:
        for number, why in enumerate(("handler", "client"), 1):
            async with listener.connect() as client:
                await client.send(post(b"", "/predictions/held"))
                job = await listener.plane.wait_for(number)
                job.piece(b"part")
                await client.reader.readuntil(b"part")
                if why == "handler":
                    job.fail(HandlerFailed())
                    with pytest.raises(Cut):
                        await client.read()
                else:
                    client.hang_up()
                await listener.wait_until_empty()
            words = listener.log.lines[-1].rpartition('" ')[2].split(" ")
            assert words[0] == "200"
            assert words[-1] == f"broken_off={why}"
            assert len(words) == (4 if has_ids else 3)
    assert len(listener.log.lines) == 2
    assert listener.counts.responses[2] == 2


async def test_a_stream_whose_last_event_tells_of_a_failure_is_logged_as_one() -> None:
    """It has an end, and no whole answer."""
    async with listening(logs_streams_at_end=True) as listener, listener.connect() as client:
        await client.send(post(b"", "/predictions/held"))
        job = await listener.plane.wait_for(1)
        job.piece(b"data: 1\n\n", content_type="text/event-stream")
        failed = Answer(b'data: {"code": 500}\n\n', thrown=Thrown("ValueError", "no", ""))
        job.receiver.on_piece(failed, True)
        await client.reader.readuntil(b"0\r\n\r\n")

    assert listener.log.lines[0].endswith(" broken_off=handler")


async def test_a_request_that_is_not_sampled_is_counted_and_not_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures are always logged."""
    monkeypatch.setattr(Lines, "sampling", Sampling(0.0, 60_000))
    async with listening(logs_streams_at_end=True) as listener, listener.connect() as client:
        listener.plane.errors["nobody"] = ModelNotFound("nobody")
        for model in ("echo", "nobody", "echo"):
            await client.ask(post(b"", f"/predictions/{model}"))
        await client.send(post(b"", "/predictions/held"))
        job = await listener.plane.wait_for(4)
        job.piece(b"part")
        job.fail(HandlerFailed())
        with pytest.raises(Cut):
            await client.read()

    assert [line.split('"')[1].split()[1] for line in listener.log.lines] == [
        "/predictions/nobody",
        "/predictions/held",
    ]
    assert (listener.counts.responses[2], listener.counts.responses[4]) == (3, 1)


async def test_every_request_is_logged_and_counted(listener: Listening) -> None:
    """Address, request line as sent, status, milliseconds (contract §10.3); streams at their first piece."""
    listener.plane.errors["nobody"] = ModelNotFound("nobody")

    async with listener.connect() as client:
        host, port = client.writer.get_extra_info("sockname")
        await client.ask(post(b"", '/predictions/echo?a="b"'))
        await client.ask(post(b"", "/predictions/nobody"))
        await client.ask(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
        await client.send(post(b"", "/predictions/held"))
        (await listener.plane.wait_for(3)).piece(b"x")
        await client.reader.readuntil(b"x\r\n")

    lines = [re.sub(r" \d+$", " ms", line) for line in listener.log.lines]
    assert lines == [
        f'/{host}:{port} "POST /predictions/echo?a=%22b%22 HTTP/1.1" 200 ms',
        f'/{host}:{port} "POST /predictions/nobody HTTP/1.1" 404 ms',
        f'/{host}:{port} "GET /ping HTTP/1.1" 200 ms',
        f'/{host}:{port} "POST /predictions/held HTTP/1.1" 200 ms',
    ]
    assert listener.counts.responses[2] == 3
    assert listener.counts.responses[4] == 1


async def test_cors_headers_stand_on_every_answer_that_lacks_them() -> None:
    """Ours and the application's, unless the handler set its own (contract §1.4)."""
    cors = ResponseHeaders([("Access-Control-Allow-Origin", "https://a.example/%20")])

    async with listening(response_headers=cors) as listener, listener.connect() as client:
        plain = await client.ask(post(b"%b"))
        ping = await client.ask(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
        await client.send(post(b"", "/predictions/held"))
        (await listener.plane.wait_for(2)).answer(b"", ACCESS_CONTROL_ALLOW_ORIGIN="*")
        own = await client.read()

    origins: list[Response] = [plain, ping, own]
    assert [response.header("access-control-allow-origin") for response in origins] == [
        "https://a.example/%20", "https://a.example/%20", "*"
    ]  # fmt: skip
    assert plain.body == b"%b"


async def test_a_full_server_may_answer_429() -> None:
    """For clients that come back only on that."""
    async with listening(error_rules=ErrorRules(429)) as listener, listener.connect() as client:
        listener.plane.errors["full"] = QueueFull("full", retry_after_s=1)
        response = await client.ask(post(b"", "/predictions/full"))

    assert response.status == 429
    assert b'"code": 429' in response.body
