"""Reads safetensors files, one or those of an index, by their headers. The values are not read.

A file is 8 bytes, how long its header is, the header, which is JSON, and the values. Each byte of the values belongs to
one tensor: the format forbids holes, as something could hide in them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from marserve.archive.checkpoints.contents import (
    BITS,
    MOST_TENSORS,
    BadCheckpoint,
    Checkpoint,
    Part,
    Saved,
    check_tiling,
    find_inside,
    first_of,
    is_size,
    read_shape,
    shown,
    shown_file,
)
from marserve.archive.checkpoints.json_entries import (
    Reader,
    TooMany,
    Twice,
    read_object,
    read_small,
    read_texts,
    skip_to_end,
)
from marserve.files.regular import TooLarge, open_regular, read_regular

ENDING = ".safetensors"
INDEX_ENDING = ".safetensors.index.json"
MAX_INDEX_BYTES = 64 << 20
# As the format's own reader has it.
_MAX_HEADER_BYTES = 100_000_000
_MOST_FILES = 10_000

#: torch's name of each dtype of the format.
DTYPES: Mapping[str, str] = {
    "BOOL": "bool",
    **{f"{sign}{bits}": f"{name}{bits}" for sign, name in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)},
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
}


def find_files(folder: Path) -> tuple[str | None, list[str]]:
    """The name of the folder's index, None without one, and those of its safetensors files. Raises BadCheckpoint."""
    names = sorted(entry.name for entry in os.scandir(folder))
    indexes = [name for name in names if name.endswith(INDEX_ENDING)]
    if len(indexes) > 1:
        raise BadCheckpoint(indexes[1], f"there is another index beside it, {indexes[0]}; leave one")
    return next(iter(indexes), None), [name for name in names if name.endswith(ENDING)]


def read_safetensors(folder: Path) -> Checkpoint:
    """The checkpoint of a folder with safetensors files. Blocks. Raises BadCheckpoint, OSError.

    With an index the files that it names are read; without, all that lie there. No name may be in two of them.
    """
    index, files = find_files(folder)
    where = None if index is None else _read_index(folder / index)
    if where is not None:
        files = sorted(set(where.values()))
    if len(files) > _MOST_FILES:
        raise BadCheckpoint(index or "its folder", f"there are more than {_MOST_FILES} files")
    tensors: dict[str, Saved] = {}
    home: dict[str, str] = {}
    found: dict[Path, str] = {}
    parts: dict[str, tuple[Part, ...]] = {}
    for name in files:
        path, size = find_inside(folder, name, index or name)
        if (other := found.setdefault(path, name)) != name:
            raise BadCheckpoint(index or name, f"it names one file as {shown(other)} and as {shown(name)}")
        with open_regular(path) as file:
            inside, parts[name] = read_header(file, size, name)
        if twice := inside.keys() & tensors.keys():
            one = min(twice)
            raise BadCheckpoint(name, f"it holds {shown(one)}, which {shown_file(home[one])} holds, too: {_IN_PIECES}")
        tensors.update(inside)
        home.update(dict.fromkeys(inside, name))
        if len(tensors) > MOST_TENSORS:
            raise BadCheckpoint(name, f"with it there are more than {MOST_TENSORS} tensors")
    if index is not None and where is not None:
        _compare(index, where, home)
    if not tensors:
        raise BadCheckpoint(index or first_of(files), "it holds no tensors")
    return Checkpoint("safetensors", tensors, parts)


_IN_PIECES = "tensors saved in pieces are not joined here; save them whole"


def _compare(index: str, where: Mapping[str, str], home: Mapping[str, str]) -> None:
    """Raise BadCheckpoint unless the index says of each tensor in which file it is."""
    for name, file in where.items():
        if home.get(name) != file:
            raise BadCheckpoint(index, f"it says that {shown(name)} is in {shown_file(file)}, and it is not")
    if extra := home.keys() - where.keys():
        file = home[min(extra)]
        raise BadCheckpoint(index, f"it does not name {first_of(extra)}, which {shown_file(file)} holds")


def _read_index(path: Path) -> dict[str, str]:
    """In which file each tensor is."""
    try:
        data = read_regular(path, MAX_INDEX_BYTES)
    except TooLarge:
        raise BadCheckpoint(path.name, f"it has more than {MAX_INDEX_BYTES} bytes") from None
    return parse_index(data, path.name)


