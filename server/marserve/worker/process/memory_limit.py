"""Bounds what a worker can allocate, so that too much becomes a MemoryError in a living worker.

`RLIMIT_DATA` counts private writable memory, whether it was touched or not. Memory that the process holds when the
limit is set (the interpreter; in a forked worker the model that its template loaded) is not counted.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def limit_memory(limit_bytes: int, *, is_template: bool = False) -> None:
    """Let this process allocate `limit_bytes` more than it holds now; 0 for no limit. Linux only.

    A template's limit can be set again in the workers that are forked from it; a worker's own cannot be raised.
    """
    if not limit_bytes or sys.platform != "linux":
        return
    soft = data_bytes() + limit_bytes
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard if is_template else soft))


def data_bytes(status: Path = Path("/proc/self/status")) -> int:
    """Private writable memory of this process, as the kernel counts it for the limit."""
    for line in status.read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return 0
