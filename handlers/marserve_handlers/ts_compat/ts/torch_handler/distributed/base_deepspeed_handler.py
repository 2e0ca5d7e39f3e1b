"""TorchServe's name for `BaseDeepSpeedHandler`."""

from marserve_handlers.distributed.deepspeed import BaseDeepSpeedHandler

__all__ = ["BaseDeepSpeedHandler"]
