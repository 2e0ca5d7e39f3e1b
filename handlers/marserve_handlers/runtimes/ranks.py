"""Torch's side of a group of ranks: which device is a rank's, and its RPC."""

from __future__ import annotations

import warnings

import torch


def device_of_rank(local_rank: int) -> torch.device:
    """The CUDA device of that number, counted round where there are fewer, or the CPU without one."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return torch.device("cuda", local_rank % count) if count else torch.device("cpu")


def join_rpc(rank: int, world_size: int, timeout_s: float, threads: int) -> None:
    """Join torch's RPC as `worker{rank}`; waits for the other ranks. Tensors go from device to device."""
    from torch.distributed import rpc

    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=threads, rpc_timeout=timeout_s)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count:
        mine = rank % count
        for other in range(world_size):
            options.set_device_map(f"worker{other}", {mine: other % count})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's RPC uses what torch's collectives advise against
        rpc.init_rpc(  # type: ignore[no-untyped-call]
            f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options
        )
