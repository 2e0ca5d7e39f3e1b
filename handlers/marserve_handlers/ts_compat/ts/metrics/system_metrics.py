"""TorchServe's name for figures of the machine."""

from marserve_handlers.support.torchserve.internals import (
    collect_all,
    collect_gpu_metrics,
    cpu_utilization,
    disk_available,
    disk_used,
    disk_utilization,
    memory_available,
    memory_used,
    memory_utilization,
    system_metrics,
)
from marserve_handlers.support.torchserve.metrics_store import HOST_DIMENSION as dimension

__all__ = [
    "collect_all",
    "collect_gpu_metrics",
    "cpu_utilization",
    "dimension",
    "disk_available",
    "disk_used",
    "disk_utilization",
    "memory_available",
    "memory_used",
    "memory_utilization",
    "system_metrics",
]
