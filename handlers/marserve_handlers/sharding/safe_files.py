"""Reads safetensors files: mapped, which takes no memory of the process, or into tensors of their own.

A map is private: what the model changes in its weights stays in the process. The file must not be overwritten as long
as it lasts, which would end the process; so only files that nothing else writes are mapped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch

from marserve_handlers.sharding.stored import Stored, read_into, whole_of
from marserve_handlers.support.shown import shown_name

INDEX_ENDING, ENDING = ".safetensors.index.json", ".safetensors"

_NAMES = {
    "BOOL": "bool",
    **{f"{sign}{bits}": f"{name}{bits}" for sign, name in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)},
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
}


def find_stored(folder: str) -> dict[str, Stored]:
    """Every tensor of a folder's files, those of its index if there is one. Raises OSError, ValueError, KeyError."""
    names = sorted(os.listdir(folder))
    files = [name for name in names if name.endswith(ENDING)]
    index = next((name for name in names if name.endswith(INDEX_ENDING)), None)
    if index is not None:
        with open(os.path.join(folder, index), encoding="utf-8") as file:
            files = sorted(set(json.load(file)["weight_map"].values()))
    stored: dict[str, Stored] = {}
    for name in files:
        stored.update(stored_in(_path_below(folder, name)))
    return stored


def _path_below(folder: str, name: str) -> str:
    """The path of a file that an index names, which may lie in a folder below its own. Raises ValueError for another.

    The server refused what leads out, and what it saw may have been changed since.
    """
    path = os.path.join(folder, name)
    whole = os.path.realpath(folder)
    if os.path.commonpath([whole, os.path.realpath(path)]) != whole:
        raise ValueError(f"the index names {shown_name(name)}, which lies outside of its folder")
    return path


def stored_in(path: str) -> dict[str, Stored]:
    """Every tensor of one file. Raises OSError, ValueError, KeyError."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: Mapping[str, Any] = json.loads(file.read(min(length, os.fstat(file.fileno()).st_size)))
    stored = {}
    for name, value in header.items():
        if name != "__metadata__":
            first, last = value["data_offsets"]
            dtype = getattr(torch, _NAMES[value["dtype"]])
            size = torch.Size(value["shape"]).numel() * dtype.itemsize
            if first < 0 or last - first != size:
                raise ValueError(
                    f"{name} lies at {first} to {last} in {os.path.basename(path)}, and takes {size} bytes"
                )
            stored[name] = Stored(path, dtype, tuple(value["shape"]), 8 + length + first, 8 + length + last)
    return stored


def map_tensors(stored: Mapping[str, Stored]) -> dict[str, torch.Tensor]:
    """The tensors as parts of mapped files, and those that cannot be as `read_tensors` has them.

    Raises RuntimeError where a file cannot be mapped, and as `read_tensors`.
    """
    maps: dict[str, torch.Tensor] = {}
    tensors: dict[str, torch.Tensor] = {}
    apart: dict[str, Stored] = {}
    for name, each in stored.items():
        if not each.can_be_mapped:
            apart[name] = each
            continue
        if each.path not in maps:
            size = os.stat(each.path).st_size
            if size < each.end:
                raise EOFError(
                    f"{shown_name(os.path.basename(each.path))} ends at {size}, inside of {shown_name(name)}"
                )
            maps[each.path] = torch.from_file(each.path, shared=False, size=size, dtype=torch.uint8)
        tensors[name] = maps[each.path][each.begin : each.end].view(each.dtype).view(each.shape)
    return tensors | read_tensors(apart)


def read_tensors(stored: Mapping[str, Stored]) -> dict[str, torch.Tensor]:
    """The tensors in memory of their own, each read once. Raises OSError, EOFError."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted({each.path for each in stored.values()}):
        with open(path, "rb", buffering=0) as file:
            for name, each in stored.items():
                if each.path == path:
                    tensors[name] = torch.empty(each.shape, dtype=each.dtype)
                    read_into(file.fileno(), each, name, whole_of(each.shape), tensors[name])
    return tensors
