"""Tests for a call's header and its trailers."""

from __future__ import annotations

from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.api.grpc.transport.head import (
    NotGrpc,
    header_bytes,
    read_head,
    refusal_of_encoding,
    trailers,
)
from marserve.api.grpc.transport.status import StatusCode

CALL = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/a.B/C"),
    (b":authority", b"here"),
    (b"content-type", b"application/grpc+proto"),
    (b"te", b"trailers"),
    (b"grpc-accept-encoding", b"gzip"),
]


def test_what_is_not_the_protocols_is_metadata() -> None:
    """Text, and bytes where the name says so, with or without padding."""
    head = read_head([*CALL, (b"user-agent", b"me"), (b"x-bin", b"AP8"), (b"y-bin", b"AP8="), (b"x", b"\xe4")])

    assert (head.path, head.timeout_s, head.encoding, head.fault) == ("a.B/C", None, "identity", None)
    assert head.metadata == (("user-agent", "me"), ("x-bin", b"\0\xff"), ("y-bin", b"\0\xff"), ("x", "ä"))


@pytest.mark.parametrize(
    ("encoding", "accepted", "answered"),
    [
        (b"gzip", b"identity,deflate, gzip", "gzip"),
        (b"deflate", b"deflate", "deflate"),
        (b"gzip", b"identity, deflate", "identity"),
        (b"snappy", b"snappy", "identity"),
        (b"identity", b"gzip", "identity"),
        (b"gzip", b"", "identity"),
    ],
)
def test_an_answer_is_compressed_as_the_question_if_its_client_takes_that(
    encoding: bytes, accepted: bytes, answered: str
) -> None:
    """Else not at all."""
    head = read_head([*CALL[:-1], (b"grpc-encoding", encoding), (b"grpc-accept-encoding", accepted)])

    assert (head.encoding, head.answer_encoding) == (encoding.decode(), answered)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(b"1H", 3600), (b"2M", 120), (b"3S", 3), (b"40m", 0.04), (b"5u", 5e-6), (b"99999999n", 0.099999999), (b"0S", 0)],
)
def test_a_timeout_is_read_in_each_unit(value: bytes, seconds: float) -> None:
    """In seconds."""
    assert read_head([*CALL, (b"grpc-timeout", value)]).timeout_s == pytest.approx(seconds)


@pytest.mark.parametrize("value", [b"", b"S", b"1", b"1s", b"-1S", b"1.5S", b"123456789S", b" 1S", "١S".encode()])
def test_a_timeout_that_cannot_be_read_is_the_calls_fault(value: bytes) -> None:
    """With what would be right."""
    head = read_head([*CALL, (b"grpc-timeout", value)])

    assert head.timeout_s is None
    assert head.fault is not None
    assert "up to 8 digits and one of H, M, S, m, u, n" in head.fault.message


def test_bytes_that_are_no_base64_are_the_calls_fault() -> None:
    """With the name."""
    fault = read_head([*CALL, (b"x-bin", b"!")]).fault

    assert fault is not None
    assert "'x-bin'" in fault.message


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [(b":method", b"GET", 405), (b"content-type", b"application/json", 415), (b"content-type", b"", 415)],
)
def test_what_is_no_call_is_answered_as_http(name: bytes, value: bytes, status: int) -> None:
    """By a status of HTTP that says what is wrong."""
    fields = [(each, value if each == name else its) for each, its in CALL]
    with pytest.raises(NotGrpc, match="speaks gRPC") as caught:
        read_head(fields)

    assert caught.value.http_status == status


def test_a_header_counts_as_http2_counts_it() -> None:
    """32 bytes a field beside its text."""
    assert header_bytes([(b"a", b"bc"), (b"d", b"")]) == 3 + 1 + 2 * 32


@given(st.text(max_size=60))
def test_any_description_survives_as_ascii(text: str) -> None:
    """Percent-encoded; no byte of it breaks a line."""
    text = text.encode("utf-8", "replace").decode()
    fields = dict(trailers(StatusCode.NOT_FOUND, text, [("x-a", "b")]))

    assert (fields[b"grpc-status"], fields[b"x-a"]) == (b"5", b"b")
    message = fields.get(b"grpc-message", b"")
    assert all(0x20 <= byte < 0x7F for byte in message)
    assert unquote(message.decode()) == text


def test_a_good_call_ends_without_words() -> None:
    """Only with its status."""
    assert trailers(StatusCode.OK, "", ()) == [(b"grpc-status", b"0")]


def test_a_compression_that_is_not_known_is_named() -> None:
    """With those that are."""
    refusal = refusal_of_encoding("snappy")

    assert refusal is not None
    assert "'snappy', and this server reads identity, gzip, deflate" in refusal.message
    assert all(refusal_of_encoding(known) is None for known in ("identity", "gzip", "deflate"))
