"""Files that hold other files or one compressed: recognised by their content, and unpacked piece by piece.

What joblib, pandas, numpy, torch and callers of `pickle` open beside plain files and zip files
(`archive/reading/zip_records.py`):

    gzip, bzip2, xz, lzma's old form, zlib, joblib's old `ZF` form      unpacked, all streams that follow each other
    tar, of torch before 1.0 and others                                 its files, by their place
    zstandard, lz4, lzip, 7z                                            only recognised: the standard library has none

Knows nothing of pickles. Nothing is unpacked beyond what is asked for, and no number of a file is trusted.
"""

from __future__ import annotations

import bz2
import lzma
import re
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from marserve.archive.pickles.check_budget import CheckBudget
from marserve.archive.pickles.pickle_program import Span

HEAD_BYTES = 512

_READ_BYTES = 1 << 14
_PIECE_BYTES = 1 << 16
_ZEROS_BYTES = 1 << 20
# Tapes and disks are padded to blocks of a few MiB; a sparse file has as many zeros as it likes.
_MOST_ZEROS = 16 << 20
# What reading `_ZEROS_BYTES` costs, in operations.
_ZEROS_COST = 64
# What beginning another stream costs, in operations.
_STREAM_COST = 32
# xz's own largest preset needs 65 MiB to unpack.
_LZMA_MEMORY = 128 << 20
_UNKNOWN_SIZE = b"\xff" * 8
_LZMA_LARGEST = 1 << 38
_LZMA_HEADER = 13
_LZMA_DICTIONARY = slice(1, 5)
# Larger ones are read as if they were so large: no data reaches further back before as much was unpacked.
_LARGEST_DICTIONARY = 64 << 20
_LZIP = b"LZIP"
_OPAQUE = {
    re.compile(rb"[\x1e\x22-\x28]\xb5\x2f\xfd"): "zstandard",
    re.compile(rb"\x04\x22\x4d\x18|\x02\x21\x4c\x18"): "lz4",
    re.compile(rb"[\x50-\x5f]\x2a\x4d\x18"): "zstandard or lz4",
    re.compile(_LZIP): "lzip",
    re.compile(rb"7z\xbc\xaf\x27\x1c"): "7z",
}
_BZIP2_BLOCKS = (b"1AY&SY", b"\x17rE8P\x90")
_JOBLIB_OLD = b"ZF0x"
_JOBLIB_OLD_HEADER = 2 + 19
_TAR_BLOCK = 512
_TAR_CHECKSUM = slice(148, 156)
_LONGEST_TAR_EXTENSION = 1 << 20
# torch's oldest form has raw data between the pickles of this file.
_TORCH_STORAGES = re.compile(rb"(^|[/=\n])storages/*(\0|\n|$)")
_END = struct.Struct("<4s4H2LH")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_END_64_BEFORE = 20 + _END_64.size


class CannotUnpack(Exception):
    """What follows cannot be unpacked; the text says why. Where that is not `is_certain`, it may be other data."""

    def __init__(self, text: str, *, is_certain: bool = True) -> None:
        self.is_certain = is_certain
        super().__init__(text)


