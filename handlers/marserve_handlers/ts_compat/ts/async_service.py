"""TorchServe's name for what ran asynchronous handlers."""

from marserve_handlers.torchserve_internals import AsyncService, predict

__all__ = ["AsyncService", "predict"]
