"""Cuts the bytes of a call into messages, and makes bytes of messages (gRPC's length-prefixed messages). Pure.

A message travels as a byte that says whether it is compressed, four bytes of its length (most significant first), and
the message. How it is compressed stands in the call's metadata. A compressed message is given out as it came: making it
long again may cost much time, so the caller decides where that is done (`decompressed`), and for an answer whether it
is made short, and where (`compressed`).
"""

from __future__ import annotations

import zlib
from typing import Final, NamedTuple

from marserve.errors import BadInput, BodyTooLarge

PREFIX_BYTES: Final = 5
IDENTITY: Final = "identity"
# zlib's window sizes that stand for a format: gzip's, and zlib's own, which gRPC calls deflate.
_WINDOWS: Final = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
ENCODINGS: Final = (IDENTITY, *_WINDOWS)


class Message(NamedTuple):
    """One message as it came."""

    data: bytes
    is_compressed: bool


class MessageReader:
    """Reads the messages of one direction of one call. `limit`: the most bytes of one, as it travels."""

    __slots__ = ("_buffer", "_limit", "announced")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()
        # The length of the message of which some bytes have come, once it is known.
        self.announced: int | None = None

    @property
    def buffered(self) -> int:
        """How many bytes have come of a message that is not whole."""
        return len(self._buffer)

    @property
    def is_between_messages(self) -> bool:
        """Whether nothing of a further message has come."""
        return not self._buffer

    def add(self, data: bytes) -> list[Message]:
        """Take bytes that have come; returns the messages that are now whole.

        Raises BodyTooLarge as soon as a length over the limit has come, BadInput for a first byte that says nothing.
        """
        buffer = self._buffer
        if not buffer and len(data) >= PREFIX_BYTES:
            length = self._length(data)
            if len(data) == PREFIX_BYTES + length:  # most often: one message in one frame
                return [Message(data[PREFIX_BYTES:], data[0] == 1)]
        buffer += data
        whole = []
        while len(buffer) >= PREFIX_BYTES:
            self.announced = length = self._length(buffer)
            if len(buffer) < PREFIX_BYTES + length:
                break
            whole.append(Message(bytes(buffer[PREFIX_BYTES : PREFIX_BYTES + length]), buffer[0] == 1))
            del buffer[: PREFIX_BYTES + length]
            self.announced = None
        return whole

    def _length(self, data: bytes | bytearray) -> int:
        if data[0] > 1:
            raise BadInput(f"A message begins with the byte {data[0]}; gRPC has 0 and, for a compressed one, 1.")
        length = int.from_bytes(data[1:PREFIX_BYTES], "big")
        if length > self._limit:
            raise BodyTooLarge(self._limit)
        return length


def framed(data: bytes | Message) -> bytes:
    """A message as it travels; bytes alone are not compressed."""
    if isinstance(data, Message):
        return b"%c%b%b" % (data.is_compressed, len(data.data).to_bytes(4, "big"), data.data)
    return b"\0" + len(data).to_bytes(4, "big") + data


def compressed(encoding: str, data: bytes) -> Message:
    """A message compressed as quickly as zlib can; as it is, if it does not become shorter."""
    writer = zlib.compressobj(zlib.Z_BEST_SPEED, wbits=_WINDOWS[encoding])
    packed = writer.compress(data) + writer.flush()
    return Message(packed, True) if len(packed) < len(data) else Message(data, False)


def decompressed(encoding: str, data: bytes, limit: int) -> bytes:
    """What a compressed message holds. Raises BadInput, and BodyTooLarge as soon as it is longer than `limit`."""
    if encoding not in _WINDOWS:
        raise BadInput(f"The message says that it is compressed, and grpc-encoding is {encoding!r}.")
    reader = zlib.decompressobj(_WINDOWS[encoding])
    try:
        made = reader.decompress(data, limit + 1)
    except zlib.error as error:
        raise BadInput(f"The message cannot be read as {encoding}: {error}") from None
    if len(made) > limit:
        raise BodyTooLarge(limit)
    if not reader.eof or reader.unused_data:
        raise BadInput(f"The message cannot be read as {encoding}: it is cut off, or goes on behind its end.")
    return made
