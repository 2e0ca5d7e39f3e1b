"""Malformed and doubtful requests, each with what must come back and how many requests may get through.

RELIABILITY A2: where framing is in doubt the answer is 400 and the connection closes; nothing behind it is a request.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from marserve.api.http.request_head import HttpLimits
from support.http_listener import Listening, listening

pytestmark = pytest.mark.anyio

HOST = "Host: x\r\n"
# What an attacker would have taken for a request of its own; no case may let it through behind doubtful framing.
GHOST = "GET /predictions/ghost HTTP/1.1\r\nHost: x\r\n\r\n"


@dataclass(frozen=True)
class Case:
    """`sent` as latin-1; `statuses` in order; `submitted`: requests that the data plane sees; `stays`: still open."""

    name: str
    sent: str
    statuses: tuple[int, ...] = (400,)
    submitted: int = 0
    stays: bool = False


def get(headers: str, body: str = "", *, line: str = "GET /predictions/echo HTTP/1.1", host: str = HOST) -> str:
    """A request of these parts, with a ghost behind it."""
    return f"{line}\r\n{host}{headers}\r\n{body}{GHOST}"


def chunks(body: str) -> str:
    """A chunked request with this body, as sent."""
    return get("Transfer-Encoding: chunked\r\n", body, line="POST /predictions/echo HTTP/1.1")


def line(text: str) -> str:
    """A request with this request line."""
    return get("", line=text)


def right(
    name: str, headers: str, body: str = "", *, line: str = "GET /predictions/echo HTTP/1.1", host: str = HOST
) -> Case:
    """An odd request that is right all the same, and leaves the connection open."""
    return Case(name, f"{line}\r\n{host}{headers}\r\n{body}", (200,), 1, True)


CASES = [
    # ------------------------------------------------------------------------------------------ request line
    Case("garbage", "this is not http\r\n\r\n"),
    Case("a TLS hello on a plain port", "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    Case("HTTP/2 preface", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    Case("HTTP/0.9 without a version", "GET /predictions/echo\r\n\r\n"),
    Case("HTTP/0.9 by name", line("GET /predictions/echo HTTP/0.9")),
    Case("HTTP/1.2", line("GET /predictions/echo HTTP/1.2")),
    Case("HTTP/2.0", line("GET /predictions/echo HTTP/2.0")),
    Case("version without a dot", line("GET /predictions/echo HTTP/11")),
    Case("version without a minor", line("GET /predictions/echo HTTP/1.")),
    Case("version of two digits", line("GET /predictions/echo HTTP/1.10")),
    Case("version in lower case", line("GET /predictions/echo http/1.1")),
    Case("version with a sign", line("GET /predictions/echo HTTP/+1.1")),
    Case("a space after the version", line("GET /predictions/echo HTTP/1.1 ")),
    Case("ICE instead of HTTP", line("SOURCE /predictions/echo ICE/1.0"), (405,)),
    Case("a method of RTSP", line("PLAY /predictions/echo RTSP/1.0"), (405,)),
    Case("a method of RTSP over HTTP", line("PLAY /predictions/echo HTTP/1.1")),
    Case("CONNECT", line("CONNECT x:80 HTTP/1.1"), (405,)),
    Case("unknown method", line("FOO /predictions/echo HTTP/1.1")),
    Case("method in lower case", line("get /predictions/echo HTTP/1.1")),
    Case("method with a NUL", line("GE\0T /predictions/echo HTTP/1.1")),
    Case("a space before the method", line(" GET /predictions/echo HTTP/1.1")),
    Case("a tab after the method", line("GET\t/predictions/echo HTTP/1.1")),
    Case("no target", line("GET HTTP/1.1")),
    Case("empty target", line("GET  HTTP/1.1")),
    Case("target without a slash", line("GET predictions/echo HTTP/1.1")),
    Case("target that begins with a question", line("GET ?a HTTP/1.1")),
    Case("target as host and port", line("GET x:80 HTTP/1.1")),
    Case("a space in the target", line("GET /predictions/ec ho HTTP/1.1")),
    Case("a tab in the target", line("GET /predictions/ec\tho HTTP/1.1")),
    Case("a NUL in the target", line("GET /predictions/ec\0ho HTTP/1.1")),
    Case("an escape in the target", line("GET /predictions/ec\x1bho HTTP/1.1")),
    Case("a DEL in the target", line("GET /predictions/ec\x7fho HTTP/1.1")),
    Case("a bare CR in the target", line("GET /predictions/ec\rho HTTP/1.1")),
    Case("a bare LF in the target", line("GET /predictions/ec\nho HTTP/1.1")),
    Case("bytes above ASCII in the target", line("GET /predictions/\xc3\xa9 HTTP/1.1")),
    Case("a fragment in the target", line("GET /predictions/echo#top HTTP/1.1")),
    Case("a target of another scheme", line("GET ftp://x/predictions/echo HTTP/1.1")),
    Case("asterisk for another method", line("GET * HTTP/1.1")),
    Case("line feeds only", "GET /predictions/echo HTTP/1.1\nHost: x\n\n" + GHOST),
    Case("line feed after the request line", f"GET /predictions/echo HTTP/1.1\n{HOST}\r\n{GHOST}"),
    Case("CR only after the request line", f"GET /predictions/echo HTTP/1.1\r{HOST}\r\n{GHOST}"),
    # ------------------------------------------------------------------------------------------ header lines
    Case("no Host", get("", host="")),
    Case("two Hosts", get("Host: y\r\n")),
    Case("the same Host twice", get("Host: x\r\n")),
    Case("two Hosts, HTTP/1.0", get("Host: y\r\n", line="GET /predictions/echo HTTP/1.0")),
    Case("a space in the Host", get("", host="Host: a b\r\n")),
    Case("two names in the Host", get("", host="Host: a, b\r\n")),
    Case("a path in the Host", get("", host="Host: a/b\r\n")),
    Case("a user in the Host", get("", host="Host: u@a\r\n")),
    Case("a query in the Host", get("", host="Host: a?b\r\n")),
    Case("a port of letters in the Host", get("", host="Host: a:b\r\n")),
    Case("a tab in the Host", get("", host="Host: a\tb\r\n")),
    Case("a folded value", get("A: b\r\n c\r\n")),
    Case("a value folded with a tab", get("A: b\r\n\tc\r\n")),
    Case("an empty value, folded", get("A:\r\n b\r\n")),
    Case("a fold before the first header", "GET /predictions/echo HTTP/1.1\r\n Host: x\r\n\r\n" + GHOST),
    Case("a fold of spaces only", get("A: b\r\n  \r\n")),
    Case("a bare CR in a value", get("A: b\rc\r\n")),
    Case("a bare LF in a value", get("A: b\nC: d\r\n")),
    Case("CR LF missing its LF", get("A: b\rC: d\r\n")),
    Case("a NUL in a value", get("A: b\0c\r\n")),
    Case("a control character in a value", get("A: b\x01c\r\n")),
    Case("an escape in a value", get("A: \x1b[31m\r\n")),
    Case("a DEL in a value", get("A: b\x7f\r\n")),
    Case("a vertical tab in a value", get("A: \x0bb\r\n")),
    Case("a space before the colon", get("A : b\r\n")),
    Case("a tab before the colon", get("A\t: b\r\n")),
    Case("a space in a name", get("A B: c\r\n")),
    Case("no colon", get("A b\r\n")),
    Case("no name", get(": b\r\n")),
    Case("a NUL in a name", get("A\0: b\r\n")),
    Case("bytes above ASCII in a name", get("\xc3\xa9: b\r\n")),
    Case("a parenthesis in a name", get("A(b): c\r\n")),
    Case("quotation marks in a name", get('"A": b\r\n')),
    Case("an end of two line feeds", f"GET /predictions/echo HTTP/1.1\r\n{HOST}\n{GHOST}"),
    Case("an end of CR and a letter", f"GET /predictions/echo HTTP/1.1\r\n{HOST}\rX"),
    Case("an unknown expectation", get("Expect: nothing\r\nContent-Length: 1\r\n"), (417,)),
    # ------------------------------------------------------------------------------------------ lengths
    Case("two lengths that differ", get("Content-Length: 1\r\nContent-Length: 2\r\n", "ab")),
    Case("two lengths that agree", get("Content-Length: 2\r\nContent-Length: 2\r\n", "ab")),
    Case("two lengths in one line", get("Content-Length: 2, 2\r\n", "ab")),
    Case("lengths under two spellings", get("Content-Length: 2\r\ncontent-length: 0\r\n", "ab")),
    Case("a length with a plus", get("Content-Length: +2\r\n", "ab")),
    Case("a negative length", get("Content-Length: -2\r\n", "ab")),
    Case("minus zero", get("Content-Length: -0\r\n")),
    Case("a length in hex", get("Content-Length: 0x2\r\n", "ab")),
    Case("a length with a letter", get("Content-Length: 2a\r\n", "ab")),
    Case("a length with a fraction", get("Content-Length: 2.0\r\n", "ab")),
    Case("a length with an exponent", get("Content-Length: 2e0\r\n", "ab")),
    Case("a length with an underscore", get("Content-Length: 0_2\r\n", "ab")),
    Case("a length with a space inside", get("Content-Length: 1 2\r\n", "ab")),
    Case("a length in quotation marks", get('Content-Length: "2"\r\n', "ab")),
    Case("an empty length", get("Content-Length:\r\n", "ab")),
    Case("a length of spaces", get("Content-Length:  \r\n", "ab")),
    Case("a folded length", get("Content-Length:\r\n 2\r\n", "ab")),
    Case("a length with a space before its colon", get("Content-Length : 2\r\n", "ab")),
    Case("a length beyond 64 bits", get("Content-Length: 18446744073709551616\r\n", "ab")),
    Case("a length of 64 bits", get("Content-Length: 18446744073709551615\r\n", "ab"), (413,)),
    Case("a length of 63 bits", get("Content-Length: 9223372036854775808\r\n", "ab"), (413,)),
    Case("a length, then chunks", get("Content-Length: 3\r\nTransfer-Encoding: chunked\r\n", "0\r\n\r\n")),
    Case("chunks, then a length", get("Transfer-Encoding: chunked\r\nContent-Length: 3\r\n", "0\r\n\r\n")),
    # ------------------------------------------------------------------------------------------ transfer encodings
    Case("an unknown encoding", get("Transfer-Encoding: gzip\r\n", "0\r\n\r\n")),
    Case("an encoding before chunked", get("Transfer-Encoding: gzip, chunked\r\n", "0\r\n\r\n")),
    Case("an encoding after chunked", get("Transfer-Encoding: chunked, gzip\r\n", "0\r\n\r\n")),
    Case("identity", get("Transfer-Encoding: identity\r\n", "0\r\n\r\n")),
    Case("identity, then chunked", get("Transfer-Encoding: identity, chunked\r\n", "0\r\n\r\n")),
    Case("two lines of encodings", get("Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n", "0\r\n\r\n")),
    Case("chunked twice", get("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", "0\r\n\r\n")),
    Case("chunked twice in one line", get("Transfer-Encoding: chunked, chunked\r\n", "0\r\n\r\n")),
    Case("xchunked", get("Transfer-Encoding: xchunked\r\n", "0\r\n\r\n")),
    Case("chunked with a parameter", get("Transfer-Encoding: chunked;a=b\r\n", "0\r\n\r\n")),
    Case("chunked in quotation marks", get('Transfer-Encoding: "chunked"\r\n', "0\r\n\r\n")),
    Case("chunked behind a control character", get("Transfer-Encoding: \x0bchunked\r\n", "0\r\n\r\n")),
    Case("chunked behind a comma", get("Transfer-Encoding: ,chunked\r\n", "0\r\n\r\n")),
    Case("a folded encoding", get("Transfer-Encoding:\r\n chunked\r\n", "0\r\n\r\n")),
    Case("an empty encoding", get("Transfer-Encoding:\r\n", "0\r\n\r\n")),
    Case("encoding with a space before its colon", get("Transfer-Encoding : chunked\r\n", "0\r\n\r\n")),
    Case(
        "chunks in HTTP/1.0",
        get("Transfer-Encoding: chunked\r\n", "0\r\n\r\n", line="POST /predictions/echo HTTP/1.0"),
    ),
    # ------------------------------------------------------------------------------------------ chunks
    Case("a chunk size that is no number", chunks("zz\r\nhi\r\n0\r\n\r\n")),
    Case("a negative chunk size", chunks("-2\r\nhi\r\n0\r\n\r\n")),
    Case("a chunk size with a plus", chunks("+2\r\nhi\r\n0\r\n\r\n")),
    Case("a chunk size with 0x", chunks("0x2\r\nhi\r\n0\r\n\r\n")),
    Case("a chunk size with an underscore", chunks("0_2\r\nhi\r\n0\r\n\r\n")),
    Case("a space before the chunk size", chunks(" 2\r\nhi\r\n0\r\n\r\n")),
    Case("a space after the chunk size", chunks("2 \r\nhi\r\n0\r\n\r\n")),
    Case("no chunk size", chunks("\r\nhi\r\n0\r\n\r\n")),
    Case("a chunk size beyond 64 bits", chunks("10000000000000000\r\nhi\r\n0\r\n\r\n")),
    Case("a line feed after the chunk size", chunks("2\nhi\r\n0\r\n\r\n")),
    Case("a bare CR after the chunk size", chunks("2\rhi\r\n0\r\n\r\n")),
    Case("no line end after a chunk", chunks("2\r\nhi0\r\n\r\n")),
    Case("a line feed after a chunk", chunks("2\r\nhi\n0\r\n\r\n")),
    Case("a chunk shorter than it says", chunks("3\r\nhi\r\n0\r\n\r\n")),
    Case("a chunk longer than it says", chunks("1\r\nhi\r\n0\r\n\r\n")),
    Case("a line feed inside a chunk extension", chunks("2;a=b\nc\r\nhi\r\n0\r\n\r\n")),
    Case("a NUL inside a chunk extension", chunks("2;a=\0\r\nhi\r\n0\r\n\r\n")),
    Case("a line feed at the end of the chunks", chunks("2\r\nhi\r\n0\n\n")),
    Case("a length among the trailers", chunks("2\r\nhi\r\n0\r\nContent-Length: 5\r\n\r\n")),
    Case("an encoding among the trailers", chunks("2\r\nhi\r\n0\r\nTransfer-Encoding: chunked\r\n\r\n")),
    Case("a folded trailer", chunks("2\r\nhi\r\n0\r\nA: b\r\n c\r\n\r\n")),
    Case("a trailer without a colon", chunks("2\r\nhi\r\n0\r\nA\r\n\r\n")),
    # ------------------------------------------------------------------------------------------ one after the other
    Case("a body shorter than a ghost", get("Content-Length: 2\r\n", "abX"), (200, 400), 1),
    Case("a ghost behind Connection: close", get("Connection: close\r\n"), (200,), 1),
    Case("a ghost behind HTTP/1.0", get("", line="GET /predictions/echo HTTP/1.0"), (200,), 1),
    Case("a ghost inside a body", get(f"Content-Length: {len(GHOST)}\r\nConnection: close\r\n"), (200,), 1),
    Case(
        "a whole request, then half an encoding",
        "GET /predictions/echo HTTP/1.1\r\nHost: x\r\n\r\n" + get("Transfer-Encoding: chunked\r\n", "g\r\n"),
        (200, 400),
        1,
    ),
    # ------------------------------------------------------------------------------------------ odd, and right
    right("two spaces in the request line", "", line="GET  /predictions/echo  HTTP/1.1"),
    right("an empty Host", "", host="Host:\r\n"),
    right("a Host with a port", "", host="Host: a.b:80\r\n"),
    right("a Host that is an address", "", host="Host: [::1]:80\r\n"),
    right("bytes above ASCII in a value", "A: \xff\r\n"),
    right("zeros before a length", "Content-Length: 02\r\n", "ab"),
    right("spaces around a length", "Content-Length:  2 \r\n", "ab"),
    right("chunked in capitals", "Transfer-Encoding: CHUNKED\r\n", "0\r\n\r\n"),
    right("100 header lines", "A: b\r\n" * 99),
    right("Expect without a body", "Expect: 100-continue\r\n"),
    right("Expect in HTTP/1.0", "Expect: x\r\nConnection: keep-alive\r\n", line="GET /predictions/echo HTTP/1.0"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
async def test_a_request_in_doubt_is_answered_as_the_table_says(case: Case) -> None:
    """In one read."""
    async with listening(HttpLimits(linger_s=0.1)) as listener:
        await play(case, listener, step=len(case.sent))


@pytest.mark.parametrize("step", [1, pytest.param(7, marks=pytest.mark.long), 1000])
async def test_the_table_holds_however_the_bytes_arrive(step: int) -> None:
    """Byte by byte, in sevens, at once; all on one listener, twice: what it remembers must not change an answer.

    A refused client is heard out until it closes, however long its bytes take.
    """
    async with listening(HttpLimits(linger_s=60.0)) as listener:
        for case in CASES * 2:
            if case.statuses != (200,) or case.stays:  # who sends on after `Connection: close` may be cut off
                await play(case, listener, step)


async def test_the_table_holds_over_tls(tmp_path: Path) -> None:
    """TLS changes nothing but the bytes' way."""
    async with listening(HttpLimits(linger_s=0.02), tls_folder=tmp_path) as listener:
        for case in CASES[::8]:
            await play(case, listener, step=len(case.sent))


