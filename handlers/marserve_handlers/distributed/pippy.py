"""What handlers of PiPPy, PyTorch's former library of pipelines, take from TorchServe.

The ranks and their RPC work. PiPPy's own pipeline driver cannot: PiPPy has become `torch.distributed.pipelining`, and
its last release runs with no torch that marserve runs with.
"""

from __future__ import annotations

import os
from abc import ABC
from typing import Any, NoReturn

from marserve_handlers.base import BaseHandler
from marserve_handlers.errors import ModelNotLoadable

pippy_installed = False
"""Whether pipelines of PiPPy can be built; see above."""


def initialize_rpc_workers(local_rank: int, world_size: int, ctx: Any) -> None:
    """Join torch's RPC as `worker{local_rank}` of `world_size`, as `pippy` of the model's configuration says.

    `rpc_timeout` is in seconds (1800), `num_worker_threads` a number (512). Ranks find each other by `MASTER_ADDR` and
    `MASTER_PORT`, which marserve sets in groups of ranks. Raises ModelNotLoadable outside one.
    """
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        raise ModelNotLoadable(
            "This handler needs a group of ranks: set parallelType: pp and parallelLevel in the model's configuration."
        )
    from marserve_handlers.runtimes.ranks import join_rpc

    settings = _settings(ctx)
    join_rpc(
        local_rank, world_size, float(settings.get("rpc_timeout", 1800)), int(settings.get("num_worker_threads", 512))
    )


def get_pipeline_driver(model: Any, world_size: int, ctx: Any) -> NoReturn:
    """Raises ModelNotLoadable, with what to use instead."""
    raise ModelNotLoadable(
        "PiPPy has become part of torch, and its own driver runs with none of today's: cut the model with "
        "torch.distributed.pipelining (pipeline, ScheduleGPipe) in initialize, with parallelType: pp."
    )


class BasePippyHandler(BaseHandler, ABC):
    """A handler of one rank of a group: knows its rank, its device and the number of ranks, and joins their RPC.

    Subclasses cut and load their model in `initialize`, after `super().initialize(ctx)`.
    """

    def initialize(self, ctx: Any) -> None:
        """Read the ranks from the environment and join their RPC. Loads no model."""
        from marserve_handlers.runtimes.ranks import device_of_rank

        self.context = ctx
        self.manifest = ctx.manifest
        self.model_yaml_config = ctx.model_yaml_config or {}
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        initialize_rpc_workers(self.local_rank, self.world_size, ctx)
        self.device = device_of_rank(self.local_rank)
        self.map_location = self.device.type


def _settings(ctx: Any) -> dict[str, Any]:
    section = (ctx.model_yaml_config or {}).get("pippy")
    return section if isinstance(section, dict) else {}
