"""Reads gzip-compressed tar files in one pass, trusting none of their numbers. Knows nothing of targets.

`tarfile` reads a header's whole extended data into memory before it can be asked how long it is, and follows formats
(sparse files, several volumes) that model archives never have. Here a member is a name, a size and bytes; everything
that is no regular file and no folder is refused by name.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from marserve.errors import BadArchive, UnsafeArchive

GZIP = b"\x1f\x8b"

_BLOCK = 512
_CHUNK = 1 << 18
_EXTENDED_BYTES = 1 << 16
_PADDING_BYTES = 1 << 20  # zero blocks after the end: tar's largest usual record, and then some
_REFUSED = {
    b"1": "it is a hard link",
    b"2": "it is a symbolic link",
    b"3": "it is a character device",
    b"4": "it is a block device",
    b"6": "it is a named pipe",
    b"S": "it is a sparse file",
}


@dataclass(frozen=True, slots=True)
class Member:
    """One file or folder; `size` in bytes, 0 for folders."""

    name: str
    size: int
    is_folder: bool


class GzipSource:
    """Inflates a gzip file of one or more streams."""

    def __init__(self, file: BinaryIO, label: str) -> None:
        self._file, self._label = file, label
        self._inflater = zlib.decompressobj(16 + zlib.MAX_WBITS)
        self._pending = b""
        self._ready = b""
        self._held = False
        self._taken = 0

    @property
    def packed(self) -> int:
        """Bytes of the file that were inflated so far."""
        return self._taken - len(self._pending)

    def read(self, size: int) -> bytes:
        """Give exactly `size` bytes, fewer at the end. Raises BadArchive when the gzip data is damaged or cut."""
        pieces = []
        while size > 0:
            if not self._ready and not self._fill():
                break
            piece, self._ready = self._ready[:size], self._ready[size:]
            size -= len(piece)
            pieces.append(piece)
        return b"".join(pieces)

    def _fill(self) -> bool:
        """Inflate some more into `_ready`; False at the end of the last stream."""
        while True:
            if not self._pending and not self._held:
                self._pending = self._file.read(_CHUNK)
                self._taken += len(self._pending)
                if not self._pending:
                    if self._inflater.eof:
                        return False
                    raise BadArchive(f"{self._label} is damaged: its gzip data ends too early")
            if self._inflater.eof:
                self._pending = self._pending.lstrip(b"\0")  # padding between streams and at the end is allowed
                if not self._pending:
                    continue
                self._inflater = zlib.decompressobj(16 + zlib.MAX_WBITS)
            try:
                self._ready = self._inflater.decompress(self._pending, _CHUNK)
            except zlib.error as error:
                raise BadArchive(f"{self._label} is damaged: its gzip data does not unpack ({error})") from None
            if self._inflater.eof:
                self._pending = self._inflater.unused_data
            else:
                self._pending = self._inflater.unconsumed_tail
            self._held = len(self._ready) == _CHUNK and not self._inflater.eof
            if self._ready:
                return True


class TarStream:
    """The members of a tar file in their order. Iterate; after each file take its bytes with `read`."""

    def __init__(self, source: GzipSource, label: str) -> None:
        self._source, self._label = source, label
        self._left = 0
        self._padding = 0

    def __iter__(self) -> Iterator[Member]:
        """Give each member; its bytes are skipped if they were not read.

        Raises UnsafeArchive for links, devices, pipes, sparse files and oversized extended headers, BadArchive for
        damage.
        """
        while True:
            for _ in self.read():
                pass
            member = self._read_member()
            if member is None:
                self._read_end()
                return
            yield member

    def read(self) -> Iterator[bytes]:
        """Give the current member's bytes in chunks."""
        while self._left:
            chunk = self._source.read(min(_CHUNK, self._left))
            if not chunk:
                raise BadArchive(f"{self._label} is damaged: it ends inside a member")
            self._left -= len(chunk)
            yield chunk
        if self._padding:
            self._source.read(self._padding)
            self._padding = 0

    def _read_member(self) -> Member | None:
        long_name: str | None = None
        extended: dict[str, str] = {}
        for _ in range(8):  # a name, a link's name, one extended header of each kind: never more before a member
            header = self._source.read(_BLOCK)
            if not header or header == bytes(_BLOCK):
                return None
            kind, name, size = self._parse(header)
            if kind == b"L":
                long_name = self._read_extension(name, size).rstrip(b"\0").decode(errors="surrogateescape")
            elif kind in b"xX":
                extended = self._parse_extended(name, self._read_extension(name, size))
            elif kind in (b"g", b"K"):  # of the whole archive (a comment, mostly); a link's name, refused below
                self._read_extension(name, size)
            else:
                name = extended.get("path", long_name or name)
                size = self._number(extended["size"].encode(), 10) if "size" in extended else size
                return self._accept(kind, name, size, extended)
        raise UnsafeArchive(name, "it has too many extended headers")

    def _accept(self, kind: bytes, name: str, size: int, extended: dict[str, str]) -> Member:
        if kind in _REFUSED:
            raise UnsafeArchive(name, _REFUSED[kind])
        if any(key.startswith("GNU.sparse") for key in extended):
            raise UnsafeArchive(name, _REFUSED[b"S"])
        if kind not in (b"0", b"\0", b"7", b"5"):
            raise UnsafeArchive(name, f"it is of the tar type {kind!r}; only files and folders are unpacked")
        is_folder = kind == b"5" or (kind == b"\0" and name.endswith("/"))
        if is_folder and size:
            raise UnsafeArchive(name, "it is a folder with bytes of its own")
        self._left = size
        self._padding = -size % _BLOCK
        return Member(name, size, is_folder)

    def _parse(self, header: bytes) -> tuple[bytes, str, int]:
        if len(header) < _BLOCK:
            raise BadArchive(f"{self._label} is damaged: it ends inside a header")
        unsigned = sum(header) - sum(header[148:156]) + 8 * 32
        if self._number(header[148:156], 8) != unsigned:
            raise BadArchive(
                f"{self._label} is no tar file inside its gzip data, or damaged: a header's checksum is wrong"
            )
        name = header[:100].split(b"\0", 1)[0]
        if header[257:262] == b"ustar" and header[263:265] == b"00":
            prefix = header[345:500].split(b"\0", 1)[0]
            name = prefix + b"/" + name if prefix else name
        size = self._number(header[124:136], 8)
        return header[156:157], name.decode(errors="surrogateescape"), size

    def _number(self, field: bytes, base: int) -> int:
        if base == 8 and field[0] & 0x80:
            number = int.from_bytes(field, "big", signed=False) - (0x80 << (8 * (len(field) - 1)))
            negative = field[0] & 0x40
        else:
            text = field.split(b"\0", 1)[0].strip() or b"0"
            if not text.isdigit() or len(text) > 24:
                raise BadArchive(f"{self._label} is damaged: a header holds {text[:24]!r} where a number belongs")
            try:
                number, negative = int(text, base), 0
            except ValueError:
                raise BadArchive(f"{self._label} is damaged: a header holds {text!r} where a number belongs") from None
        if negative or number > 1 << 62:
            raise BadArchive(f"{self._label} is damaged: a header holds a number that no size can be")
        return number

    def _read_extension(self, name: str, size: int) -> bytes:
        if size > _EXTENDED_BYTES:
            raise UnsafeArchive(name, f"its extended header has {size} bytes; at most {_EXTENDED_BYTES} are read")
        data = self._source.read(size + -size % _BLOCK)[:size]
        if len(data) < size:
            raise BadArchive(f"{self._label} is damaged: it ends inside a header")
        return data

    def _parse_extended(self, name: str, data: bytes) -> dict[str, str]:
        """The records `length key=value\\n` of a pax header."""
        records: dict[str, str] = {}
        while data:
            length_text, _, _ = data.partition(b" ")
            length = self._number(length_text, 10) if length_text else 0
            record = data[:length]
            key, equals, value = record[len(length_text) + 1 :].partition(b"=")
            if len(record) != length or length <= len(length_text) or not equals or not value.endswith(b"\n"):
                raise BadArchive(f"{self._label} is damaged: the extended header of {name!r} cannot be read")
            records[key.decode(errors="replace")] = value[:-1].decode(errors="surrogateescape")
            data = data[length:]
        return records

    def _read_end(self) -> None:
        """Read on to the end of the gzip data, so that its checksum is verified."""
        for _ in range(_PADDING_BYTES // _BLOCK):
            if not self._source.read(_BLOCK):
                return
        raise BadArchive(f"{self._label} is damaged: there is data behind the end of its tar file")
