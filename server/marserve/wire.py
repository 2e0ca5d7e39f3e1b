"""Framing of messages: a message and its bodies in, bytes out, and back. No I/O; sockets are elsewhere.

A frame, all integers little-endian:

    offset  size
    0       2     b"mW"
    2       2     version of this format, 1
    4       4     m, bytes of metadata
    8       4     n, number of bodies
    12      8     b, bytes of all bodies together
    20      4*n   length of each body
    ...     m     metadata: one message of `messages.py` as msgpack
    ...     b     the bodies, raw, one after the other

Bodies are neither read nor encoded again. Every length is checked against its bound before anything is kept, so that a
broken peer costs its connection only: the reader gets `BadFrame` and closes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from marserve.errors import BadFrame
from marserve.messages import ToRank, ToServer, ToWorker, pack

VERSION = 1
MAGIC = b"mW"
HEADER = struct.Struct("<2sHIIQ")

MAX_METADATA_BYTES = 64 * 1024 * 1024
MAX_BODIES = 1_000_000
MAX_BODY_BYTES = 2**32 - 1
MAX_FRAME_BYTES = 1024 * 1024 * 1024 * 1024
# A worker answers with one body an item; no batch is larger.
MAX_BODIES_OF_WORKER = 65_536
# A template's longest message is a failed load, with its traceback.
MAX_METADATA_BYTES_OF_TEMPLATE = 4 * 1024 * 1024

# Below this a frame is joined and written in one piece; above, its bodies are written where they lie.
JOIN_BELOW_BYTES = 64 * 1024
# How much of a body is allocated before its bytes have come. Beyond it the body grows with its bytes: a head alone
# costs no memory, and glibc moves blocks of this size (`allocator.BY_SERVER`) without a copy. A worker trusts the
# server and allocates everything at once: there a growing block may be copied, and is held twice then.
ALLOCATED_AHEAD_BYTES = 4 * 1024 * 1024


class _Lengths(dict[int, struct.Struct]):
    """The format for the lengths of so many bodies, kept since batches mostly have a few sizes."""

    def __missing__(self, count: int) -> struct.Struct:
        made = struct.Struct(f"<{count}I")
        if len(self) < 1024:
            self[count] = made
        return made


_LENGTHS = _Lengths()

M = TypeVar("M")
Body = bytes | bytearray


def encode(message: Any, bodies: Sequence[bytes | bytearray | memoryview] = ()) -> list[bytes | bytearray | memoryview]:
    """Frame one message with its bodies: a list of buffers, to be written in order.

    Small frames are one buffer: a copy costs less than a second write. Raises ValueError for a body of 4 GiB or more,
    which the format cannot express, and for more than a peer would accept; TypeError and OverflowError as `pack`.
    """
    metadata = pack(message)
    if len(metadata) > MAX_METADATA_BYTES:
        raise ValueError(f"a frame's metadata has {len(metadata)} bytes; the wire carries {MAX_METADATA_BYTES}")
    if not bodies:
        return [HEADER.pack(MAGIC, VERSION, len(metadata), 0, 0) + metadata]
    lengths = [len(body) for body in bodies]
    total = sum(lengths)
    if max(lengths) > MAX_BODY_BYTES or total > MAX_FRAME_BYTES:
        raise ValueError(
            f"a frame's longest body has {max(lengths)} bytes and all of them {total}; the wire carries "
            f"{MAX_BODY_BYTES} and {MAX_FRAME_BYTES}"
        )
    head = HEADER.pack(MAGIC, VERSION, len(metadata), len(lengths), total) + _LENGTHS[len(lengths)].pack(*lengths)
    if total < JOIN_BELOW_BYTES:
        return [b"".join((head, metadata, *bodies))]
    return [head + metadata, *bodies]


class Decoder(Generic[M]):
    """Takes bytes as they come, and gives complete messages with their bodies.

    `types` is the union of messages that may come from this peer; `make` turns a memoryview into a body
    (`bytes` or `bytearray`). Bounds are those of this module unless given.

    A frame whose bodies hold `JOIN_BELOW_BYTES` or more is not collected first: its bodies are `bytearray`s that are
    filled as the bytes come, so that a large body is held once, and copied once.
    """

    def __init__(
        self,
        types: Any,
        make: Callable[[memoryview], Body],
        *,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        max_bodies: int = MAX_BODIES,
        max_metadata_bytes: int = MAX_METADATA_BYTES,
        allocated_ahead_bytes: int = ALLOCATED_AHEAD_BYTES,
    ) -> None:
        self._decode = msgspec.msgpack.Decoder(types).decode
        self._make: Callable[[memoryview], Body] = make
        self.max_frame_bytes = max_frame_bytes
        self._max_bodies = max_bodies
        self._max_metadata_bytes = max_metadata_bytes
        self._allocated_ahead_bytes = allocated_ahead_bytes
        self._kept = bytearray()
        self._needed = HEADER.size
        self._filling: _Filling[M] | None = None

    def feed(self, data: bytes) -> list[tuple[M, list[Body]]]:
        """Take more bytes and return the messages that are now complete, oldest first.

        Raises BadFrame; after that the decoder cannot be used, and the connection must be closed.
        """
        messages: list[tuple[M, list[Body]]] = []
        filling = self._filling
        if filling is not None:
            used = filling.take(data)
            if not filling.is_full:
                return messages
            self._filling = None
            messages.append((filling.message, filling.bodies))
            if used == len(data):
                return messages
            data = data[used:]
        if self._kept:
            self._kept += data
            if len(self._kept) < self._needed:
                return messages
            whole: bytes | bytearray = self._kept
        elif len(data) < self._needed:
            self._kept += data
            return messages
        else:
            whole = data
        at, end = 0, len(whole)
        with memoryview(whole) as view:
            while end - at >= self._needed:
                frame = self._cut(view, at, end)
                if frame is None:
                    if self._filling is not None:
                        at = end
                    break
                message, bodies, at = frame
                messages.append((message, bodies))
            rest = bytes(view[at:]) if whole is not self._kept else None
        if rest is None:
            del self._kept[:at]
        elif rest:
            self._kept += rest
        return messages

    def _cut(self, view: memoryview, at: int, end: int) -> tuple[M, list[Body], int] | None:
        """The frame that begins at `at`, and where the next begins; None while it is incomplete."""
        magic, version, metadata_bytes, count, total = HEADER.unpack_from(view, at)
        if magic != MAGIC:
            raise BadFrame(f"a frame begins with {magic!r}, not {MAGIC!r}")
        if version != VERSION:
            raise BadFrame(f"a frame has version {version}, this side speaks {VERSION}")
        if metadata_bytes > self._max_metadata_bytes or count > self._max_bodies or total > self.max_frame_bytes:
            raise BadFrame(
                f"a frame announces {metadata_bytes} bytes of metadata and {count} bodies of {total} bytes; the bounds "
                f"are {self._max_metadata_bytes}, {self._max_bodies} and {self.max_frame_bytes}"
            )
        body_at = at + HEADER.size + 4 * count + metadata_bytes
        is_large = total >= JOIN_BELOW_BYTES
        if end < body_at + (0 if is_large else total):
            self._needed = body_at + (0 if is_large else total) - at
            return None
        self._needed = HEADER.size
        lengths = _LENGTHS[count].unpack_from(view, at + HEADER.size)
        if sum(lengths) != total:
            raise BadFrame(f"the bodies of a frame add up to {sum(lengths)} bytes, its header says {total}")
        try:
            message: M = self._decode(view[at + HEADER.size + 4 * count : body_at])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadFrame(f"the metadata of a frame is no message: {error}") from error
        if end < body_at + total:
            self._filling = _Filling(message, lengths, self._allocated_ahead_bytes)
            self._filling.take(view[body_at:end])
            return None
        bodies: list[Body] = []
        for length in lengths:
            bodies.append(self._make(view[body_at : body_at + length]))
            body_at += length
        return message, bodies, body_at

    def forget(self) -> None:
        """Drop what is kept of an incomplete frame: the connection has ended."""
        self._kept = bytearray()
        self._filling = None

    @property
    def is_between_frames(self) -> bool:
        """Whether nothing of an incomplete frame is kept: the peer may close here."""
        return not self._kept and self._filling is None


class _Filling(Generic[M]):
    """A large frame whose bodies are still coming."""

    def __init__(self, message: M, lengths: Sequence[int], allocated_ahead_bytes: int) -> None:
        self.message = message
        self.bodies: list[Body] = []
        self._lengths = lengths
        self._allocated_ahead_bytes = allocated_ahead_bytes
        self._length = 0
        self._body = bytearray()
        self._filled = 0
        self._open()

    @property
    def is_full(self) -> bool:
        """Whether every body has all its bytes."""
        return len(self.bodies) == len(self._lengths)

    def take(self, data: bytes | memoryview) -> int:
        """Fill in more bytes; returns how many of them belonged to this frame."""
        at, end = 0, len(data)
        with memoryview(data) as view:
            while at < end and not self.is_full:
                allocated = len(self._body)
                size = min(end - at, (allocated if self._filled < allocated else self._length) - self._filled)
                self._body[self._filled : self._filled + size] = view[at : at + size]  # appends where it is full
                self._filled += size
                at += size
                if self._filled == self._length:
                    self.bodies.append(self._body)
                    self._open()
        return at

    def _open(self) -> None:
        """Make room for the next body that has any bytes."""
        while not self.is_full and not self._lengths[len(self.bodies)]:
            self.bodies.append(bytearray())
        if not self.is_full:
            self._length = self._lengths[len(self.bodies)]
            self._body = bytearray(min(self._length, self._allocated_ahead_bytes))
            self._filled = 0


def server_decoder(*, max_frame_bytes: int = MAX_FRAME_BYTES) -> Decoder[ToServer]:
    """A decoder for the server's end: messages from a worker or a template, small bodies as `bytes`."""
    return Decoder(ToServer, bytes, max_frame_bytes=max_frame_bytes, max_bodies=MAX_BODIES_OF_WORKER)


def template_decoder() -> Decoder[ToServer]:
    """A decoder for the server's end of a template's connection, which carries short messages without bodies."""
    return Decoder(ToServer, bytes, max_frame_bytes=0, max_bodies=0, max_metadata_bytes=MAX_METADATA_BYTES_OF_TEMPLATE)


def worker_decoder() -> Decoder[ToWorker]:
    """A decoder for the worker's end: messages from the server, bodies as `bytearray`, as handlers get them."""
    return Decoder(ToWorker, bytearray, allocated_ahead_bytes=MAX_BODY_BYTES)


def rank_decoder() -> Decoder[ToRank]:
    """A decoder for messages between the ranks of a group, bodies as `bytearray`."""
    return Decoder(ToRank, bytearray)
