"""What the log may say of bodies."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from marserve.errors import HandlerFailed
from marserve.messages import SHARED_TENSORS, Answer, Part, Request
from marserve.telemetry.body_samples import READ_BYTES, BodySamples, Hiding

HIDING = Hiding(("*PassWord*", "*token*"))


class Client:
    """A receiver that keeps what it is given."""

    def __init__(self) -> None:
        self.taken: list[Any] = []

    def on_answer(self, answer: Answer) -> None:
        """Keep it."""
        self.taken.append(answer)

    def on_piece(self, piece: Answer, last: bool) -> None:
        """Keep it."""
        self.taken.append(piece)

    def on_error(self, error: Exception) -> None:
        """Keep it."""
        self.taken.append(error)


@pytest.fixture(autouse=True)
def at_debug(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The level at which there are samples."""
    with caplog.at_level(logging.DEBUG, "marserve.bodies"):
        yield


def samples(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """What was written."""
    return [json.loads(each.getMessage().removeprefix("Body sample: ")) for each in caplog.records]


@pytest.mark.parametrize(
    ("body", "content_type", "shown"),
    [
        (
            b'{"Password": "x", "a": [{"my_token": 1, "b": 2}]}',
            "application/json",
            '{"Password":"…","a":[{"my_token":"…","b":2}]}',
        ),
        (b'  {"password": "x"}', None, '{"password":"…"}'),
        (b'{"a": "{\\"password\\": \\"x\\"}"}', None, '{"a":"{\\"password\\":\\"…\\"}"}'),
        (b'{"password": "x"', "application/json", "16 bytes, which are not JSON"),
        (b'{"a":' * 1500, None, "7500 bytes, which are not JSON"),
        (b"[" * 4000 + b"]" * 4000, None, "8000 bytes, which are not JSON"),
        (b'{"a": "' + b"x" * READ_BYTES + b'"}', None, f"{READ_BYTES + 9} bytes of JSON"),
        (b"user=a&password=b&c=", "application/x-www-form-urlencoded; charset=utf-8", "user=a&password=…&c="),
        (b"hello", "text/plain", "hello"),
        (b"hello", None, "hello"),
        (b"\xff\xd8\xff", None, "3 bytes"),
        (b"\x00\x01a", None, "3 bytes"),
        (b"abc", "image/png", "3 bytes"),
        (b"x" * 5000, "text/plain", "x" * 100 + "…"),
        (b"", None, ""),
        # Before and around JSON.
        (b'\xef\xbb\xbf{"password": "x"}', None, '{"password":"…"}'),
        (b" " * 70 + b'{"password": "x"}', "text/plain", '{"password":"…"}'),
        (b'"{\\"password\\": \\"x\\"}"', None, '"{\\"password\\":\\"…\\"}"'),
        (b'{"a": "{\\"password\\": \\"x y\\""}', None, '{"a":"{\\"password\\": …"}'),
        # What JSON says of a value beside it.
        (
            b'{"inputs": [{"name": "token", "shape": [1], "data": ["x"]}]}',
            None,
            '{"inputs":[{"name":"token","shape":[1],"data":"…"}]}',
        ),
        (b'[["token", "x"], ["my token", "x"]]', None, '[["token","…"],["my token","x"]]'),
        # Names in texts.
        (b"a=1; password = x y", "text/plain", "a=1; password = … y"),
        (b"a=1;password=x", "application/x-www-form-urlencoded", "a=1;password=…"),
        (b"a=%7B%22password%22%3A1%7D", "application/x-www-form-urlencoded", 'a={"password":"…"}'),
        (b'data: {"my-token": ["x", "y"]}\n\n', "text/event-stream", 'data: {"my-token": …'),
        (b"Token: Bearer x.y\na: b", None, "Token: …\na: b"),
        (b"<password>x</password>", "text/xml", "<password>…</password>"),
        (b'--b\r\nContent-Disposition: form-data; name="password"\r\n\r\nx\r\n--b--', None, "64 bytes"),
        ('{"password": "x"}'.encode("utf-32-be"), "text/plain", "68 bytes"),
    ],
)
def test_a_body_is_shown_within_bounds_and_without_what_is_hidden(
    body: bytes, content_type: str | None, shown: str
) -> None:
    """What cannot be read is not shown."""
    assert HIDING.body(body, content_type, 100) == shown


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("baggage", "user=1,my_token=x", "user=1,my_token=…"),
        ("x-data", '{"password": "x"}', '{"password":"…"}'),
        ("referer", "http://a/?token=x&b=1", "http://a/?token=…&b=1"),
        ("x-my-token", "x", "…"),
        ("cookie", "x", "…"),
    ],
)
def test_a_header_is_shown_without_what_is_hidden_in_it(name: str, value: str, shown: str) -> None:
    """Clients put more than one thing into one."""
    assert HIDING.header(name, value) == shown


def test_keys_and_cookies_are_hidden_whatever_the_rules(caplog: pytest.LogCaptureFixture) -> None:
    """And so are fields of a form by their names."""
    request = Request(
        "a",
        [Part("body", b"{}", "application/json"), Part("password", b"geheim")],
        [(b"Authorization", b"Bearer geheim"), (b"Cookie", b"geheim"), (b"X-Api-Key", b"geheim"), (b"x", b"y" * 1000)],
    )
    client = Client()
    BodySamples(1.0, 100, Hiding(("password",))).watch("m", request, client).on_answer(
        Answer(b'{"a": 1}', headers=[("Set-Cookie", "geheim")])
    )

    [sample] = samples(caplog)
    assert "geheim" not in str(sample)
    assert sample["request"]["headers"]["x"] == "y" * 200 + "…"
    assert sample["answer"] == {"status": 200, "headers": {"Set-Cookie": "…"}, "bytes": 8, "body": '{"a":1}'}
    assert len(client.taken) == 1


def test_streams_and_errors_are_told_of_without_their_text(caplog: pytest.LogCaptureFixture) -> None:
    """A piece may hold half of a secret."""
    watch = BodySamples(1.0, 100, HIDING).watch
    client = Client()
    stream = watch("m", Request("a", []), client)
    stream.on_piece(Answer(b'data: {"pass'), False)
    stream.on_piece(Answer(b'word": "x"}'), True)
    watch("m", Request("a", []), client).on_error(HandlerFailed())

    assert [each["answer"] for each in samples(caplog)] == [{"pieces": 2, "bytes": 23}, {"error": "handler"}]
    assert len(client.taken) == 3


def test_only_a_share_is_written_and_only_at_the_level_debug(caplog: pytest.LogCaptureFixture) -> None:
    """And never what lies in shared memory."""
    draws = iter((0.4, 0.6, 0.4, 0.0))
    watch = BodySamples(0.5, 100, HIDING, lambda: next(draws)).watch
    client, request = Client(), Request("a", [])

    assert watch("m", request, client) is not client
    assert watch("m", request, client) is client
    assert watch("m", Request("a", [], server_headers=[(SHARED_TENSORS, "x")]), client) is client
    caplog.set_level(logging.INFO, "marserve.bodies")
    assert watch("m", request, client) is client
