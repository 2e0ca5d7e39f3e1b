"""TorchServe's name for tools for DeepSpeed."""

from marserve_handlers.distributed.deepspeed import create_checkpoints_json, get_ds_engine

__all__ = ["create_checkpoints_json", "get_ds_engine"]
