"""TorchServe's name for `marserve_handlers.micro_batching`."""

from marserve_handlers.micro_batching import HANDLER_METHODS, MicroBatching, WorkerThread, execute_call
from marserve_handlers.support.torchserve.capabilities import PROFILER_AVAILABLE

__all__ = ["HANDLER_METHODS", "PROFILER_AVAILABLE", "MicroBatching", "WorkerThread", "execute_call"]
