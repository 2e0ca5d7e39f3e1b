"""Reads safetensors files: mapped, which takes no memory of the process, or into tensors of their own.

A map is private: what the model changes in its weights stays in the process. The file must not be overwritten as long
as it lasts, which would end the process; so only files that nothing else writes are mapped.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch

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


class Stored(NamedTuple):
    """One tensor of a file: its dtype and shape, and where its bytes begin and end in the file."""

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def can_be_mapped(self) -> bool:
        """Whether it has bytes, and lies in its file as processors can read its dtype."""
        return self.begin < self.end and self.begin % self.dtype.itemsize == 0


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
        stored.update(_read_header(os.path.join(folder, os.path.basename(name))))
    return stored


def _read_header(path: str) -> Iterator[tuple[str, Stored]]:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: Mapping[str, Any] = json.loads(file.read(min(length, os.fstat(file.fileno()).st_size)))
    for name, value in header.items():
        if name != "__metadata__":
            first, last = value["data_offsets"]
            dtype = getattr(torch, _NAMES[value["dtype"]])
            yield name, Stored(path, dtype, tuple(value["shape"]), 8 + length + first, 8 + length + last)


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
                raise EOFError(f"{os.path.basename(each.path)} ends at {size}, inside of {name}")
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
                    _fill(file, each.begin, tensors[name], name)
    return tensors


def read_part(stored: Stored, name: str, part: tuple[slice, ...]) -> torch.Tensor:
    """A part of a tensor in memory of its own; nothing else of the file is read. Each slice has a begin and an end.

    Raises OSError, EOFError.
    """
    tensor = torch.empty([each.stop - each.start for each in part], dtype=stored.dtype)
    # So many of the last dimensions are taken whole, or are one run of what lies behind them.
    run = len(part)
    while run and (run == len(part) or part[run] == slice(0, stored.shape[run])):
        run -= 1
    strides = [math.prod(stored.shape[each + 1 :]) for each in range(len(part))]
    last = part[run].start * strides[run] if part else 0
    with open(stored.path, "rb", buffering=0) as file:
        for place in itertools.product(*(range(each.stop - each.start) for each in part[:run])):
            outer = sum((part[each].start + at) * strides[each] for each, at in enumerate(place))
            _fill(file, stored.begin + (outer + last) * stored.dtype.itemsize, tensor[place], name)
    return tensor


def _fill(file: Any, begin: int, tensor: torch.Tensor, name: str) -> None:
    if not tensor.numel():
        return
    view = memoryview(cast(Any, tensor.view(-1).view(torch.uint8).numpy()))
    file.seek(begin)
    while view:
        count = file.readinto(view)
        if not count:
            raise EOFError(f"{os.path.basename(file.name)} ends inside of {name}")
        view = view[count:]