class _Unpacker(Protocol):
    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Compressed:
    """A compressed file. Where it is not `is_certain`, other data may begin like it, and unpacks to little.

    `followers` are the kinds of streams that its readers unpack behind one of its kind. `is_usual` is False for lzma's
    old form with a header that no encoder writes: readers of that form alone take it. `most` is how many bytes it
    may unpack to before it would need more memory than it gets.
    """

    kind: str
    is_certain: bool
    start: int
    make: Callable[[], Any]
    followers: tuple[str, ...]
    is_usual: bool = True
    prefix: bytes = b""
    most: int | None = None

    def read(self, span: Span, budget: CheckBudget) -> Iterator[bytes]:
        """Its unpacked bytes in pieces. Raises CannotUnpack where they cannot be had, which may be after some.

        What an unpacker gives before damage is given to its last byte: a reader that asks for little at once gets it.
        """
        source = _Source(span)
        stream: Compressed | None = self
        source.drop(self.start)
        while stream is not None:
            budget.spend(_STREAM_COST)
            yield from stream._read_one(source, budget)
            # Streams may follow each other, with zeros between them.
            source.drop_zeros(budget, _MOST_ZEROS if stream.is_usual else None)
            head = source.peek(HEAD_BYTES)
            if head.startswith(_LZIP) and stream.kind in _LZMA_KINDS:
                raise CannotUnpack("lzip data follows, which is not read")
            stream = stream._follower(recognise(head))
            if stream is not None and stream.start:
                source.drop(stream.start)

    def _follower(self, found: list[Compressed]) -> Compressed | None:
        fits = (each for each in found if each.kind in self.followers and (each.is_usual or not self.is_usual))
        return next(fits, None)

    def _read_one(self, source: _Source, budget: CheckBudget) -> Iterator[bytes]:
        """One stream; behind it the source is where it ended."""
        if self.prefix:
            source.replace(self.prefix)
        begin = source.tell()
        given = 0
        unpacker = self.make()
        try:
            while not unpacker.eof:
                data = source.take(_READ_BYTES)
                if not data:
                    raise CannotUnpack(f"its {self.kind} data is cut", is_certain=self.is_certain)
                for piece in _unpack(unpacker, data, _PIECE_BYTES):
                    given += len(piece)
                    budget.spend()
                    yield piece
        except _DAMAGES as error:
            if not self.is_certain:
                rest = self._rest(source, begin, given, budget)
                yield rest
                if self.most is not None and given + len(rest) >= self.most:
                    raise CannotUnpack(f"its {self.kind} data needs too much memory") from None
            raise CannotUnpack(
                f"its {self.kind} data is damaged, or needs too much memory ({error})", is_certain=self.is_certain
            ) from None
        source.give_back(unpacker.unused_data)

    def _rest(self, source: _Source, begin: int, given: int, budget: CheckBudget) -> bytes:
        """What a stream unpacks to between the bytes that were `given` and its damage: once more, byte by byte."""
        source.seek(begin)
        if self.prefix:
            source.replace(self.prefix)
        unpacker = self.make()
        found = bytearray()
        left = given
        try:
            while not unpacker.eof and (data := source.take(_READ_BYTES)):
                while left:
                    piece = unpacker.decompress(data, min(_PIECE_BYTES, left))
                    data = getattr(unpacker, "unconsumed_tail", b"")
                    left -= len(piece)
                    budget.spend()
                    if not piece and not data:
                        break
                if left:
                    continue
                for piece in _unpack(unpacker, data, 1):
                    found += piece
                    if len(found) % 64 == 0:
                        budget.spend(16)
        except _DAMAGES:
            pass
        return bytes(found)


_DAMAGES = (zlib.error, lzma.LZMAError, OSError, EOFError, ValueError, MemoryError)


