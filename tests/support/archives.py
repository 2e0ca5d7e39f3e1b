"""Builds archives for tests: good ones in a line, hostile ones record by record, as no honest program writes them."""

from __future__ import annotations

import gzip
import io
import json
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE_MODE = stat.S_IFREG | 0o644
LINK_MODE = stat.S_IFLNK | 0o777


def manifest(name: str = "m", handler: str = "h.py", **model: Any) -> bytes:
    """A manifest's bytes."""
    document = {
        "createdOn": "02/01/2020 03:04:06",
        "runtime": "python",
        "model": {"modelName": name, "modelVersion": "1.0", "handler": handler, **model},
        "archiverVersion": "0.12.0",
    }
    return json.dumps(document).encode()


def good_members(name: str = "m") -> dict[str, bytes]:
    """The members of an ordinary archive."""
    return {
        "h.py": b"def handle(data, context):\n    return data\n",
        "sub/labels.txt": b"cat\ndog\n",
        "MAR-INF/MANIFEST.json": manifest(name),
    }


def zip_of(members: Mapping[str, bytes]) -> bytes:
    """An honest zip file."""
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return raw.getvalue()


def tgz_of(members: Mapping[str, bytes], top: str = "m/") -> bytes:
    """An honest gzip-compressed tar file whose members lie below `top`."""
    return tgz_with(tar_file(top + name, data) for name, data in members.items())


@dataclass(frozen=True)
class ZipMember:
    """One entry of a hand-made zip file; what is None is what would be true."""

    name: str | bytes
    data: bytes = b"x"
    mode: int = FILE_MODE
    method: int = 8
    flags: int = 0
    packed: bytes | None = None
    size: int | None = None
    crc: int | None = None
    local_name: bytes | None = None
    local_method: int | None = None
    offset: int | None = None

    @property
    def raw_name(self) -> bytes:
        """The name's bytes."""
        return self.name if isinstance(self.name, bytes) else self.name.encode()


def raw_zip(
    members: Iterable[ZipMember],
    *,
    count: int | None = None,
    directory_bytes: int | None = None,
    directory_offset: int | None = None,
    prefix: bytes = b"",
    comment: bytes = b"",
    between: bytes = b"",
) -> bytes:
    """A zip file with exactly these records; end-record fields that are None are true. UTF-8 names are flagged."""
    body = bytearray(prefix)
    directory = bytearray()
    number = 0
    for member in members:
        number += 1
        packed = member.packed
        if packed is None:
            packed = deflate(member.data) if member.method == 8 else member.data
        flags = member.flags | (0x800 if isinstance(member.name, str) and not member.name.isascii() else 0)
        crc = zlib.crc32(member.data) if member.crc is None else member.crc
        size = len(member.data) if member.size is None else member.size
        local = member.raw_name if member.local_name is None else member.local_name
        method = member.method if member.local_method is None else member.local_method
        offset = len(body) if member.offset is None else member.offset
        body += struct.pack("<4s5H3L2H", b"PK\3\4", 20, flags, method, 0, 33, crc, len(packed), size, len(local), 0)
        body += local + packed
        directory += struct.pack(
            "<4s6H3L5H2L",
            b"PK\1\2",
            0x0314,
            20,
            flags,
            member.method,
            0,
            33,
            crc,
            len(packed),
            size,
            len(member.raw_name),
            0,
            0,
            0,
            0,
            member.mode << 16,
            offset,
        )
        directory += member.raw_name
    end = struct.pack(
        "<4s4H2LH",
        b"PK\5\6",
        0,
        0,
        number if count is None else count,
        number if count is None else count,
        len(directory) if directory_bytes is None else directory_bytes,
        len(body) if directory_offset is None else directory_offset,
        len(comment),
    )
    return bytes(body + directory + between + end + comment)


def zip64_end(count: int, directory_bytes: int, directory_offset: int, end_64_at: int) -> bytes:
    """The three end records of a zip file that needs 64 bits."""
    return (
        struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, directory_bytes, directory_offset)
        + struct.pack("<4sLQL", b"PK\6\7", 0, end_64_at, 1)
        + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    )


def deflate(data: bytes) -> bytes:
    """Raw deflated data, as zip files hold it."""
    packer = zlib.compressobj(6, zlib.DEFLATED, -15)
    return packer.compress(data) + packer.flush()


def deflated_zeros(size: int) -> bytes:
    """Raw deflated zeros, `size` (a multiple of 1 MiB) bytes of them, made without compressing them all."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    return block * (size >> 20) + b"\x03\x00"


def tar_file(name: str, data: bytes = b"x", mode: int = 0o644) -> tuple[tarfile.TarInfo, bytes]:
    """A regular file for `tgz_with`."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), mode
    return info, data


def tar_special(name: str, kind: bytes, target: str = "") -> tuple[tarfile.TarInfo, bytes]:
    """A link, device, pipe or folder for `tgz_with`."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    if kind == tarfile.DIRTYPE:
        info.mode = 0o755
    return info, b""


def tgz_with(members: Iterable[tuple[tarfile.TarInfo, bytes]], form: int = tarfile.PAX_FORMAT) -> bytes:
    """A gzip-compressed tar file with exactly these members."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=form) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return gzip.compress(raw.getvalue(), 6, mtime=0)


def raw_tar_header(name: bytes, size: int | bytes, kind: bytes = b"0", mode: int = 0o644) -> bytes:
    """One header block with a right checksum; `size` as bytes stands there as it is."""
    field = size if isinstance(size, bytes) else b"%011o\0" % size
    head = name.ljust(100, b"\0") + b"%07o\0" % mode + b"0000000\0" * 2 + field.ljust(12, b"\0") + b"00000000000\0"
    tail = kind + bytes(100) + b"ustar\0" + b"00"
    block = (head + b" " * 8 + tail).ljust(512, b"\0")
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def snapshot(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Everything below `folder`: mode, size and bytes by path; equal before and after where nothing was written."""
    found: dict[str, tuple[int, int, bytes]] = {}
    for path in sorted(folder.rglob("*")):
        state = path.lstat()
        data = path.read_bytes() if stat.S_ISREG(state.st_mode) else b""
        found[str(path.relative_to(folder))] = (state.st_mode, state.st_size if data else 0, data)
    return found
