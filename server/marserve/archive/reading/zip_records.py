"""Reads zip files record by record, trusting none of their numbers. Knows nothing of models, names of files or targets.

`zipfile` lists every entry before it can be asked how many there are, and reads what other readers would read
differently. Here the end record is read first and bounded, the directory is read once, and an entry whose directory
and local records disagree, that overlaps another, or that needs what torch's own reader lacks, is refused.

    end record → zip64 end record → directory (`Entry` each) → local record → bytes, counted while they are inflated
"""

from __future__ import annotations

import io
import stat
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from marserve.errors import BadArchive, UnsafeArchive

START = b"PK\x03\x04"
EMPTY = b"PK\x05\x06"

STORED, DEFLATED = 0, 8

_END = struct.Struct("<4s4H2LH")
_LOCATOR_64 = struct.Struct("<4sLQL")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_LONGEST_COMMENT = 0xFFFF
_CHUNK = 1 << 18
_ENCRYPTED = 0x1 | 0x40 | 0x2000
_SIZES_FOLLOW = 0x8
_UTF8 = 0x800


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the directory. Sizes and `offset` (of its local record) in bytes; `mode` is Unix's, or 0."""

    name: str
    raw_name: bytes
    method: int
    flags: int
    crc: int
    compressed: int
    size: int
    offset: int
    mode: int

    @property
    def is_folder(self) -> bool:
        """Folders are entries whose name ends with a slash."""
        return self.name.endswith("/")

    @property
    def is_special(self) -> bool:
        """Links, devices and the like, by the mode that Unix zip programs record."""
        kind = stat.S_IFMT(self.mode)
        return kind not in (0, stat.S_IFREG, stat.S_IFDIR)


