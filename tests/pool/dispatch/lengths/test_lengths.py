"""Tests for the rules that say how long an input is: what each reads, and what it does where that is not there."""

from __future__ import annotations

import pytest

from marserve.messages import Part, Request
from marserve.pool.dispatch.lengths.lengths import MAX_JSON_BYTES, read_rule


def request(*bodies: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> Request:
    """A request with these parts."""
    return Request("1", [Part("body", body) for body in bodies], headers=headers or [])


def test_body_bytes_counts_all_parts() -> None:
    """Names and headers weigh nothing."""
    assert read_rule("body_bytes")(request(b"12345", b"678")) == 8


@pytest.mark.parametrize(
    ("value", "length"), [(b"17", 17), (b"0", 0), (b"-3", 5), (b"many", 5), (b"1" * 40, 5), (b"", 5)]
)
def test_a_header_gives_its_number_and_anything_else_the_body(value: bytes, length: int) -> None:
    """The name is found in any case; what is no sensible number counts as not there."""
    assert read_rule("header:X-Tokens")(request(b"12345", headers=[(b"x-tokens", value)])) == length


@pytest.mark.parametrize(
    ("path", "body", "length"),
    [
        ("text", b'{"text": "hello"}', 5),
        ("inputs.ids", b'{"inputs": {"ids": [1, 2, 3]}}', 3),
        ("inputs.1.n", b'{"inputs": [{}, {"n": 40}]}', 40),
        ("text", b'{"other": 1}', 12),
        ("inputs.9", b'{"inputs": [1]}', 15),
        ("text", b"no json", 7),
        ("text", b'{"text": null}', 14),
        ("n", b'{"n": -1}', 9),
        ("n", b'{"n": 1e300}', 12),
    ],
)
def test_json_gives_what_stands_at_the_path(path: str, body: bytes, length: int) -> None:
    """The length of a text or a list, a number itself; else the body's bytes."""
    assert read_rule(f"json:{path}")(request(body)) == length


def test_large_json_is_not_read() -> None:
    """The event loop has other things to do."""
    body = b'{"text": "' + b"x" * MAX_JSON_BYTES + b'"}'

    assert read_rule("json:text")(request(body)) == len(body)


def test_deep_json_is_no_harm() -> None:
    """It has the length of its body."""
    body = b"[" * 100_000

    assert read_rule("json:text")(request(body)) == len(body)
