"""Tests for the bodies of requests that came compressed."""

from __future__ import annotations

import contextlib
import gzip
import random
import tracemalloc
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve_handlers import BadInput
from marserve_handlers.declared.open_inference.unpacking import Packing, check_unread, packing_of, unpack

PACKED = [("gzip", gzip.compress), ("deflate", zlib.compress)]
Pack = Callable[[bytes], bytes]


@pytest.mark.parametrize(("encoding", "pack"), PACKED)
@pytest.mark.parametrize(
    "body", [b"", b"x", b"abc" * 100_000, bytes(1 << 20), bytes(3 << 20), random.Random(1).randbytes(3_000_000)]
)
def test_a_body_is_decompressed_up_to_the_limit(encoding: str, pack: Pack, body: bytes) -> None:
    """One of exactly so many bytes is taken, one byte more is refused with the setting's name."""
    assert unpack(pack(body), Packing(encoding, len(body))) == body
    with pytest.raises(BadInput, match=f"larger than max_request_size, {len(body)} bytes, when it is decompressed"):
        unpack(pack(body + b"y"), Packing(encoding, len(body)))


@pytest.mark.parametrize(("encoding", "pack"), PACKED)
def test_a_bomb_is_given_up_at_the_limit(encoding: str, pack: Pack) -> None:
    """However much it would become, little more than the limit is ever held."""
    bomb = pack(bytes(200_000_000))
    tracemalloc.start()
    try:
        with pytest.raises(BadInput, match="max_request_size, 1000000 bytes"):
            unpack(bomb, Packing(encoding, 1_000_000))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert most < 3_500_000  # two steps beside a body of the limit


@pytest.mark.parametrize(("encoding", "pack"), PACKED)
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda packed: b"", "it is cut off"),
        (lambda packed: packed[:-1], "it is cut off"),
        (lambda packed: packed[: len(packed) // 2], "it is cut off"),
        (lambda packed: packed + b"x", "it goes on behind its end"),
        (lambda packed: packed + packed, "it goes on behind its end"),
        (lambda packed: packed + bytes(100_000), "it goes on behind its end"),
        (lambda packed: b'{"inputs": []}', "incorrect header check"),
        (lambda packed: packed[:-4] + b"\0\0\0\0", "incorrect"),
    ],
)
def test_what_is_not_one_whole_stream_is_refused(
    encoding: str, pack: Pack, damage: Callable[[bytes], bytes], words: str
) -> None:
    """It names the encoding, and what is wrong."""
    with pytest.raises(BadInput, match=f"cannot be read as {encoding}, which its Content-Encoding says: .*{words}"):
        unpack(damage(pack(b"some text" * 10)), Packing(encoding, 1000))


def test_what_is_behind_the_end_is_not_gathered() -> None:
    """However much it is."""
    packed = gzip.compress(b"x") + bytes(20_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(BadInput, match="it goes on behind its end"):
            unpack(packed, Packing("gzip", 30_000_000))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert most < 1_000_000


def test_a_stream_that_is_packed_twice_is_unpacked_once() -> None:
    """What comes of it is no JSON, and is refused as such."""
    assert unpack(gzip.compress(gzip.compress(b"x")), Packing("gzip", 1000)) == gzip.compress(b"x")


@given(
    st.sampled_from(PACKED), st.binary(max_size=300), st.integers(0, 400), st.binary(max_size=8), st.integers(0, 400)
)
def test_damage_is_refused_or_harmless(way: tuple[str, Pack], body: bytes, at: int, other: bytes, limit: int) -> None:
    """Bytes changed or put in anywhere: another body within the limit, or BadInput."""
    encoding, pack = way
    packed = pack(body)
    for damaged in (packed[:at] + other + packed[at + len(other) :], packed[:at] + other + packed[at:], other):
        with contextlib.suppress(BadInput):
            assert len(unpack(damaged, Packing(encoding, limit))) <= limit


@pytest.mark.parametrize("raw", [-15, 15, 31])
def test_deflate_is_zlibs_format(raw: int) -> None:
    """As HTTP has it: neither a bare stream nor gzip's."""
    writer = zlib.compressobj(wbits=raw)
    packed = writer.compress(b"text") + writer.flush()

    if raw == 15:
        assert unpack(packed, Packing("deflate", 100)) == b"text"
    else:
        with pytest.raises(BadInput, match="cannot be read as deflate"):
            unpack(packed, Packing("deflate", 100))


def test_the_server_says_how_a_body_came() -> None:
    """By one of its own headers."""
    assert packing_of([("open_inference", "v2"), ("open_inference_packed_body", "gzip 6553500")]) == ("gzip", 6553500)
    assert packing_of([("open_inference", "v2")]) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("priority", 1), ("timeout", 1000), ("sequence_id", "a"), ("sequence_start", True), ("priority", "high")],
)
def test_what_the_server_would_have_read_is_refused_by_name(name: str, value: object) -> None:
    """It is not ignored; the values that ask for nothing are taken, and parameters of other names."""
    with pytest.raises(BadInput, match=rf"^parameters\.{name}: the server reads it in no compressed body"):
        check_unread({name: value})
    check_unread({name: type(value)(), "mine": 7})