class ZipRecords:
    """The directory of a zip file, read and checked when built; then `read` gives an entry's bytes.

    `label` names the file in errors; `prefix` stands before the names of members there. Raises BadArchive when it is
    no zip, damaged, or over `max_entries` or `max_directory_bytes` (checked before the directory is read);
    UnsafeArchive when its entries overlap.
    """

    def __init__(
        self, file: BinaryIO, label: str, *, max_entries: int, max_directory_bytes: int, prefix: str = ""
    ) -> None:
        self._file, self._label, self._prefix = file, label, prefix
        size = file.seek(0, io.SEEK_END)
        count, directory_bytes, directory_offset = self._read_end(size)
        if count > max_entries:
            raise BadArchive(f"{label} says it has {count} entries; at most {max_entries} are read")
        if directory_bytes > max_directory_bytes:
            raise BadArchive(
                f"{label} says its names take {directory_bytes} bytes; at most {max_directory_bytes} are read"
            )
        if count * _ENTRY.size > directory_bytes:
            raise BadArchive(f"{label} is damaged: {count} entries do not fit in {directory_bytes} bytes")
        self.entries = self._read_directory(count, directory_offset, directory_bytes)
        self._refuse_overlaps(directory_offset)

    # ------------------------------------------------------------------------------------------------ end records

    def _read_end(self, size: int) -> tuple[int, int, int]:
        """Number of entries, bytes of the directory, its offset; from the end record, or the zip64 one."""
        tail_bytes = min(size, _END.size + _LONGEST_COMMENT)
        tail = self._read_at(size - tail_bytes, tail_bytes)
        at = tail.rfind(EMPTY)
        if at < 0 or len(tail) - at < _END.size:
            raise BadArchive(f"{self._label} is no complete zip file: it has no end record")
        _, disk, start_disk, here, count, directory_bytes, offset, comment = _END.unpack_from(tail, at)
        end_at = size - tail_bytes + at
        if end_at + _END.size + comment != size:
            raise BadArchive(f"{self._label} is damaged: its end record is not at its end")
        directory_end = end_at
        is_64 = end_at >= _LOCATOR_64.size and self._read_at(end_at - _LOCATOR_64.size, 4) == b"PK\x06\x07"
        if is_64:
            _, _, end_64_at, disks = _LOCATOR_64.unpack(self._read_at(end_at - _LOCATOR_64.size, _LOCATOR_64.size))
            if disks > 1 or end_64_at + _END_64.size > end_at:
                raise BadArchive(f"{self._label} is damaged: its zip64 end record is not where it should be")
            record = _END_64.unpack(self._read_at(end_64_at, _END_64.size))
            if record[0] != b"PK\x06\x06" or end_64_at + 12 + record[1] != end_at - _LOCATOR_64.size:
                raise BadArchive(f"{self._label} is damaged: its zip64 end record is not where it should be")
            disk, start_disk, here, count, directory_bytes, offset = record[4:]
            directory_end = end_64_at
        if disk or start_disk or here != count:
            raise BadArchive(f"{self._label} is one part of a zip file in several parts; those are not read")
        if offset + directory_bytes != directory_end:
            # Bytes before the zip, or between directory and end: two readers may see two archives.
            raise BadArchive(f"{self._label} is damaged: its directory is not where its end record says")
        return count, directory_bytes, offset

    # -------------------------------------------------------------------------------------------------- directory

    def _read_directory(self, count: int, offset: int, size: int) -> list[Entry]:
        data = self._read_at(offset, size)
        entries: list[Entry] = []
        at = 0
        for _ in range(count):
            if at + _ENTRY.size > size or data[at : at + 4] != b"PK\x01\x02":
                raise BadArchive(f"{self._label} is damaged: entry {len(entries) + 1} of its directory is missing")
            fields = _ENTRY.unpack_from(data, at)
            _, _, _, flags, method, _, _, crc, compressed, full = fields[:10]
            name_bytes, extra_bytes, comment_bytes, _, _, attributes, local = fields[10:]
            at += _ENTRY.size
            end = at + name_bytes + extra_bytes + comment_bytes
            if end > size:
                raise BadArchive(f"{self._label} is damaged: entry {len(entries) + 1} of its directory is cut")
            raw_name = data[at : at + name_bytes]
            name = self._decode_name(raw_name, flags)
            if 0xFFFFFFFF in (compressed, full, local):
                extra = data[at + name_bytes : at + name_bytes + extra_bytes]
                full, compressed, local = self._read_extra_64(name, extra, full, compressed, local)
            mode = attributes >> 16
            entries.append(Entry(name, raw_name, method, flags, crc, compressed, full, local, mode))
            at = end
        if at != size:
            raise BadArchive(f"{self._label} is damaged: its directory holds more than the {count} entries it says")
        return entries

    def _decode_name(self, raw: bytes, flags: int) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            if flags & _UTF8:
                raise BadArchive(f"{self._label} is damaged: the name {raw[:80]!r} is not UTF-8") from None
            return raw.decode("cp437")

    def _read_extra_64(self, name: str, extra: bytes, full: int, compressed: int, local: int) -> tuple[int, int, int]:
        """Sizes and offset that did not fit in 32 bits, from the extra field 0x0001."""
        at = 0
        while at + 4 <= len(extra):
            kind, length = struct.unpack_from("<HH", extra, at)
            field = extra[at + 4 : at + 4 + length]
            at += 4 + length
            if kind != 1:
                continue
            wide = iter(struct.unpack(f"<{len(field) // 8}Q", field[: len(field) // 8 * 8]))
            try:
                full = next(wide) if full == 0xFFFFFFFF else full
                compressed = next(wide) if compressed == 0xFFFFFFFF else compressed
                local = next(wide) if local == 0xFFFFFFFF else local
            except StopIteration:
                break
            return full, compressed, local
        raise BadArchive(f"{self._label} is damaged: the zip64 sizes of {name!r} are missing")

    def _refuse_overlaps(self, directory_offset: int) -> None:
        """Refuse entries that share bytes: a few megabytes would unpack to petabytes, each entry looking harmless."""
        end_of_last = 0
        name_of_last = ""
        for entry in sorted(self.entries, key=lambda entry: entry.offset):
            if entry.offset < end_of_last:
                raise UnsafeArchive(self._prefix + entry.name, f"it shares bytes with {name_of_last!r}")
            end_of_last = entry.offset + _LOCAL.size + len(entry.raw_name) + entry.compressed
            name_of_last = entry.name
            if end_of_last > directory_offset:
                raise BadArchive(f"{self._label} is damaged: entry {entry.name!r} runs into the directory")

    # ------------------------------------------------------------------------------------------------ bytes

    def find_data(self, entry: Entry) -> int:
        """Where an entry's bytes begin. Raises BadArchive when its local record says otherwise than the directory."""
        record = self._read_at(entry.offset, _LOCAL.size)
        if len(record) < _LOCAL.size or record[:4] != START:
            raise BadArchive(f"{self._label} is damaged: {entry.name!r} is not where the directory says")
        _, _, flags, method, _, _, crc, compressed, size, name_bytes, extra_bytes = _LOCAL.unpack(record)
        if self._read_at(entry.offset + _LOCAL.size, name_bytes) != entry.raw_name:
            raise BadArchive(f"{self._label} is damaged: {entry.name!r} has another name in its own record")
        if (flags | entry.flags) & _ENCRYPTED:
            raise BadArchive(f"{self._label}: {entry.name!r} is encrypted; encrypted archives are not read")
        differs = method != entry.method
        if not (flags & _SIZES_FOLLOW) or crc or compressed or size:
            differs |= crc != entry.crc
            differs |= compressed not in (entry.compressed, 0xFFFFFFFF) or size not in (entry.size, 0xFFFFFFFF)
        if differs:
            raise BadArchive(f"{self._label} is damaged: the two records of {entry.name!r} disagree")
        return entry.offset + _LOCAL.size + int(name_bytes) + int(extra_bytes)

    def read(self, entry: Entry) -> Iterator[bytes]:
        """Give an entry's bytes in chunks, never more than its `size`.

        Raises BadArchive for a method other than stored and deflated, more or fewer bytes than the directory says, or
        a wrong checksum (after the last chunk).
        """
        at = self.find_data(entry)
        if entry.method == STORED:
            if entry.size != entry.compressed:
                raise BadArchive(f"{self._label} is damaged: the two sizes of {entry.name!r} differ")
            chunks = self._read_span(entry, at)
        elif entry.method == DEFLATED:
            chunks = self._inflate(entry, at)
        else:
            raise BadArchive(
                f"{self._label}: {entry.name!r} is compressed by method {entry.method}; only stored and deflated "
                "entries are read. Make the archive again with `marserve archive`."
            )
        crc = written = 0
        for chunk in chunks:
            written += len(chunk)
            crc = zlib.crc32(chunk, crc)
            yield chunk
        if written != entry.size or crc != entry.crc:
            raise BadArchive(f"{self._label} is damaged: {entry.name!r} fails its checksum")

    def _read_span(self, entry: Entry, at: int) -> Iterator[bytes]:
        end = at + entry.compressed
        while at < end:
            chunk = self._read_at(at, min(_CHUNK, end - at))
            if not chunk:
                raise BadArchive(f"{self._label} is damaged: {entry.name!r} is cut")
            at += len(chunk)
            yield chunk

    def _inflate(self, entry: Entry, at: int) -> Iterator[bytes]:
        inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        left = entry.size
        for packed in self._read_span(entry, at):
            pending, chunk = packed, b""
            # Once more with nothing new while output comes: zlib may have taken all input and still hold some.
            while (pending or chunk) and not inflater.eof:
                try:
                    # One byte more than is left shows an entry that is longer than it says.
                    chunk = inflater.decompress(pending, min(_CHUNK, left + 1))
                except zlib.error as error:
                    raise BadArchive(f"{self._label} is damaged: {entry.name!r} does not unpack ({error})") from None
                pending = inflater.unconsumed_tail
                left -= len(chunk)
                if left < 0:
                    raise UnsafeArchive(self._prefix + entry.name, "it unpacks to more bytes than it says")
                if chunk:
                    yield chunk

    def _read_at(self, offset: int, size: int) -> bytes:
        self._file.seek(offset)
        return self._file.read(size)
