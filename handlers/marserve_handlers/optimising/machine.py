"""What a build's speed and numbers depend on: the processor's instructions, and the versions of libraries."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# Instructions for which libraries choose other kernels.
FLAGS = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "avx_vnni",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
    "i8mm",
)
PACKAGES = ("torch", "onnxruntime", "openvino")


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Those of FLAGS that this processor has, in their order, and its kind first: `x86_64`, `aarch64`."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return [platform.machine()]
    lines = [
        line.partition(":")[2].split() for line in text.splitlines() if line.lower().startswith(("flags", "features"))
    ]
    found = set(lines[0]) if lines else set()
    return [platform.machine(), *(flag for flag in FLAGS if flag in found)]


def versions() -> dict[str, str]:
    """Python's version, and those of PACKAGES that are installed; no package is imported."""
    found = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
