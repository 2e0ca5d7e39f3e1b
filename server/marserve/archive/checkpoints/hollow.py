"""The weights of an archive without their numbers: a folder whose files have the heads and the sizes of the archive's.

Of safetensors files the headers are unpacked, of indexes, `.metadata` and configurations all; other weights become
empty files of their size, which take no room on a disk. So what reads headers in folders reads them of archives, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from marserve.archive.reading.member_names import split_name
from marserve.archive.reading.zip_records import EMPTY, START, Entry, ZipRecords
from marserve.errors import BadArchive, UnsafeArchive
from marserve.files.regular import open_regular

_MAX_ENTRIES = 200_000
_MAX_DIRECTORY_BYTES = 64 << 20
_MAX_WHOLE_BYTES = 64 << 20
_MAX_HEADER_BYTES = 100_000_000
_WHOLE = (".json", ".yaml", ".yml", "/.metadata")
_EMPTY = (".distcp", ".pt", ".pth", ".bin", ".pt2", ".onnx")
_HEADED = ".safetensors"


def hollow_copy(archive: Path, target: Path) -> None:
    """Fill the empty folder `target`. Blocks. Raises BadArchive for what is no `.mar`, UnsafeArchive, OSError."""
    with open_regular(archive) as file:
        if file.read(4) not in (START, EMPTY):
            raise BadArchive(f"{archive.name} is no zip file, as a .mar is, so that heads cannot be read of it.")
        records = ZipRecords(file, archive.name, max_entries=_MAX_ENTRIES, max_directory_bytes=_MAX_DIRECTORY_BYTES)
        for entry in records.entries:
            if entry.is_folder:
                continue
            if entry.is_special:
                raise UnsafeArchive(entry.name, f"it is a link or device (mode {entry.mode:o})")
            name = f"/{entry.name}"
            if name.endswith(_WHOLE) and entry.size <= _MAX_WHOLE_BYTES:
                _write(target, entry, records.read(entry), entry.size)
            elif name.endswith(_HEADED):
                _write(target, entry, _head(records.read(entry)), entry.size)
            elif name.endswith(_EMPTY):
                _write(target, entry, iter(()), entry.size)


def _write(target: Path, entry: Entry, pieces: Iterator[bytes], size: int) -> None:
    path = target.joinpath(*split_name(entry.name))
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.writelines(pieces)
        file.truncate(size)


def _head(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The first pieces of a safetensors file, until its header is among them."""
    first, seen = b"", 0
    for piece in pieces:
        first += piece[: 8 - len(first)]
        seen += len(piece)
        yield piece
        if len(first) == 8 and seen >= 8 + min(int.from_bytes(first, "little"), _MAX_HEADER_BYTES):
            return
