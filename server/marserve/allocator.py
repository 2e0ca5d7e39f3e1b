"""How this process's C library gives memory back: a setting that a server makes at its start and a worker once loaded.

glibc returns every block above 128 KiB to the system when it is freed, and then pays for fresh zeroed pages, one fault
each 4 KiB, when the next is asked for. With bodies of a megabyte that costs more than all the rest of a request: told
to keep such blocks, an echo of 1 MB bodies is about twice as quick (`python benchmarks/run.py --only echo`). What is
larger still goes back at once, and no more than `KEEP_FREE_BYTES` is kept.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
KEEP_BLOCKS_BYTES = 4 * 1024 * 1024
KEEP_FREE_BYTES = 64 * 1024 * 1024


def keep_large_blocks() -> None:
    """Reuse freed blocks of up to 4 MiB, and keep up to 64 MiB of free memory. Does nothing where there is no glibc."""
    mallopt = _of_glibc("mallopt")
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, KEEP_BLOCKS_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEEP_FREE_BYTES)


def give_back_free_memory() -> None:
    """Give all free memory to the system: what a template keeps, every worker forked from it has to copy."""
    malloc_trim = _of_glibc("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    """A function of glibc, or None where there is no glibc."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
