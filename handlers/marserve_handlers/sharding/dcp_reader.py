"""Reads checkpoints of `torch.distributed.checkpoint`: tensors alone, and exactly the bytes that belong to them.

torch's own reader unpickles `.metadata` freely, opens any path that it names, and reads ends of files again and again.
This one opens no `.metadata`: the server has read it without its classes, and says where each piece lies. It stays
below the folder and in its files, and reads each piece once.
"""

from __future__ import annotations

import io
import json
import os
import warnings
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

# A larger piece goes from its file to its tensor, so that memory holds it once; a smaller one is read as a whole.
READ_AT_ONCE = 4 << 20


class NotTensors(ValueError):
    """The checkpoint holds, or asks for, something else than tensors in its own files; the text says what."""


class _Place(NamedTuple):
    """Where a piece lies."""

    path: str
    offset: int
    length: int


class _Window(io.RawIOBase):
    """A part of a file as a file of its own, so that a piece goes from there to its tensor and is held once."""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0
        self.bytes_read = 0

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """The place in this part."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place in this part."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, or its beginning with what is left of this part. Raises EOFError where the file ends."""
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        wanted = len(view)
        self._file.seek(self._offset + self._at)
        while view:
            count = self._file.readinto(view)  # type: ignore[attr-defined]
            if not count:
                raise EOFError("the file ends inside of a tensor")
            view = view[count:]
        self._at += wanted
        self.bytes_read += wanted
        return wanted


class TensorReader(StorageReader):
    """Reads the tensors of a folder for `load`; `bytes_read` counts what was read of its files.

    `tensors` are the dtype and the shape of each.
    """

    def __init__(self, folder: str | os.PathLike[str], layout: bytes) -> None:
        """`layout` says what lies where, as `context.checkpoint` has it. Raises ValueError, KeyError for any other."""
        self._folder = Path(folder)
        document = json.loads(layout)
        self.tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            name: (getattr(torch, dtype), tuple(shape)) for name, (dtype, shape) in document["tensors"].items()
        }
        self._chunks: dict[str, list[ChunkStorageMetadata]] = {name: [] for name in self.tensors}
        self._places: dict[MetadataIndex, _Place] = {}
        for path, parts in document["files"].items():
            for name, offset, length, begin, shape in parts:
                self._chunks[name].append(ChunkStorageMetadata(torch.Size(begin), torch.Size(shape)))
                self._places[MetadataIndex(name, begin)] = _Place(path, offset, length)
        self.bytes_read = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a reader is of one folder."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """What `load` plans by, made of the layout."""
        described = {
            name: TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), self._chunks[name])
            for name, (dtype, shape) in self.tensors.items()
        }
        return Metadata(dict(described), storage_data=self._places, storage_meta=StorageMeta())

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """Nothing: the places are known."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors, file by file and in the order the pieces lie. Raises NotTensors, OSError."""
        by_file: dict[str, list[Any]] = {}
        for item in sorted(plan.items, key=lambda item: self._places[item.storage_index].offset):
            by_file.setdefault(self._places[item.storage_index].path, []).append(item)
        for path, items in by_file.items():
            with open(self._find(path), "rb", buffering=0) as file:
                for item in items:
                    self._read_item(item, file, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any folder will do."""
        return True

    def read_part(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        """A part of a tensor, of the pieces that have some of it. Each slice has a begin and an end.

        Raises NotTensors, OSError.
        """
        whole = torch.empty([each.stop - each.start for each in part], dtype=self.tensors[name][0])
        for chunk in self._chunks[name]:
            spans = [
                (max(begin, each.start), min(begin + size, each.stop))
                for begin, size, each in zip(chunk.offsets, chunk.sizes, part, strict=True)
            ]
            if any(begin >= end for begin, end in spans):
                continue
            place = self._places[MetadataIndex(name, chunk.offsets)]
            with open(self._find(place.path), "rb", buffering=0) as file:
                piece = self._read_piece(name, place, file)
            inside = tuple(slice(a - at, b - at) for (a, b), at in zip(spans, chunk.offsets, strict=True))
            to = tuple(slice(a - each.start, b - each.start) for (a, b), each in zip(spans, part, strict=True))
            whole[to] = piece[inside]
        return whole

    def _find(self, relative: str) -> str:
        path = os.path.realpath(self._folder / relative)
        if not Path(path).is_relative_to(os.path.realpath(self._folder)):
            raise NotTensors(f"{relative} leads out of it")
        return path

    def _read_item(self, item: Any, file: IO[bytes], planner: LoadPlanner) -> None:
        name, place = item.storage_index.fqn, self._places[item.storage_index]
        if item.type is not LoadItemType.TENSOR:
            raise NotTensors(f"{name} is asked for as bytes, which are not unpickled")
        tensor = self._read_piece(name, place, file)
        for dimension, (begin, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(dimension, begin, length)
        target = planner.resolve_tensor(item).detach()
        if target.size() != tensor.size():
            raise NotTensors(f"{name} has the shape {list(tensor.size())} in {place.path}")
        target.copy_(tensor)
        planner.commit_tensor(item, target)

    def _read_piece(self, name: str, place: _Place, file: IO[bytes]) -> torch.Tensor:
        if not 0 <= place.offset <= place.offset + place.length <= os.fstat(file.fileno()).st_size:
            raise NotTensors(f"{name} lies beyond the end of {place.path}")
        window = _Window(file, place.offset, place.length)
        piece: Any = window
        if place.length <= READ_AT_ONCE:  # torch reads both ends of a file several times
            piece = io.BytesIO(window.read(place.length))
        try:
            tensor = torch.load(piece, map_location="cpu", weights_only=True)
        finally:
            self.bytes_read += window.bytes_read
        if not isinstance(tensor, torch.Tensor):
            raise NotTensors(f"{name} is no tensor in {place.path}")
        return tensor


def fill(state: dict[str, Any], reader: TensorReader, *, is_alone: bool = True) -> None:
    """Fill these tensors, or shards of tensors, from a checkpoint. Raises NotTensors, OSError, RuntimeError.

    `is_alone`: this process alone; else all ranks of the default group call it together.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
            load(state, storage_reader=reader, planner=DefaultLoadPlanner(), no_dist=is_alone)
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        for cause, _ in getattr(error, "failures", {}).values():
            raise cause from None
        raise NotTensors(f"{type(error).__name__}: {error}") from error