async def test_the_table_holds_for_the_application() -> None:
    """A listener without inference refuses the same, and hands the rest on."""
    async with listening(HttpLimits(linger_s=0.1), has_inference=False) as listener:
        for case in CASES:
            if not (case.stays and "HTTP/1.0" in case.sent):  # uvicorn always closes after HTTP/1.0
                await play(case, listener, step=len(case.sent), submits=False)


async def play(case: Case, listener: Listening, step: int, *, submits: bool = True) -> None:
    """Send a case's bytes, `step` at a time, and compare."""
    before = len(listener.plane.submitted)
    sent = case.sent.encode("latin-1")
    async with listener.connect() as client:
        for start in range(0, len(sent), step):
            client.writer.write(sent[start : start + step])
            if step < len(sent):
                await listener_turn()
        answers: list[Any] = []
        while len(answers) < len(case.statuses):
            answers.append(await client.read())
        if case.stays:
            answers.append(await client.ask(b"GET /predictions/echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"))
        assert await client.is_at_end(), case.name

    statuses = [answer.status for answer in answers]
    assert statuses == [*case.statuses, *([200] if case.stays else [])], case.name
    submitted = listener.plane.submitted[before:]
    assert len(submitted) == (case.submitted + case.stays if submits else 0), case.name
    assert all(job.model == "echo" for job in submitted), case.name
    for answer in answers:
        if answer.status >= 400:
            assert answer.header("connection") == "close", case.name
            document = json.loads(answer.body)
            assert sorted(document) == ["code", "message", "type"]
            assert document["code"] == answer.status
            assert "httptools" not in document["message"]


async def listener_turn() -> None:
    """Let the listener read what was sent."""
    await asyncio.sleep(0)
