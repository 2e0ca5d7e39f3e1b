"""TorchServe's name for `marserve_handlers.micro_batching`."""

from marserve_handlers.capabilities import PROFILER_AVAILABLE
from marserve_handlers.micro_batching import HANDLER_METHODS, MicroBatching, WorkerThread, execute_call

__all__ = ["HANDLER_METHODS", "PROFILER_AVAILABLE", "MicroBatching", "WorkerThread", "execute_call"]