class _Source:
    """The packed bytes: taken in pieces, of which an unpacker may give some back."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._at = 0
        self._pending = b""

    def tell(self) -> int:
        return self._at - len(self._pending)

    def seek(self, offset: int) -> None:
        self._at, self._pending = offset, b""

    def drop(self, size: int) -> None:
        self.seek(self.tell() + size)

    def take(self, size: int) -> bytes:
        if self._pending:
            data, self._pending = self._pending, b""
            return data
        self._span.seek(self._at)
        data = self._span.read(size)
        self._at += len(data)
        return data

    def give_back(self, data: bytes) -> None:
        self._pending = data

    def replace(self, prefix: bytes) -> None:
        """Have the next bytes read as these, which are as many."""
        self.peek(len(prefix))
        self._pending = prefix + self._pending[len(prefix) :]

    def peek(self, size: int) -> bytes:
        if len(self._pending) < size:
            at = self.tell()
            self._span.seek(at)
            self._pending = self._span.read(max(size, _READ_BYTES))
            self._at = at + len(self._pending)
        return self._pending[:size]

    def drop_zeros(self, budget: CheckBudget, most: int | None) -> None:
        """Pass over zeros; raises CannotUnpack for more than `most`."""
        dropped = 0
        while data := self.take(_ZEROS_BYTES):
            self._pending = data.lstrip(b"\0")
            if self._pending:
                return
            dropped += len(data)
            if most is not None and dropped > most:
                raise CannotUnpack(f"more than {most} zero bytes follow")
            budget.spend(_ZEROS_COST)


def _unpack(unpacker: Any, data: bytes, most: int) -> Iterator[bytes]:
    """All that these bytes unpack to, in pieces of `most` bytes."""
    while True:
        piece = unpacker.decompress(data, most)
        data = getattr(unpacker, "unconsumed_tail", b"")
        if piece:
            yield piece
        if unpacker.eof or (len(piece) < most and not data):
            return


def recognise(head: bytes) -> list[Compressed]:
    """How a file that begins with these bytes may be compressed: in one way where that is certain; most in none."""
    if head.startswith(b"\x1f\x8b\x08"):
        return [Compressed("gzip", True, 0, lambda: zlib.decompressobj(16 + zlib.MAX_WBITS), ("gzip",))]
    if head.startswith(b"BZh") and head[4:10] in _BZIP2_BLOCKS:
        return [Compressed("bzip2", True, 0, bz2.BZ2Decompressor, ("bzip2",))]
    if head.startswith(b"\xfd7zXZ\0"):
        return [Compressed("xz", True, 0, lambda: _lzma(lzma.FORMAT_XZ), _LZMA_KINDS)]
    if head.startswith(_JOBLIB_OLD):
        start = _JOBLIB_OLD_HEADER + (head[_JOBLIB_OLD_HEADER : _JOBLIB_OLD_HEADER + 1] == b" ")
        return [Compressed("joblib", True, start, zlib.decompressobj, ("joblib",))]
    found = []
    if _may_be_lzma_alone(head):
        found.append(_lzma_alone(head))
    if len(head) >= 2 and head[0] & 0x0F == 8 and head[0] >> 4 <= 7 and int.from_bytes(head[:2]) % 31 == 0:
        found.append(Compressed("zlib", False, 0, zlib.decompressobj, ("zlib",)))
    return found


def opaque_kind(head: bytes) -> str:
    """The name of a form that is recognised and cannot be unpacked here; empty for any other."""
    return next((name for magic, name in _OPAQUE.items() if magic.match(head)), "")


_LZMA_KINDS = ("xz", "lzma")


def _lzma(form: int) -> lzma.LZMADecompressor:
    return lzma.LZMADecompressor(form, memlimit=_LZMA_MEMORY)


def _may_be_lzma_alone(head: bytes) -> bool:
    """Whether liblzma reads on behind this header, where it is asked for this form: its data begins with a zero."""
    if len(head) <= _LZMA_HEADER or head[0] >= 225 or head[_LZMA_HEADER]:
        return False
    bits = head[0] % 45
    return bits % 9 + bits // 9 <= 4


def _lzma_alone(head: bytes) -> Compressed:
    """It is usual, as liblzma decides that for itself, with a dictionary as encoders have it and no absurd length."""
    size, prefix = int.from_bytes(head[_LZMA_DICTIONARY], "little"), b""
    length = head[5:_LZMA_HEADER]
    is_usual = size == 0xFFFFFFFF or size.bit_count() == 1 or size in _THREE_HALVES
    is_usual = is_usual and (length == _UNKNOWN_SIZE or int.from_bytes(length, "little") < _LZMA_LARGEST)
    if size > _LARGEST_DICTIONARY:
        prefix = head[:1] + _LARGEST_DICTIONARY.to_bytes(4, "little") + length
    return Compressed(
        *("lzma", False, 0, lambda: _lzma(lzma.FORMAT_ALONE), _LZMA_KINDS if is_usual else ("lzma",)),
        is_usual=is_usual,
        prefix=prefix,
        most=_LARGEST_DICTIONARY if prefix else None,
    )


_THREE_HALVES = {3 << shift for shift in range(31)}


# ------------------------------------------------------------------------------------------------------------- tar


def begins_tar(head: bytes) -> bool:
    """Whether a tar file begins here: by its checksum, as `tarfile` decides it, which the oldest form has too."""
    block = head[:_TAR_BLOCK]
    if len(block) < _TAR_BLOCK or not block.strip(b"\0"):
        return False
    try:
        checksum = tarfile.nti(block[_TAR_CHECKSUM])  # type: ignore[attr-defined]
    except tarfile.HeaderError:
        return False
    return checksum in tarfile.calc_chksums(block)  # type: ignore[attr-defined]


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
            extended = _read_extension(span, start, size)
            if b" size=" in extended or b" GNU.sparse" in extended:
                raise CannotUnpack("an extended header of its tar data changes the size of a file")
        elif kind in (b"L", b"K"):
            _read_extension(span, start, size)  # a long name, of what follows
        else:
            _refuse_storages(block[:100])
            name = block[:100].rstrip(b"\0").decode(errors="replace")
            if kind not in (b"1", b"2", b"3", b"4", b"5", b"6"):
                yield name, start, size
        takes_no_room = kind in (b"1", b"2", b"3", b"4", b"5", b"6")
        at = start + (0 if takes_no_room else -(-size // _TAR_BLOCK) * _TAR_BLOCK)


def _read_extension(span: Span, start: int, size: int) -> bytes:
    if size > _LONGEST_TAR_EXTENSION:
        raise CannotUnpack("an extended header of its tar data is too long")
    span.seek(start)
    extension = span.read(size)
    _refuse_storages(extension)
    return extension


def _refuse_storages(name: bytes) -> None:
    if _TORCH_STORAGES.search(name):
        raise CannotUnpack("it has a file `storages`: torch's oldest form has raw data between its pickles")


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
