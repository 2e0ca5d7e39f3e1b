"""The ranks of a worker as a mesh of torch's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from marserve_handlers.errors import ModelNotLoadable

SHARED = "tp"


def join_mesh(sizes: Mapping[str, int], device: torch.device) -> DeviceMesh:
    """The dimension of the mesh over which layers are divided; waits for the other ranks.

    They speak by NCCL on CUDA devices and by Gloo on processors, in the group that a handler has made before, if it
    has made one. Raises ModelNotLoadable outside of a group of as many ranks as the mesh has.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "0"))
    if ranks != prod(sizes.values()):
        raise ModelNotLoadable(
            f"parallel has the mesh {dict(sizes)}, and this process is one of {ranks or 'no'} ranks. A server starts "
            "as many as the mesh has for each worker."
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    mesh: Any = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    shared: DeviceMesh = mesh[SHARED]
    return shared
