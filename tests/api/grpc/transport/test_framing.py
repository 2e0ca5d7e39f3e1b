"""Tests for messages as they travel."""

from __future__ import annotations

import gzip
import zlib
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.api.grpc.transport.framing import Message, MessageReader, compressed, decompressed, framed
from marserve.errors import BadInput, BodyTooLarge


@given(st.lists(st.binary(max_size=40), max_size=6), st.lists(st.integers(0, 60), max_size=8))
def test_messages_come_out_as_they_went_in_however_they_are_cut(messages: list[bytes], cuts: list[int]) -> None:
    """In their order, and nothing is left."""
    data, reader, came = b"".join(map(framed, messages)), MessageReader(100), []
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    for begin, end in pairwise(places):
        came += reader.add(data[begin:end])

    assert came == [Message(each, False) for each in messages]
    assert reader.is_between_messages
    assert reader.announced is None


def test_a_message_in_pieces_says_how_long_it_will_be() -> None:
    """As soon as its length has come."""
    reader = MessageReader(100)

    assert (reader.add(b"\0\0\0"), reader.announced) == ([], None)
    assert (reader.add(b"\0\x05ab"), reader.announced, reader.buffered) == ([], 5, 7)
    assert not reader.is_between_messages
    assert (reader.add(b"cde"), reader.announced, reader.buffered) == ([Message(b"abcde", False)], None, 0)


@pytest.mark.parametrize("pieces", [[framed(b"x" * 101)], [framed(b"x" * 101)[:5]], [b"\0\0", b"\0\0\x65"]])
def test_a_length_over_the_limit_is_refused_before_the_message_comes(pieces: list[bytes]) -> None:
    """Whether it comes in one piece or not; the limit itself passes."""
    reader = MessageReader(100)
    for piece in pieces[:-1]:
        reader.add(piece)
    with pytest.raises(BodyTooLarge, match="max_request_size, 100 bytes"):
        reader.add(pieces[-1])

    assert MessageReader(100).add(framed(b"x" * 100)) == [Message(b"x" * 100, False)]


@pytest.mark.parametrize("first", [2, 255])
def test_a_first_byte_that_says_nothing_is_refused(first: int) -> None:
    """With the byte."""
    with pytest.raises(BadInput, match=f"the byte {first}"):
        MessageReader(100).add(bytes([first]) + b"\0\0\0\x01x")


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_a_compressed_message_is_made_long_again(encoding: str, pack: object) -> None:
    """In both formats that gRPC's clients use."""
    packed = pack(b"hello " * 100)  # type: ignore[operator]

    assert decompressed(encoding, packed, 600) == b"hello " * 100
    with pytest.raises(BodyTooLarge):
        decompressed(encoding, packed, 599)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_message_is_made_short_where_that_pays(encoding: str) -> None:
    """Noise stays as it is, and the first byte says which it is."""
    noise, words = Random(1).randbytes(2000), b"hello " * 500
    short, long = compressed(encoding, words), compressed(encoding, noise)

    assert decompressed(encoding, short.data, len(words)) == words
    assert long == Message(noise, False)
    assert MessageReader(5000).add(framed(short) + framed(long)) == [short, long]


def test_a_bomb_is_refused_at_the_limit() -> None:
    """Of its 100 MB no more than the limit is made."""
    with pytest.raises(BodyTooLarge):
        decompressed("gzip", gzip.compress(b"\0" * 100_000_000, 1), 1000)


@pytest.mark.parametrize("damage", [lambda data: data[:-3], lambda data: data + b"x", lambda data: b"no" + data])
def test_what_is_no_compressed_message_is_refused(damage: object) -> None:
    """Cut off, with something behind it, or something else."""
    with pytest.raises(BadInput, match="cannot be read as gzip"):
        decompressed("gzip", damage(gzip.compress(b"x" * 50)), 1000)  # type: ignore[operator]


def test_a_message_that_is_compressed_without_saying_how_is_refused() -> None:
    """With what grpc-encoding says."""
    with pytest.raises(BadInput, match="grpc-encoding is 'identity'"):
        decompressed("identity", b"x", 1000)
