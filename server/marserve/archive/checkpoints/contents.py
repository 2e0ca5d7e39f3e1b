"""What a checkpoint holds: names, dtypes, shapes and places of its tensors; and the rules that both kinds share."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeGuard

from marserve.archive.reading.member_names import split_name
from marserve.errors import BadArchive, UnsafeArchive, without_stop
from marserve.files.below import real_below
from marserve.files.regular import why_not_regular

Kind = Literal["dcp", "safetensors"]

# Numbers beyond it are none of a size or a place in a file.
MOST = 1 << 62
MOST_DIMENSIONS = 64
MOST_TENSORS = 200_000
_MOST_SHOWN = 3
_LONGEST_SHOWN = 80

#: Bits of an element, by torch's name of its dtype.
BITS: Mapping[str, int] = {
    "bool": 8,
    **{f"{sign}int{bits}": bits for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "float16": 16,
    "bfloat16": 16,
    "float32": 32,
    "float64": 64,
    "complex32": 32,
    "complex64": 64,
    "complex128": 128,
    **{f"float8_{form}": 8 for form in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")},
}


@dataclass(frozen=True, slots=True)
class Saved:
    """One tensor: torch's name of its dtype, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """The bytes of its elements."""
        return math.prod(self.shape) * BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True)
class Part:
    """The bytes from `offset` on of a file that belong to one tensor, or to a piece of it.

    A piece begins in the tensor at `begin` and has the shape `shape`.
    """

    name: str
    offset: int
    length: int
    begin: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder's tensors by name, and its files, as paths below the folder, with their parts in the order they lie."""

    kind: Kind
    tensors: Mapping[str, Saved]
    files: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(saved.bytes for saved in self.tensors.values())

    @property
    def layout(self) -> dict[str, Any]:
        """All of it as a JSON document."""
        tensors = {name: [saved.dtype, saved.shape] for name, saved in self.tensors.items()}
        files = {
            path: [[part.name, part.offset, part.length, part.begin, part.shape] for part in parts]
            for path, parts in self.files.items()
        }
        return {"tensors": tensors, "files": files}


class BadCheckpoint(BadArchive):
    """The checkpoint cannot be used; the message names the file and says what is wrong with it."""

    def __init__(self, file: str, reason: str) -> None:
        self.file, self.reason = file, reason
        super().__init__(f"The checkpoint cannot be used: {shown_file(file)}: {without_stop(reason)}.")


def shown(name: object) -> str:
    """A name of a file in a message."""
    text = repr(name) if isinstance(name, str) else f"a {type(name).__name__}"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def shown_file(name: str) -> str:
    """A file's name where it stands as it is, unless it has characters that are not for printing."""
    return name if name.isprintable() else shown(name)


def first_of(names: Iterable[str]) -> str:
    """The first few names for a message, and how many more there are."""
    known = sorted(names)
    more = len(known) - _MOST_SHOWN
    return ", ".join(map(shown, known[:_MOST_SHOWN])) + (f" and {more} more" if more > 0 else "")


def is_size(value: object) -> TypeGuard[int]:
    """Whether it is a whole number that a size or a place in a file can be."""
    return type(value) is int and 0 <= value < MOST


def read_shape(value: object) -> tuple[int, ...] | None:
    """A shape of lists or tuples; None for anything that is not one."""
    if not isinstance(value, list | tuple) or len(value) > MOST_DIMENSIONS or not all(map(is_size, value)):
        return None
    return tuple(value) if math.prod(value) < MOST else None


def folder_inside(folder: Path, named: str) -> Path | None:
    """The folder of that name in the unpacked archive at `folder`; None if it has none, or the name leads out of it."""
    if os.path.isabs(named) or "\0" in named:
        return None
    whole, found = Path(os.path.realpath(folder)), Path(os.path.realpath(folder / named))
    return found if found != whole and found.is_relative_to(whole) and found.is_dir() else None


def find_inside(folder: Path, name: str, named_in: str) -> tuple[Path, int]:
    """The regular file of that name below the folder, and its size. Raises BadCheckpoint, OSError.

    A link that leads out of the folder is refused: what it names is not the checkpoint's.
    """
    try:
        parts = split_name(name)
    except UnsafeArchive as error:
        raise BadCheckpoint(named_in, f"it names the file {shown(name)}, which is not used: {error.reason}") from None
    real = real_below(folder, os.path.join(*parts))
    if real is None:
        raise BadCheckpoint(named_in, f"it names the file {shown(name)}, a link that leads out of the checkpoint")
    if why := why_not_regular(real):
        raise BadCheckpoint(named_in, f"it names the file {shown(name)}: {why}")
    return real, real.stat().st_size


def check_tiling(file: str, parts: Iterable[Part], size: int, begin: int = 0) -> tuple[Part, ...]:
    """The parts of a file in the order they lie. Raises BadCheckpoint unless they fill it, each byte once."""
    ordered = tuple(sorted(parts, key=lambda part: (part.offset, part.length)))
    at = begin
    for part in ordered:
        if part.offset < at:
            raise BadCheckpoint(file, f"the bytes of {shown(part.name)} begin at {part.offset}, inside of another's")
        if part.offset > at:
            raise BadCheckpoint(file, f"its bytes {at} to {part.offset} belong to no tensor")
        at = part.offset + part.length
        if at > size:
            raise BadCheckpoint(
                file, f"the bytes of {shown(part.name)} end at {at}, and the file has {size}: it may be cut off"
            )
    if at != size:
        raise BadCheckpoint(file, f"its bytes {at} to {size} belong to no tensor")
    return ordered
