"""TorchServe's name for what ran asynchronous handlers."""

from marserve_handlers.support.torchserve.internals import AsyncService, predict

__all__ = ["AsyncService", "predict"]
