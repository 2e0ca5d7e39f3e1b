"""The weights of a checkpoint part by part, for ranks: each reads what is its own, and no two keep the same numbers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping

import torch

from marserve_handlers.context import Checkpoint
from marserve_handlers.sharding.dcp_reader import TensorReader
from marserve_handlers.sharding.safe_files import find_stored, map_tensors, read_tensors
from marserve_handlers.sharding.stored import read_part


class CheckpointWeights:
    """Weights of safetensors files, or of `torch.distributed.checkpoint`; `bytes_read` are those of the parts read."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Reads the headers. Raises what their readers raise."""
        self._may_map = checkpoint.may_map
        self._pieces = TensorReader(checkpoint.folder, checkpoint.layout) if checkpoint.layout else None
        self._stored = find_stored(checkpoint.folder) if self._pieces is None else {}
        self.bytes_read = 0

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of all of them, by name."""
        if self._pieces is not None:
            return {name: shape for name, (_, shape) in self._pieces.tensors.items()}
        return {name: each.shape for name, each in self._stored.items()}

    def read(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        """A part of one of them, in memory of its own."""
        if self._pieces is not None:
            tensor = self._pieces.read_part(name, part)
        else:
            tensor = read_part(self._stored[name], name, part)
        self.bytes_read += tensor.nbytes
        return tensor

    def read_all(self) -> dict[str, torch.Tensor]:
        """All of them, mapped where they may be; pieces are put together in a file of their own, which is mapped."""
        if self._pieces is None:
            return map_tensors(self._stored) if self._may_map else read_tensors(self._stored)
        whole = {name: in_a_file(dtype, shape) for name, (dtype, shape) in self._pieces.tensors.items()}
        self._pieces.fill(whole)
        return whole


def in_a_file(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor in a temporary file that is mapped, and goes with it; in memory where there is no room for a file."""
    count = torch.Size(shape).numel()
    if not count or not hasattr(os, "posix_fallocate"):
        return torch.empty(shape, dtype=dtype)
    with tempfile.NamedTemporaryFile() as file:
        try:
            os.posix_fallocate(file.fileno(), 0, count * dtype.itemsize)  # a file with holes would end the process
        except OSError:
            return torch.empty(shape, dtype=dtype)
        return torch.from_file(file.name, shared=True, size=count, dtype=dtype).view(shape)
