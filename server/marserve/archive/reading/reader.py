"""Unpacks model archives into a folder of their own: bounded, and never outside of it.

Knows the two archive formats of the contract (8.1): zip (`.mar`) and gzip-compressed tar (`.tar.gz`, `.tgz`, first
folder stripped). Which one a file is, its content says, not its name. Knows nothing of what the members mean.

    bounds → names (`member_names`) → bytes into a private sibling of the target → renamed to the target

Whatever fails, the sibling is removed: there is a whole target or none.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from marserve.archive.reading import tar_stream, zip_records
from marserve.archive.reading.member_names import NameSpace, split_name
from marserve.errors import BadArchive, UnsafeArchive
from marserve.files.atomic import placing
from marserve.files.regular import open_regular

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Limits:
    """What an archive may hold. Sizes in bytes, of what is unpacked unless said otherwise.

    Compression may gain at most a factor of `max_ratio`, but only what is over `free_bytes` is held to it: a small
    file of zeros is no attack.
    """

    max_entries: int = 50_000
    max_total_bytes: int = 64 * GIB
    max_member_bytes: int = 64 * GIB
    max_names_bytes: int = 16 * MIB
    max_name_bytes: int = 1024
    max_depth: int = 32
    max_ratio: int = 250
    free_bytes: int = 256 * MIB


def unpack(archive: Path, target: Path, limits: Limits | None = None, label: str = "") -> None:
    """Unpack `archive` into `target`: a new folder whose parent exists, or an empty one, which is replaced.

    Errors name it by its `label`, the file's own name if not given. Files get mode 0644 and folders 0755,
    whatever the archive says. Blocks; run it off the event loop.

    Raises UnsafeArchive (a member that must not be unpacked, by name), BadArchive (neither format, damaged, over a
    bound), FileExistsError when there is more than an empty folder at `target`, OSError when reading or writing fails.
    """
    limits, label = limits or Limits(), label or archive.name
    if target.is_symlink() or (target.exists() and not (target.is_dir() and not any(target.iterdir()))):
        raise FileExistsError(f"{target} exists already; archives are unpacked into new folders")
    with placing(target) as partial:
        partial.mkdir(mode=0o700)
        with open_regular(archive) as file:
            start = file.read(4)
            file.seek(0)
            writer = _Writer(partial, limits)
            if start in (zip_records.START, zip_records.EMPTY):
                _unpack_zip(
                    zip_records.ZipRecords(
                        file, label, max_entries=limits.max_entries, max_directory_bytes=limits.max_names_bytes
                    ),
                    writer,
                )
            elif start[:2] == tar_stream.GZIP:
                _unpack_tar(tar_stream.GzipSource(file, label), label, writer)
            else:
                raise BadArchive(
                    f"{label} is no model archive: it is neither a zip file (.mar) nor a gzip-compressed tar "
                    "file (.tar.gz). Make one with `marserve archive`."
                )
        partial.chmod(0o755)


def _unpack_zip(records: zip_records.ZipRecords, writer: _Writer) -> None:
    """Judge the whole directory first, so that most attacks cost nothing; then write."""
    total = packed = 0
    planned: list[tuple[zip_records.Entry, tuple[str, ...]]] = []
    for entry in records.entries:
        if entry.is_special:
            raise UnsafeArchive(entry.name, f"it is a link or device (mode {entry.mode:o})")
        if b"\0" in entry.raw_name:
            raise UnsafeArchive(entry.name, "its name holds control characters")
        parts = writer.take(entry.name, entry.is_folder)
        total += entry.size
        packed += entry.compressed
        writer.check(entry.name, entry.size, total, packed)
        if entry.is_folder and entry.size:
            raise UnsafeArchive(entry.name, "it is a folder with bytes of its own")
        planned.append((entry, parts))
    for entry, parts in planned:
        if entry.is_folder:
            writer.make_folder(parts)
        else:
            writer.write_file(parts, records.read(entry))


def _unpack_tar(source: tar_stream.GzipSource, label: str, writer: _Writer) -> None:
    total = names = entries = 0
    stream = tar_stream.TarStream(source, label)
    for member in stream:
        entries += 1
        names += len(member.name)
        total += member.size
        if entries > writer.limits.max_entries:
            raise BadArchive(f"{label} has more than {writer.limits.max_entries} entries")
        if names > writer.limits.max_names_bytes:
            raise BadArchive(f"{label} has names of more than {writer.limits.max_names_bytes} bytes together")
        if member.is_folder and member.name in (".", "./"):
            continue
        # The whole name is judged, then its first component goes, as TorchServe does: `m/h.py` and `./h.py` are h.py.
        writer.split(member.name)
        inner = member.name.partition("/")[2] if "/" in member.name.rstrip("/") else member.name
        if not inner.strip("/.") or (member.is_folder and inner == member.name):
            continue  # the top folder itself
        parts = writer.take(member.name, member.is_folder, inner)
        if member.is_folder:
            writer.make_folder(parts)
            continue

        def chunks(
            name: str = member.name, size: int = member.size, before: int = total - member.size
        ) -> Iterable[bytes]:
            writer.check_size(name, size, before + size)
            written = before
            for chunk in stream.read():
                written += len(chunk)
                writer.check(name, size, written, source.packed)
                yield chunk

        writer.write_file(parts, chunks())


class _Writer:
    """Puts members below `root`, which is ours alone until it is renamed; holds them to the limits."""

    def __init__(self, root: Path, limits: Limits) -> None:
        self.limits = limits
        self._root = root
        self._names = NameSpace()
        self._made: set[tuple[str, ...]] = {()}

    def split(self, name: str) -> tuple[str, ...]:
        return split_name(name, max_bytes=self.limits.max_name_bytes, max_depth=self.limits.max_depth)

    def take(self, name: str, is_folder: bool, inner: str | None = None) -> tuple[str, ...]:
        """Judge a member's name, reserve it, and give its path components. `inner` is what the name is shortened to."""
        parts = self.split(inner or name)
        if is_folder:
            self._names.add_folder(name, parts)
        else:
            self._names.add_file(name, parts)
        return parts

    def check_size(self, name: str, size: int, total: int) -> None:
        if size > self.limits.max_member_bytes:
            raise UnsafeArchive(name, f"it has {size} bytes; at most {self.limits.max_member_bytes} are unpacked")
        if total > self.limits.max_total_bytes:
            raise UnsafeArchive(
                name, f"with it the archive has {total} bytes; at most {self.limits.max_total_bytes} are unpacked"
            )

    def check(self, name: str, size: int, total: int, packed: int) -> None:
        """Hold a member of `size` to the bounds when `total` bytes have come from `packed` ones."""
        self.check_size(name, size, total)
        if total > self.limits.free_bytes and total > packed * self.limits.max_ratio:
            raise UnsafeArchive(
                name, f"{packed} bytes unpack to {total}, more than {self.limits.max_ratio} times as many"
            )

    def make_folder(self, parts: tuple[str, ...]) -> Path:
        folder = self._root
        for depth, part in enumerate(parts, 1):
            folder = folder / part
            if parts[:depth] not in self._made:
                folder.mkdir()
                folder.chmod(0o755)
                self._made.add(parts[:depth])
        return folder

    def write_file(self, parts: tuple[str, ...], chunks: Iterable[bytes]) -> None:
        path = self.make_folder(parts[:-1]) / parts[-1]
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.writelines(chunks)
            os.fchmod(descriptor, 0o644)
