"""How many bytes of weights an archive holds, from heads and directories alone: nothing is unpacked or loaded.

A zip says in its directory how large each member is when it is unpacked, so the last few kilobytes of an archive are
enough, also of one that lies elsewhere (any `BinaryIO` that can seek does). Weights are members that runtimes load:
what torch, safetensors, ONNX and their like write, by the ends of their names. Inside of them nothing is guessed: a
safetensors header is exact, torch's own zip counts its storages, everything else counts as large as it is.

An archive that holds a faster build beside its parent (`optimised/`) counts with what is served: the build's files, if
it brings weights of its own, else the parent's.
"""

from __future__ import annotations

import io
import itertools
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from marserve.archive.reading.zip_records import EMPTY, START, STORED, Entry, ZipRecords
from marserve.errors import BadArchive
from marserve.files.regular import open_regular

ENDINGS = (
    ".pt",
    ".pth",
    ".pt2",
    ".ts",
    ".bin",
    ".ckpt",
    ".safetensors",
    ".onnx",
    ".onnx_data",
    ".data",
    ".npz",
    ".npy",
    ".gguf",
    ".h5",
    ".pb",
    ".tflite",
    ".engine",
    ".plan",
    ".joblib",
    ".pkl",
)
# Of an archive that holds a build: its proof, its files, and among them calls, with what they gave.
_PROOF, _BUILD, _CALLS = "MAR-INF/optimised.json", "optimised/", ("optimised/samples.npz", "optimised/example.npz")
_MAX_ENTRIES = 200_000
_MAX_DIRECTORY = 64 << 20
_MAX_HEADER = 16 << 20
_MOST_FILES = 100_000


@dataclass(frozen=True, slots=True)
class WeightSize:
    """`weights` are the bytes of files that models load, `total` those of everything once it is unpacked.

    Both are the file's own size if the archive does not say (a tar, or no archive).
    """

    weights: int
    total: int


def weigh(path: Path) -> WeightSize:
    """The size of an archive's file, or of a folder. Blocks, for a few reads. Raises OSError."""
    if path.is_dir():
        return _weigh_folder(path)
    with open_regular(path) as file:
        return weigh_file(file, path.stat().st_size)


def weigh_file(file: BinaryIO, size: int) -> WeightSize:
    """The size of what an archive of `size` bytes holds. Reads its end and heads of weights. Raises OSError."""
    file.seek(0)
    if file.read(4) not in (START, EMPTY):
        return WeightSize(size, size)
    file.seek(0)
    try:
        records = ZipRecords(file, "archive", max_entries=_MAX_ENTRIES, max_directory_bytes=_MAX_DIRECTORY)
        members = [entry for entry in records.entries if not entry.is_folder]
        served = set(_served([entry.name for entry in members]))
        weights = sum(_weigh_member(records, file, entry) for entry in members if entry.name in served)
    except BadArchive:
        return WeightSize(size, size)
    return WeightSize(weights, sum(entry.size for entry in members))


def _weigh_folder(folder: Path) -> WeightSize:
    weights = total = 0
    paths = list(itertools.islice(_files(folder), _MOST_FILES))
    served = set(_served([path.relative_to(folder).as_posix() for path in paths]))
    for path in paths:
        size = path.stat().st_size
        total += size
        if path.relative_to(folder).as_posix() in served:
            with open_regular(path) as file:
                weights += _weigh_stored(file, 0, size, path.name)
    return WeightSize(weights, total)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())


def _served(names: Sequence[str]) -> list[str]:
    """Those of the members that hold weights which are loaded."""
    weights = [name for name in names if _is_weights(name) and name not in _CALLS]
    if _PROOF not in names:
        return weights
    own = [name for name in weights if name.startswith(_BUILD)]
    return own or weights


def _is_weights(name: str) -> bool:
    return name.lower().endswith(ENDINGS)


def _weigh_member(records: ZipRecords, file: BinaryIO, entry: Entry) -> int:
    """The bytes of tensors in a stored member; for a compressed one its size."""
    if entry.method != STORED:
        return entry.size
    return _weigh_stored(file, records.find_data(entry), entry.size, entry.name)


def _weigh_stored(file: BinaryIO, begin: int, size: int, name: str) -> int:
    """The bytes of tensors in a file that lies at `begin` of another."""
    if name.lower().endswith(".safetensors"):
        return _weigh_safetensors(file, begin, size)
    file.seek(begin)
    if file.read(4) != START:
        return size
    try:
        window = cast(BinaryIO, io.BufferedReader(_Window(file, begin, size)))
        inner = ZipRecords(window, name, max_entries=_MAX_ENTRIES, max_directory_bytes=_MAX_DIRECTORY)
    except BadArchive:
        return size
    # torch writes one record a storage, below `…/data/`; what is not torch's counts as a whole.
    storages = [entry.size for entry in inner.entries if "/data/" in f"/{entry.name}" and not entry.is_folder]
    constants = [entry.size for entry in inner.entries if "/constants/" in f"/{entry.name}" and not entry.is_folder]
    return sum(storages) + sum(constants) if storages or constants else size


def _weigh_safetensors(file: BinaryIO, begin: int, size: int) -> int:
    """As the header says: eight bytes of its length, then JSON with each tensor's offsets."""
    file.seek(begin)
    head = file.read(8)
    if len(head) < 8 or not 2 <= (length := struct.unpack("<Q", head)[0]) <= min(_MAX_HEADER, size - 8):
        return size
    try:
        header = json.loads(file.read(length))
        return sum(
            int(tensor["data_offsets"][1]) - int(tensor["data_offsets"][0])
            for name, tensor in header.items()
            if name != "__metadata__"
        )
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return size


class Seekable(io.RawIOBase):
    """A seekable file over something of known size; a subclass reads."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move, as files do."""
        self._at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence] + offset
        return self._at


class _Window(Seekable):
    """A part of a file as a file of its own."""

    def __init__(self, file: BinaryIO, begin: int, size: int) -> None:
        super().__init__(size)
        self._file, self._begin = file, begin

    def readinto(self, buffer: Any) -> int:
        """Read on, never beyond the part."""
        self._file.seek(self._begin + self._at)
        data = self._file.read(min(len(buffer), max(0, self._size - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
