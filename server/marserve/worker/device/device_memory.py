"""What a worker knows of its accelerator's memory: how much its runtime took, how to give back what is not in use.

By torch alone, and only where the author's code has imported it and it uses a device.
"""

from __future__ import annotations

import gc
import logging
import sys
from typing import Any

from marserve.allocator import give_back_free_memory

log = logging.getLogger("marserve.worker")


def taken_bytes() -> int:
    """The most that torch had reserved of one device so far, in bytes; 0 where it uses none."""
    most = 0
    for runtime in runtimes():
        try:
            most = max([most, *(runtime.max_memory_reserved(device) for device in range(runtime.device_count()))])
        except Exception as error:  # a driver's; the model is loaded all the same
            log.info("how much of a device is taken cannot be read: %s", error)
    return most


def give_back() -> None:
    """Give memory back that nothing refers to: what a failed batch left, and what torch's allocators keep for later."""
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
