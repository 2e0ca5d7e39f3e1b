"""Whether torch can use the device that a worker was given, and if not, why and what fits.

A worker with a device that computes on the processor all the same is slower by orders of magnitude, and nothing else
shows it: torch only warns when the driver is too old for it, and handlers that ask `is_available()` fall back.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from marserve_handlers.support.devices.device_errors import is_out_of_memory
from marserve_handlers.support.devices.driver import OLDEST_DRIVERS, describe_driver, driver_cuda
from marserve_handlers.support.shown import first_line


def why_unusable(gpu_id: int, device: Any = None) -> str:
    """Why torch cannot compute on device `gpu_id`, in sentences for an operator; empty where it can.

    With `device`, torch's own name of it, a kernel is run there; without, it is only counted. Raises what the kernel
    raises where memory ran out.
    """
    if torch.backends.mps.is_available():
        return ""
    reason = ""
    kind = "xpu" if torch.xpu.is_available() else "cuda"
    runtime: Any = getattr(torch, kind)
    if not torch.version.cuda and not torch.version.hip and kind == "cuda":
        reason = "it is a build for processors alone"
    elif not runtime.is_available():
        reason = _words_of_init()
    elif gpu_id >= runtime.device_count():
        reason = f"it finds {runtime.device_count()} of them"
    elif device is not None:
        try:
            torch.ones(1, device=device).add_(1).item()
        except Exception as error:
            if is_out_of_memory(error):
                raise
            reason = first_line(error).rstrip(".")
    if not reason:
        return ""
    whose = f"The worker was given device {gpu_id}, which torch {torch.__version__} cannot use"
    return f"{whose}: {reason.rstrip('.')}. {_what_fits()}"


def _words_of_init() -> str:
    """What torch says when it is to begin CUDA and cannot."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except Exception as error:
            return first_line(error).rstrip(".")
    return "it finds none"


def _what_fits() -> str:
    built = torch.version.cuda
    if torch.version.hip:
        return f"It is built for ROCm {torch.version.hip}. With deviceType: cpu the model needs no device."
    most, about = driver_cuda(), describe_driver().capitalize().replace("cuda", "CUDA")
    if not built:
        fits = f"install a build of torch for CUDA{f' {most} or earlier' if most else ''}"
    else:
        oldest = OLDEST_DRIVERS.get(int(built.partition(".")[0]))
        fits = f"torch is built for CUDA {built}, which needs driver {oldest} or later" if oldest else f"CUDA {built}"
        if most and _major(most) < _major(built):
            fits += f"; or install a torch that is built for CUDA {most} or earlier"
    return f"{about}: {fits}. With deviceType: cpu the model needs no device."


def _major(version: str) -> int:
    return int(version.partition(".")[0])
