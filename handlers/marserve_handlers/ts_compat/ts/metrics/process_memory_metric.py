"""TorchServe's name for figures of its processes."""

from marserve_handlers.support.torchserve.internals import check_process_mem_usage, get_cpu_usage

__all__ = ["check_process_mem_usage", "get_cpu_usage"]
