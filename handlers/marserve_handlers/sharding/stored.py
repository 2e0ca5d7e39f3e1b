"""Tensors whose numbers lie in a file one behind the other: the whole of one or a part is read, and nothing else."""

from __future__ import annotations

import itertools
import math
import os
from typing import Any, NamedTuple, cast

import torch

from marserve_handlers.support.shown import shown_name

# What is not read straight into its tensor goes through memory of so many bytes, or of one row.
BLOCK_BYTES = 4 << 20


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


def whole_of(shape: tuple[int, ...]) -> tuple[slice, ...]:
    """All of a tensor of this shape, as a part."""
    return tuple(slice(0, length) for length in shape)


def read_part(stored: Stored, name: str, part: tuple[slice, ...]) -> torch.Tensor:
    """A part of a tensor in memory of its own. Each slice has a begin and an end. Raises OSError, EOFError."""
    tensor = torch.empty(_shape_of(part), dtype=stored.dtype)
    with open(stored.path, "rb", buffering=0) as file:
        read_into(file.fileno(), stored, name, part, tensor)
    return tensor


def read_into(descriptor: int, stored: Stored, name: str, part: tuple[slice, ...], target: torch.Tensor) -> int:
    """Fill a tensor of the part's shape from the tensor's file, which is open; returns the bytes that were read.

    A target of another dtype, or one that is no run of memory, is filled block by block. Raises OSError, EOFError.
    """
    if target.is_contiguous() and target.dtype == stored.dtype:
        _read_runs(descriptor, stored, name, part, target)
        return target.nbytes
    rows, *others = part or (slice(0, 1),)
    row_bytes = math.prod(_shape_of(tuple(others))) * stored.dtype.itemsize
    step = min(max(1, BLOCK_BYTES // max(1, row_bytes)), max(1, rows.stop - rows.start))
    block = torch.empty([step, *_shape_of(tuple(others))], dtype=stored.dtype)  # one, so that memory is not torn
    for first in range(rows.start, rows.stop, step):
        last = min(first + step, rows.stop)
        inside = (slice(first, last), *others) if part else ()
        some = block[: last - first]
        _read_runs(descriptor, stored, name, inside, some)
        (target[first - rows.start : last - rows.start] if part else target).copy_(some if part else some[0])
    return target.numel() * stored.dtype.itemsize


def _shape_of(part: tuple[slice, ...]) -> list[int]:
    return [each.stop - each.start for each in part]


def _read_runs(descriptor: int, stored: Stored, name: str, part: tuple[slice, ...], tensor: torch.Tensor) -> None:
    """Read a part into a tensor that is a run of memory, run by run of the file."""
    if not tensor.numel():
        return
    view = memoryview(cast(Any, tensor.view(-1).view(torch.uint8).numpy()))
    item = stored.dtype.itemsize
    # So many of the last dimensions are taken whole, or are one run of what lies behind them.
    run = len(part)
    while run and (run == len(part) or part[run] == slice(0, stored.shape[run])):
        run -= 1
    strides = [math.prod(stored.shape[each + 1 :]) * item for each in range(len(part))]
    last = part[run].start * strides[run] if part else 0
    length = math.prod(_shape_of(part[run:])) * item
    starts = [
        range(each.start * stride, each.stop * stride, stride)
        for each, stride in zip(part[:run], strides[:run], strict=True)
    ]
    for number, outer in enumerate(itertools.product(*starts)):
        _fill(descriptor, stored.begin + sum(outer) + last, view[number * length : (number + 1) * length], stored, name)


def _fill(descriptor: int, begin: int, view: memoryview, stored: Stored, name: str) -> None:
    while view:
        count = os.preadv(descriptor, [view], begin)
        if not count:
            raise EOFError(f"{shown_name(os.path.basename(stored.path))} ends inside of {shown_name(name)}")
        view, begin = view[count:], begin + count
