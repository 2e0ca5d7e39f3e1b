"""Files that hold other files or one compressed: recognised by their content, and unpacked piece by piece.

What joblib, pandas, numpy, torch and callers of `pickle` open beside plain files and zip files (`zip_records.py`):

    gzip, bzip2, xz, lzma's old form, zlib, joblib's old `ZF` form      unpacked, all streams that follow each other
    tar, of torch before 1.0 and others                                 its files, by their place
    zstandard, lz4, 7z                                                  only recognised: the standard library has none

Knows nothing of pickles. Nothing is unpacked beyond what is asked for, and no number of a file is trusted.
"""

from __future__ import annotations

import bz2
import lzma
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from marserve.archive.pickle_program import Span

HEAD_BYTES = 512

_CHUNK = 1 << 18
# xz's own largest preset needs 65 MiB to unpack.
_LZMA_MEMORY = 128 << 20
_UNKNOWN_SIZE = b"\xff" * 8
_LZMA_LARGEST = 1 << 38
_OPAQUE = {b"\x28\xb5\x2f\xfd": "zstandard", b"\x04\x22\x4d\x18": "lz4", b"7z\xbc\xaf\x27\x1c": "7z"}
_BZIP2_BLOCKS = (b"1AY&SY", b"\x17rE8P\x90")
_JOBLIB_OLD = b"ZF0x"
_JOBLIB_OLD_HEADER = 2 + 19
_TAR_BLOCK = 512
_TAR_CHECKSUM = slice(148, 156)
_LONGEST_TAR_EXTENSION = 1 << 20
_END = struct.Struct("<4s4H2LH")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_END_64_BEFORE = 20 + _END_64.size


class CannotUnpack(Exception):
    """What follows cannot be unpacked; the text says why."""


class _Unpacker(Protocol):
    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Compressed:
    """A compressed file. Where it is not `is_certain`, other data may begin like it, and unpacks to nothing."""

    kind: str
    is_certain: bool
    start: int
    make: Callable[[], Any]

    def read(self, span: Span) -> Iterator[bytes]:
        """Its unpacked bytes in pieces. Raises CannotUnpack where they cannot be had, which may be after some."""
        at, pending = self.start, b""
        while True:
            unpacker = self.make()
            try:
                while not unpacker.eof:
                    span.seek(at)
                    data = pending + span.read(_CHUNK)
                    pending = b""
                    if not data:
                        raise CannotUnpack(f"its {self.kind} data is cut")
                    at = span.tell()
                    while data or not _needs_input(unpacker):
                        piece = unpacker.decompress(data, _CHUNK)
                        data = getattr(unpacker, "unconsumed_tail", b"")
                        if piece:
                            yield piece
                        if unpacker.eof or (not piece and not data):
                            break
            except (zlib.error, lzma.LZMAError, OSError, EOFError, ValueError, MemoryError) as error:
                raise CannotUnpack(f"its {self.kind} data is damaged, or needs too much memory ({error})") from None
            # Streams may follow each other, with zeros between them.
            pending = unpacker.unused_data
            while True:
                pending = pending.lstrip(b"\0")
                if len(pending) >= HEAD_BYTES:
                    break
                span.seek(at)
                more = span.read(_CHUNK)
                if not more:
                    break
                at = span.tell()
                pending += more
            follower = recognise(pending[:HEAD_BYTES])
            if follower is None or follower.kind != self.kind:
                return


def _needs_input(unpacker: Any) -> bool:
    return bool(getattr(unpacker, "needs_input", True))


def recognise(head: bytes) -> Compressed | None:
    """How a file that begins with these bytes is compressed; None for any other."""
    if head.startswith(b"\x1f\x8b\x08"):
        return Compressed("gzip", True, 0, lambda: zlib.decompressobj(16 + zlib.MAX_WBITS))
    if head.startswith(b"BZh") and head[4:10] in _BZIP2_BLOCKS:
        return Compressed("bzip2", True, 0, bz2.BZ2Decompressor)
    if head.startswith(b"\xfd7zXZ\0"):
        return Compressed("xz", True, 0, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_LZMA_MEMORY))
    if head.startswith(_JOBLIB_OLD):
        start = _JOBLIB_OLD_HEADER + (head[_JOBLIB_OLD_HEADER : _JOBLIB_OLD_HEADER + 1] == b" ")
        return Compressed("joblib", True, start, zlib.decompressobj)
    if len(head) >= 13 and _is_lzma_alone(head):
        return Compressed("lzma", False, 0, lambda: lzma.LZMADecompressor(lzma.FORMAT_ALONE, memlimit=_LZMA_MEMORY))
    if len(head) >= 2 and head[0] & 0x0F == 8 and head[0] >> 4 <= 7 and int.from_bytes(head[:2]) % 31 == 0:
        return Compressed("zlib", False, 0, zlib.decompressobj)
    return None


