"""Checkpoints for tests: safetensors files written byte by byte, and what torch.distributed.checkpoint writes."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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


def change_metadata(folder: Path, change: Callable[[Any], Any]) -> None:
    """Let `change` have the unpickled `.metadata`; what it returns, if anything, is written in its place."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    changed = change(metadata)
    path.write_bytes(pickle.dumps(metadata if changed is None else changed))
