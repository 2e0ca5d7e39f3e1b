"""Requests with errors in them, by the thousand (RELIABILITY A1, A9, A10)."""

from __future__ import annotations

import random
import re
from time import thread_time
from urllib.parse import quote

import pytest

from marserve.api.http.request_head import HttpLimits
from marserve.errors import ModelNotFound
from support.http_listener import listening

pytestmark = pytest.mark.anyio

SEED = 20240917
VALID = [
    b"POST /predictions/echo HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\nContent-Length: 5\r\n\r\nhello",
    b"GET /predictions/echo/1.0/a/b?c=d HTTP/1.1\r\nHost: localhost:8080\r\nAccept: */*\r\n\r\n",
    b"POST /v1/models/echo:predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n",
    b"POST /echo/predict?a=b%20c HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-www-form-urlencoded\r\n"
    b"Content-Length: 11\r\n\r\na=1&b=%41+c",
    b"PUT /predictions/echo HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=q\r\n"
    b"Content-Length: 86\r\n\r\n"
    b'--q\r\nContent-Disposition: form-data; name="data"; filename="f"\r\n\r\nbytes of a file\r\n--q--\r\n',
    b"GET /ping HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"POST /models/m/invoke HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nhi",
    b"POST /invocations?model_name=echo HTTP/1.0\r\nContent-Length: 2\r\n\r\nhi",
    b"POST /v1/models/echo:predict HTTP/1.1\r\nHost: x\r\nContent-Length: 44\r\n\r\n"
    b'{"instances": [1, {"b64": "QUI="}, [[2.5]]]}',
    b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 81\r\n"
    b"Inference-Header-Content-Length: 77\r\n\r\n"
    b'{"parameters": {"priority": 1, "timeout": 9000000, "sequence_id": "a"},"i":1}abcd',
]
TRICKS = [
    *(
        b"\r\n",
        b"\n",
        b"\0",
        b"%2f",
        b"%2e%2e/",
        b"../",
        b"\\",
        b";",
        b"//",
        b"\xff",
        b"\x1b[31m",
        b"A" * 9000,
        b"%",
        b":",
    ),
]
LEAK = re.compile(rb"Traceback|site-packages|\.py\b|/usr/|/home/|/etc/|httptools|uvicorn|0x[0-9a-f]{6,}")


def mutate(chance: random.Random) -> bytes:
    """A valid request with one to four things done to it."""
    data = bytearray(chance.choice(VALID))
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(6):
            case 0 if at < len(data):
                data[at] ^= 1 << chance.randrange(8)
            case 1:
                del data[at:]
                data = data or bytearray(b"G")
            case 2:
                data[at:at] = data[at : at + chance.randint(1, 40)]
            case 3:
                other = chance.choice(VALID)
                data[at:] = other[chance.randrange(len(other)) :]
            case 4:
                data[at:at] = chance.choice(TRICKS)
            case _:
                del data[at : at + chance.randint(1, 8)]
    return bytes(data)


@pytest.mark.parametrize("rounds", [700, pytest.param(10_000, marks=pytest.mark.long)])
async def test_no_mutated_request_gets_a_5xx_or_no_end(rounds: int) -> None:
    """Every connection ends, every answer is one, none says what is inside; and the next client is served at once."""
    chance = random.Random(SEED)

    limits = HttpLimits(linger_s=0.05)
    async with listening(limits, marks_open_inference=True, splits_instances=True) as listener:
        listener.plane.echoes_all = True
        for number in range(rounds):
            data = mutate(chance)
            async with listener.connect() as client:
                client.writer.write(data)
                client.writer.write_eof()
                received = await client.read_rest()
            told = f"seed {SEED}, number {number}: {data!r}"
            assert not re.search(rb"^HTTP/1\.1 5(?!01|03|07)", received, re.MULTILINE), told
            assert received == b"" or received.startswith(b"HTTP/1.1 "), told
            assert not LEAK.search(received.replace(data, b"")), told
        began = thread_time()  # of the loop's thread: what others do on the machine is not counted
        async with listener.connect() as client:
            assert (await client.ask(VALID[0])).body == b"hello"

    assert thread_time() - began < 0.15


@pytest.mark.parametrize(
    "trick",
    [
        "..",
        "%2e%2e",
        "..%2f..%2fetc%2fpasswd",
        "%252e%252e",
        "..\\..",
        "%00",
        "a" * 8000,
        "/",
        ";a=b",
        "\u2024\u2024",
        "%",
    ],
)
async def test_path_tricks_find_nothing(trick: str) -> None:
    """404 or 400 or 414, on every family of routes (RELIABILITY A10)."""
    name = quote(trick, safe="/%\\;.=")
    async with listening() as listener:
        listener.plane.errors = _Nobody()
        for path in (
            "/predictions/{}",
            "/explanations/{}/1",
            "/v2/models/{}/infer",
            "/{}/predict",
            "/models/{}/invoke",
        ):
            async with listener.connect() as client:
                answer = await client.ask(f"GET {path.format(name)} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert answer.status in (400, 404, 414) or b"GET /" in answer.body


class _Nobody(dict[str, Exception]):
    """No model is known."""

    def __contains__(self, model: object) -> bool:
        return True

    def __missing__(self, model: str) -> Exception:
        return ModelNotFound(model)