def opaque_kind(head: bytes) -> str:
    """The name of a form that is recognised and cannot be unpacked here; empty for any other."""
    return next((name for magic, name in _OPAQUE.items() if head.startswith(magic)), "")


def _is_lzma_alone(head: bytes) -> bool:
    """As liblzma recognises it: a size of the dictionary that encoders write, and no absurd length."""
    dictionary, size = int.from_bytes(head[1:5], "little"), int.from_bytes(head[5:13], "little")
    is_usual = dictionary == 0xFFFFFFFF or dictionary.bit_count() == 1 or dictionary in _THREE_HALVES
    return head[0] < 225 and is_usual and (head[5:13] == _UNKNOWN_SIZE or size < _LZMA_LARGEST)


_THREE_HALVES = {3 << shift for shift in range(31)}


# ------------------------------------------------------------------------------------------------------------- tar


def begins_tar(head: bytes) -> bool:
    """Whether a tar file begins here: by its checksum, as `tarfile` decides it, which the oldest form has too."""
    block = head[:_TAR_BLOCK]
    if len(block) < _TAR_BLOCK or not block.strip(b"\0"):
        return False
    try:
        told = tarfile.nti(block[_TAR_CHECKSUM])  # type: ignore[attr-defined]
    except tarfile.HeaderError:
        return False
    return told in tarfile.calc_chksums(block)  # type: ignore[attr-defined]


def tar_files(span: Span) -> Iterator[tuple[str, int, int]]:
    """Name, start and size of each regular file of a tar. Raises CannotUnpack for what cannot be followed."""
    at = 0
    name = ""
    while at + _TAR_BLOCK <= len(span):
        span.seek(at)
        block = span.read(_TAR_BLOCK)
        if not begins_tar(block):
            return  # the end, for `tarfile` too
        try:
            size = int(tarfile.nti(block[124:136]))  # type: ignore[attr-defined]
        except tarfile.HeaderError:
            raise CannotUnpack("a size in its tar data is no number") from None
        kind = block[156:157]
        start = at + _TAR_BLOCK
        if size < 0 or start + size > len(span):
            raise CannotUnpack("its tar data is cut")
        if kind in (b"S", b"M"):
            raise CannotUnpack("its tar data has a sparse file, or a part of one")
        if kind in (b"x", b"X", b"g"):
            # Extended headers may give the next file another size, or make it a sparse one.
            if size > _LONGEST_TAR_EXTENSION:
                raise CannotUnpack("an extended header of its tar data is too long")
            span.seek(start)
            extended = span.read(size)
            if b" size=" in extended or b" GNU.sparse" in extended:
                raise CannotUnpack("an extended header of its tar data changes the size of a file")
        elif kind in (b"L", b"K"):
            pass  # a long name, of what follows
        else:
            name = block[:100].rstrip(b"\0").decode(errors="replace")
            if kind not in (b"1", b"2", b"3", b"4", b"5", b"6"):
                yield name, start, size
        takes_no_room = kind in (b"1", b"2", b"3", b"4", b"5", b"6")
        at = start + (0 if takes_no_room else -(-size // _TAR_BLOCK) * _TAR_BLOCK)


# ------------------------------------------------------------------------------------------------------------- zip


def zip_at_end(span: Span) -> tuple[int, int] | None:
    """Where the zip file lies that other data stands before (and behind), start and end, as Python's `zipfile` finds
    it: by the end record and the size of the directory, whatever the offsets say. None where it finds no entries.
    """
    tail_bytes = min(len(span), _END.size + 0xFFFF)
    span.seek(len(span) - tail_bytes)
    tail = span.read(tail_bytes)
    at = tail.rfind(b"PK\x05\x06")
    if tail[-_END.size :].startswith(b"PK\x05\x06") and tail.endswith(b"\0\0"):
        at = len(tail) - _END.size
    if at < 0 or len(tail) - at < _END.size:
        return None
    *_, directory_bytes, offset, comment = _END.unpack_from(tail, at)
    end_at = len(span) - tail_bytes + at
    end = min(len(span), end_at + _END.size + comment)
    directory_end = end_at
    if end_at >= _END_64_BEFORE:
        span.seek(end_at - _END_64_BEFORE)
        record = span.read(_END_64_BEFORE)
        if record[_END_64.size :].startswith(b"PK\x06\x07") and record.startswith(b"PK\x06\x06"):
            *_, directory_bytes, offset = _END_64.unpack_from(record)
            directory_end = end_at - _END_64_BEFORE
    directory_at = directory_end - directory_bytes
    if directory_bytes == 0 or directory_at < 0:
        return None
    span.seek(directory_at)
    if span.read(4) != b"PK\x01\x02":
        return None
    return directory_at - offset, end
