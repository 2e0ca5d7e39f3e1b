"""The body of a request that came compressed, decompressed within the limit of one that did not. Pure.

The server has checked the encoding and says the limit. It has not read the body: what it would have read in it is
refused here.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from marserve_handlers.declared.bodies import Body
from marserve_handlers.declared.open_inference.marking import PACKED_BODY
from marserve_handlers.errors import BadInput

# zlib's window, and the kind of the stream's head: gzip's, or zlib's own, which HTTP calls deflate.
_WINDOWS: Final = {"gzip": 31, "deflate": 15}
# What is read, and what is made of it, at a time: this much is held beside the body that comes of it.
_STEP_BYTES: Final = 64 * 1024
_MADE_BYTES: Final = 1024 * 1024
# Parameters of a request that the server reads where it can.
_SERVERS: Final = ("priority", "timeout", "sequence_id", "sequence_start", "sequence_end")


class Packing(NamedTuple):
    """How a body is compressed, and the most bytes that it may have once it is not."""

    encoding: str
    most_bytes: int


def packing_of(server_headers: Iterable[tuple[str, str]]) -> Packing | None:
    """What the server says of a request's body; None for one that came as it is."""
    for name, value in server_headers:
        if name == PACKED_BODY:
            encoding, _, most = value.partition(" ")
            return Packing(encoding, int(most))
    return None


def unpack(body: Body, packing: Packing) -> bytearray:
    """The decompressed body. Raises BadInput; one that is too long is given up as soon as it is."""
    encoding, most = packing
    reader = zlib.decompressobj(_WINDOWS[encoding])
    made = bytearray()
    view = memoryview(body)
    for at in range(0, len(view), _STEP_BYTES):
        if reader.eof:  # zlib would gather all that is left
            raise _unreadable(encoding, "it goes on behind its end")
        left: Body | memoryview = view[at : at + _STEP_BYTES]
        is_full = True
        while left or is_full:  # a full step may have left some of it in zlib
            try:
                piece = reader.decompress(left, _MADE_BYTES)
            except zlib.error as error:
                raise _unreadable(encoding, str(error)) from None
            if len(made) + len(piece) > most:
                raise BadInput(f"the body is larger than max_request_size, {most} bytes, when it is decompressed")
            made += piece
            left, is_full = reader.unconsumed_tail, len(piece) == _MADE_BYTES
    if reader.unused_data:
        raise _unreadable(encoding, "it goes on behind its end")
    if not reader.eof:
        raise _unreadable(encoding, "it is cut off")
    return made


def check_unread(parameters: Mapping[str, Any]) -> None:
    """Raise BadInput for parameters of a compressed request that ask something of the server, which did not read it."""
    for name in _SERVERS:
        if parameters.get(name):
            raise BadInput(
                "the server reads it in no compressed body: send the body as it is, or ask for it by a header",
                f"parameters.{name}",
            )


def _unreadable(encoding: str, why: str) -> BadInput:
    return BadInput(f"the body cannot be read as {encoding}, which its Content-Encoding says: {why}")
