"""How this process's C library gives memory back: one setting, made once, at the start of a process.

glibc returns every block above 128 KiB to the system when it is freed, and then pays for fresh zeroed pages, one fault
each 4 KiB, when the next is asked for. With bodies of a megabyte that costs more than all the rest of a request: told
to keep such blocks, an echo of 1 MB bodies is about twice as quick (`python benchmarks/run.py --only echo`). What is
larger still goes back at once, and no more than `KEEP_FREE_BYTES` is kept.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
KEEP_BLOCKS_BYTES = 4 * 1024 * 1024
KEEP_FREE_BYTES = 64 * 1024 * 1024


def keep_large_blocks() -> None:
    """Reuse freed blocks of up to 4 MiB, and keep up to 64 MiB of free memory. Does nothing where there is no glibc."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, KEEP_BLOCKS_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEEP_FREE_BYTES)
