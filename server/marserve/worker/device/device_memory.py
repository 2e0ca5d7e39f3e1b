"""The memory of a worker's accelerator: how much the runtime has taken, and giving back what is not in use.

By torch alone, and only if the author's code has imported torch and uses a device with it.
"""

from __future__ import annotations

import gc
import logging
import sys
from typing import Any

from marserve.allocator import give_back_free_memory

log = logging.getLogger("marserve.worker")


def taken_bytes() -> int:
    """The most that torch has reserved of one device so far, in bytes; 0 if it uses none."""
    most = 0
    for runtime in runtimes():
        try:
            most = max([most, *(runtime.max_memory_reserved(device) for device in range(runtime.device_count()))])
        except Exception as error:  # a driver's; the model is loaded all the same
            log.info("how much of a device is taken cannot be read: %s", error)
    return most


def give_back() -> None:
    """Give memory back that nothing refers to: objects of a failed batch, and what torch's allocators keep."""
    gc.collect()
    for runtime in runtimes():
        try:
            runtime.empty_cache()
        except Exception as error:  # the device is lost: `device_loss` says so
            log.warning("the memory of a device cannot be given back: %s", error)
    give_back_free_memory()


def runtimes() -> list[Any]:
    """Torch's modules for devices that this process has begun to use."""
    torch = sys.modules.get("torch")
    modules = [getattr(torch, name, None) for name in ("cuda", "xpu")] if torch is not None else []
    return [module for module in modules if module is not None and module.is_initialized()]