def parse_index(data: bytes, name: str) -> dict[str, str]:
    """In which file each tensor is, by an index of these bytes. Raises BadCheckpoint."""
    document = _read_json(data, name, "weight_map", read_texts)
    where = document.get("weight_map")
    if not isinstance(where, dict) or not where:
        raise BadCheckpoint(name, "it has no weight_map, which says in which file each tensor is")
    for tensor, file in where.items():
        if not isinstance(file, str) or not file.endswith(ENDING):
            raise BadCheckpoint(name, f"it says that {shown(tensor)} is in {shown(file)}, which is no {ENDING} file")
    return where


def read_header(file: BinaryIO, size: int, name: str) -> tuple[dict[str, Saved], tuple[Part, ...]]:
    """The tensors of a file of `size` bytes, and where each lies in the file. Raises BadCheckpoint, OSError."""
    if size < 8:
        raise BadCheckpoint(name, f"it has {size} bytes, and a safetensors file at least 8")
    length = int.from_bytes(file.read(8), "little")
    if length > min(_MAX_HEADER_BYTES, size - 8):
        least = "more than any header has" if length > _MAX_HEADER_BYTES else f"and the file {size}: it may be cut off"
        raise BadCheckpoint(name, f"its header is to have {length} bytes, {least}")
    header = file.read(length)
    if len(header) < length:
        raise BadCheckpoint(name, "it ends in its header")
    return parse_header(header, size, name)


def parse_header(header: bytes, size: int, name: str) -> tuple[dict[str, Saved], tuple[Part, ...]]:
    """As `read_header`, of the header's bytes."""
    if not header.startswith(b"{"):
        raise BadCheckpoint(name, "its header is no JSON object")
    document = _read_json(header, name, "__metadata__", read_texts)
    begin = 8 + len(header)
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BadCheckpoint(name, "its __metadata__ is no map of texts")
    tensors: dict[str, Saved] = {}
    parts = []
    for tensor, value in document.items():
        saved, first, last = _read_tensor(value, f"{shown(tensor)} in its header", name)
        if last - first != saved.bytes:
            raise BadCheckpoint(
                name,
                f"{shown(tensor)} has {last - first} bytes, and {saved.dtype} of the shape {list(saved.shape)} takes "
                f"{saved.bytes}",
            )
        tensors[tensor] = saved
        parts.append(Part(tensor, begin + first, last - first))
    return tensors, check_tiling(name, parts, size, begin)


def _read_tensor(value: object, what: str, name: str) -> tuple[Saved, int, int]:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise BadCheckpoint(name, f"{what} does not have exactly dtype, shape and data_offsets")
    dtype = value["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise BadCheckpoint(name, f"{what} has the dtype {shown(dtype)}; known are {', '.join(DTYPES)}")
    shape = read_shape(value["shape"]) if isinstance(value["shape"], list) else None
    if shape is None or math.prod(shape) * BITS[DTYPES[dtype]] >= 1 << 62:
        raise BadCheckpoint(name, f"{what} has no shape of whole numbers of 0 or more that a tensor can have")
    offsets = value["data_offsets"]
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_size, offsets)) or offsets[0] > offsets[1]:
        raise BadCheckpoint(name, f"{what} has no data_offsets of a first byte and of the one behind the last")
    return Saved(DTYPES[dtype], shape), offsets[0], offsets[1]


def _read_json(data: bytes, name: str, own: str, read_own: Reader) -> dict[str, Any]:
    """A JSON object, whose entry `own` is read by `read_own`; its others are short. Raises BadCheckpoint."""

    def read(entry: str, text: str, at: int) -> tuple[Any, int]:
        return read_own(entry, text, at) if entry == own else read_small(entry, text, at)

    try:
        text = data.decode()
        document, end = read_object(text, len(text) - len(text.lstrip()), read)
        skip_to_end(text, end)
    except Twice as error:
        raise BadCheckpoint(name, f"it names {shown(str(error))} twice in one object") from None
    except TooMany as error:
        raise BadCheckpoint(name, f"it has {error} names, the most that are read: save small tensors joined") from None
    except (ValueError, RecursionError):
        raise BadCheckpoint(name, f"it holds no JSON object that can be read, of short values and {own}") from None
    return document
