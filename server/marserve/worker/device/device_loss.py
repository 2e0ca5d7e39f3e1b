"""Whether a worker's device still answers its process: after some errors of CUDA and HIP every later call fails too.

Called only after a batch with a failed item. Torch is asked if the author's code uses a device by it; the process has
one context on a device, so torch's answer holds for other runtimes as well. Without torch (ONNX Runtime, CTranslate2,
CuPy) only the words of the errors tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from marserve.worker.device.device_memory import runtimes
from marserve.worker.outgoing import MAX_NAME, cut, words_of
from marserve_handlers.support.devices.device_errors import is_out_of_memory

MAX_DETAIL = 1000
# A word in an error that asking may raise while a graph is captured on a device that is well.
_CAPTURE = "captur"


def find_loss(words: Iterable[str], gpu_id: int | None, *, wait: bool) -> str:
    """A sentence about a device that this process has lost; empty if it has lost none.

    `words` are the runtimes' words in the errors of the batch (`words_of_loss`). `gpu_id` is the worker's own device,
    None without one. With `wait` this waits for the device's work, so that an error of a running kernel is seen, too; a
    worker that runs other batches meanwhile does not wait.
    """
    was_asked = False
    for runtime, device in _devices(gpu_id):
        was_asked = True
        error = _ask(runtime, device, wait)
        if error is not None and not _passes(error):
            first = next(iter(words_of(error).splitlines()), "")
            return f"device {device} is lost to the worker: {type(error).__name__[:MAX_NAME]}: {cut(first, MAX_DETAIL)}"
    said = next(filter(None, words), "")
    return f"the device is lost to the worker: {cut(said, MAX_DETAIL)}" if said and not was_asked else ""


def _devices(gpu_id: int | None) -> Iterator[tuple[Any, int]]:
    """The devices to ask: the worker's own, and those that torch holds memory on. No context is begun on others."""
    for runtime in runtimes():
        for device in range(runtime.device_count()):
            if device == gpu_id or _is_held(runtime, device):
                yield runtime, device


def _is_held(runtime: Any, device: int) -> bool:
    try:
        return bool(runtime.memory_reserved(device))
    except Exception:  # another version of torch, or its figures are gone with the device
        return False


def _ask(runtime: Any, device: int, wait: bool) -> Exception | None:
    """The error with which a device answers; None if it is well."""
    try:
        if wait:
            runtime.synchronize(device)
        else:
            runtime.current_stream(device).query()
    except Exception as error:
        return error
    return None


def _passes(error: Exception) -> bool:
    return is_out_of_memory(error) or _CAPTURE in words_of(error).lower()
