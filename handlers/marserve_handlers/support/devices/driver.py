"""What can be said of NVIDIA's driver without a device: its version, and which CUDA it runs. Knows no torch."""

from __future__ import annotations

import contextlib
import ctypes
import re
from pathlib import Path

# The oldest driver that runs programs of each major version of CUDA (NVIDIA's table of minor version compatibility).
OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}
_FILE = Path("/proc/driver/nvidia/version")


def driver_version(file: Path = _FILE) -> str:
    """The version of the kernel's driver (`580.65.06`); empty without a driver."""
    try:
        said = file.read_text(errors="replace")
    except OSError:
        return ""
    found = re.search(r"\b(\d{3,}(?:\.\d+){1,2})\b", said)
    return found.group(1) if found else ""


def driver_cuda() -> str:
    """The latest version of CUDA that the driver runs (`12.2`); empty where its library cannot be asked."""
    number = ctypes.c_int(0)
    with contextlib.suppress(OSError, AttributeError):
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)) == 0 and number.value:
            return f"{number.value // 1000}.{number.value % 1000 // 10}"
    return ""


def describe_driver() -> str:
    """Both in words, for a sentence about what does not fit."""
    version, most = driver_version(), driver_cuda()
    return f"the driver is {version or 'not to be seen'}" + (f", for CUDA {most} at most" if most else "")
