"""Writes headers and trailers for the wire (RFC 7541) without a memory of what was written before. Pure.

Answers of gRPC have few and short fields, and an identifier that is new each time, which would only push the others out
of a table of recent fields. So each field is written as it is (a literal that is not to be remembered). That costs some
80 bytes an answer and saves a third of the time that a header took.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from hpack.hpack import Encoder, encode_integer

_LITERAL: Final = b"\0"
_STATUS_200: Final = b"\x88"
_LONGEST_SHORT: Final = 126


class PlainEncoder(Encoder):
    """Takes the place of hpack's encoder, which it is only for the size of a table that it does not use."""

    def encode(self, headers: Iterable[Any], huffman: bool = True) -> bytes:
        """The fields (name and value, bytes) as a header block."""
        return b"".join([_field(name, value) for name, value in headers])


def _field(name: bytes, value: bytes) -> bytes:
    if name == b":status" and value == b"200":
        return _STATUS_200
    return b"%b%b%b%b%b" % (_LITERAL, _length(name), name, _length(value), value)


def _length(text: bytes) -> bytes:
    size = len(text)
    return b"%c" % size if size <= _LONGEST_SHORT else bytes(encode_integer(size, 7))
