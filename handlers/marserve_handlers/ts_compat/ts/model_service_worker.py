"""TorchServe's name for its worker process."""

from marserve_handlers.support.torchserve.internals import (
    BENCHMARK,
    DEBUG,
    LOCAL_RANK,
    LOCAL_WORLD_SIZE,
    MAX_FAILURE_THRESHOLD,
    SOCKET_ACCEPT_TIMEOUT,
    WORLD_RANK,
    WORLD_SIZE,
    TorchModelServiceWorker,
)

__all__ = [
    "BENCHMARK",
    "DEBUG",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MAX_FAILURE_THRESHOLD",
    "SOCKET_ACCEPT_TIMEOUT",
    "WORLD_RANK",
    "WORLD_SIZE",
    "TorchModelServiceWorker",
]
