"""The regions of shared memory that clients have registered: names for parts of files in one folder.

A region is remembered by its file's identity (device and inode), and no file stays open: a registration costs no
descriptor, and a file that is put in the place of a registered one is noticed when it is opened. Nothing is mapped; the
worker reads and writes the file (`marserve_handlers/declared/open_inference/shared_memory`).
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from marserve.api.open_inference.shown import shown as shown_value
from marserve.errors import BadInput

MAX_NAME: Final = 256
# A file's name, in bytes.
MAX_KEY: Final = 255
# What an offset or a size may be at most: the largest position in a file.
MAX_PLACE: Final = (1 << 63) - 1

NO_CUDA: Final = (
    "This server takes no CUDA shared memory; register system shared memory, or send the tensors in the body."
)

_KINDS: Final = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


class Span(NamedTuple):
    """Bytes of a file that has this identity: `size` of them from `offset` on."""

    path: str
    device: int
    inode: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Region:
    """One registration: `byte_size` bytes from `offset` on of the file that `key` names."""

    name: str
    key: str
    offset: int
    byte_size: int
    path: str
    device: int
    inode: int

    def document(self) -> dict[str, Any]:
        """As the protocol shows it."""
        return {"name": self.name, "key": self.key, "offset": self.offset, "byte_size": self.byte_size}


class Regions:
    """The regions of a server. Without a folder none can be registered.

    `most_bytes` bounds all regions together, and the inputs of one request.
    """

    def __init__(self, folder: Path | None, *, most_bytes: int, most_regions: int) -> None:
        self._folder = None if folder is None else os.path.realpath(folder)
        self.most_bytes = most_bytes
        self._most_regions = most_regions
        self._regions: dict[str, Region] = {}
        self._bytes = 0

    @property
    def is_on(self) -> bool:
        """Whether regions can be registered at all."""
        return self._folder is not None

    def register(self, name: str, key: Any, offset: Any, byte_size: Any) -> None:
        """Register a region. Raises BadInput, with nothing changed, naming what cannot be taken."""
        if self._folder is None:
            raise BadInput(
                "This server takes no shared memory; its operator can name a folder for it with "
                "system_shared_memory_folder."
            )
        _check_name(name)
        file = _file_of(key)
        offset = _whole_number(offset, "Parameter offset", 0)
        byte_size = _whole_number(byte_size, "Parameter byte_size", 1)
        if name in self._regions:
            raise BadInput(
                f"A region with the name {shown(name)} is registered; unregister it first, or choose another name."
            )
        if len(self._regions) >= self._most_regions:
            raise BadInput(
                f"{len(self._regions)} regions are registered, as many as there may be "
                "(system_shared_memory_max_regions); unregister one first."
            )
        if self._bytes + byte_size > self.most_bytes:
            raise BadInput(
                f"Parameter byte_size is {byte_size}, and {self.most_bytes - self._bytes} bytes are left of the "
                f"{self.most_bytes} that all regions together may have (system_shared_memory_size)."
            )
        path = os.path.join(self._folder, file)
        found = _look(path, key)
        if offset + byte_size > found.st_size:
            raise BadInput(
                f"Parameters offset and byte_size, {offset} and {byte_size}, end at {offset + byte_size}, and the file "
                f"{shown(key)} has {found.st_size} bytes."
            )
        self._regions[name] = Region(name, key, offset, byte_size, path, found.st_dev, found.st_ino)
        self._bytes += byte_size

    def unregister(self, name: str) -> None:
        """Forget a region; one that is not registered is forgotten already. Accepted requests keep theirs."""
        region = self._regions.pop(name, None)
        if region is not None:
            self._bytes -= region.byte_size

    def unregister_all(self) -> None:
        """Forget all regions."""
        self._regions.clear()
        self._bytes = 0

    def status(self, name: str = "") -> list[Region]:
        """All regions, or the one of this name. Raises BadInput if it is not registered."""
        return [self._find(name)] if name else list(self._regions.values())

    def span(self, words: str, region: Any, offset: Any, byte_size: Any) -> Span:
        """The bytes that a tensor names. `words` are the tensor's, for the message. Raises BadInput."""
        if not isinstance(region, str):
            raise BadInput(f"{words} has a shared_memory_region of {shown(region)}; it must be a region's name.")
        try:
            found = self._find(region)
        except BadInput as error:
            raise BadInput(f"{words} has a shared_memory_region that cannot be used. {error}") from None
        offset = _whole_number(offset, f"{words}: shared_memory_offset", 0)
        byte_size = _whole_number(byte_size, f"{words}: shared_memory_byte_size", 0)
        if offset + byte_size > found.byte_size:
            raise BadInput(
                f"{words}: shared_memory_offset {offset} and shared_memory_byte_size {byte_size} end at "
                f"{offset + byte_size}, and the region {shown(region)} has {found.byte_size} bytes."
            )
        return Span(found.path, found.device, found.inode, found.offset + offset, byte_size)

    def _find(self, name: str) -> Region:
        found = self._regions.get(name)
        if found is None:
            raise BadInput(f"No region of system shared memory has the name {shown(name)}; register it first.")
        return found


def no_cuda_region(name: str) -> BadInput:
    """The error of a question for one region of CUDA shared memory: there is none."""
    return BadInput(f"No region of CUDA shared memory has the name {shown(name)}; this server takes none.")


def _whole_number(value: Any, words: str, least: int) -> int:
    """The value, a whole number from `least` on. Raises BadInput that begins with `words`."""
    if type(value) is not int or not least <= value <= MAX_PLACE:
        raise BadInput(f"{words} is {shown(value)}; it must be a whole number of bytes, from {least} to {MAX_PLACE}.")
    return value


def shown(value: object) -> str:
    """A client's value for a sentence."""
    return "missing" if value is None else shown_value(value)


def _check_name(name: str) -> None:
    if not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise BadInput(
            f"A region's name is {shown(name)}; it must have 1 to {MAX_NAME} characters, none of them a control."
        )


def _file_of(key: Any) -> str:
    """The name of a file in the folder: `shm_open` writes it with a slash before it. Raises BadInput."""
    file = key.removeprefix("/") if isinstance(key, str) else ""
    if file in ("", ".", "..") or "/" in file or not file.isprintable() or len(file.encode()) > MAX_KEY:
        raise BadInput(
            f"Parameter key is {shown(key)}; it must be the name of a file in the server's folder of shared memory, "
            "as '/input', without another slash."
        )
    return file


def _look(path: str, key: str) -> os.stat_result:
    """What is known of a regular file that can be read and written. Raises BadInput for anything else."""
    try:
        found = os.lstat(path)
        if not stat.S_ISREG(found.st_mode):
            kind = _KINDS.get(stat.S_IFMT(found.st_mode), "no file")
            raise BadInput(f"Parameter key is {shown(key)}, which is {kind}; it must be a regular file.")
        # It may be exchanged between the two looks: neither a link is followed nor a pipe waited for.
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        descriptor = os.open(path, flags)
        try:
            found = os.fstat(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise BadInput(
            f"Parameter key is {shown(key)}, and the server cannot open a file of that name for reading and writing: "
            f"{error.strerror}."
        ) from None
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        # A further name may be that of a file elsewhere, which its owner never meant to share.
        raise BadInput(f"Parameter key is {shown(key)}; it must be a regular file that has no other name (hard link).")
    return found
