"""Checkpoints for tests: safetensors files written byte by byte, and what torch.distributed.checkpoint writes."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from marserve.archive.checkpoints.checkpoint import read_checkpoint

DTYPE_BYTES = {"F32": 4, "F16": 2, "I64": 8, "U8": 1, "BOOL": 1}


def safetensors_bytes(tensors: Mapping[str, tuple[str, list[int]]], **metadata: str) -> bytes:
    """A file of these dtypes and shapes, whose values are zeros."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, (dtype, shape) in tensors.items():
        size = DTYPE_BYTES[dtype]
        for each in shape:
            size *= each
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    return with_header(header, bytes(at))


def with_header(header: Mapping[str, Any] | bytes, values: bytes) -> bytes:
    """A safetensors file of that header, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + values


def save_dcp(folder: Path, state: Mapping[str, Any]) -> Path:
    """What torch writes of the state in one process."""
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of no group of processes
        dcp.save(dict(state), checkpoint_id=folder, no_dist=True)
    return folder


def save_in_pieces(folder: Path, state: Mapping[str, Any], ranks: int) -> Path:
    """As so many ranks save it: what divides by rows is one piece a rank, the rest is the first rank's."""
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    folder.mkdir()
    files = [(folder / f"__{rank}_0.distcp").open("wb") for rank in range(ranks)]
    described: dict[str, Any] = {}
    places = {}
    for name, tensor in state.items():
        is_divided = tensor.dim() > 0 and tensor.shape[0] % ranks == 0
        chunks = []
        for rank, piece in enumerate(tensor.chunk(ranks) if is_divided else [tensor]):
            begin = torch.Size([rank * piece.shape[0], *[0] * (tensor.dim() - 1)] if tensor.dim() else [])
            at = files[rank].tell()
            torch.save(piece.clone(), files[rank])
            chunks.append(ChunkStorageMetadata(begin, piece.shape))
            place = _StorageInfo(f"__{rank}_0.distcp", at, files[rank].tell() - at)
            places[MetadataIndex(name, begin)] = place
        described[name] = TensorStorageMetadata(TensorProperties(tensor.dtype), tensor.shape, chunks)
    for file in files:
        file.close()
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(described, storage_data=places)))
    return folder


def as_workers_get_it(folder: Path, *, may_map: bool = False) -> Any:
    """The checkpoint of a folder, as the server tells a worker of it."""
    from marserve_handlers.context import Checkpoint

    read = read_checkpoint(folder)
    return Checkpoint(str(folder), may_map, json.dumps(read.layout).encode() if read.kind == "dcp" else b"")


def change_metadata(folder: Path, change: Callable[[Any], Any]) -> None:
    """Let `change` have the unpickled `.metadata`; what it returns, if anything, is written in its place."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    changed = change(metadata)
    path.write_bytes(pickle.dumps(metadata if changed is None else changed))
