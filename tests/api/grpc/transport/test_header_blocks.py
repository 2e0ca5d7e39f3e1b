"""Tests for headers on the wire, read back by hpack's own decoder."""

from __future__ import annotations

from hpack.hpack import Decoder
from hypothesis import given
from hypothesis import strategies as st

from marserve.api.grpc.transport.header_blocks import PlainEncoder

FIELDS = st.lists(st.tuples(st.binary(min_size=1, max_size=200), st.binary(max_size=300)), max_size=5)


@given(FIELDS)
def test_every_decoder_reads_what_was_written(fields: list[tuple[bytes, bytes]]) -> None:
    """Whatever the length of a field; 126, 127 and 128 bytes are told apart."""
    assert list(Decoder().decode(PlainEncoder().encode(fields), raw=True)) == fields


def test_a_block_does_not_depend_on_those_before_it() -> None:
    """So that no decoder has to remember any."""
    encoder = PlainEncoder()
    fields = [(b":status", b"200"), (b"content-type", b"application/grpc"), (b"x", b"y" * 127)]

    assert encoder.encode(fields) == encoder.encode(fields)
    assert list(Decoder(max_header_list_size=10_000).decode(encoder.encode(fields), raw=True)) == fields
