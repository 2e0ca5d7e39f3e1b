"""How this process's C library gives memory back: set by a server at its start, and by a worker after its load.

glibc returns every block above a threshold to the system when it is freed, and pays for fresh zeroed pages, one fault
each 4 KiB, at the next allocation. If such blocks are kept instead, an echo of 1 MB bodies is about twice as fast
(`python benchmarks/run.py --only echo`). Networks on the CPU, which make the same tensors for every batch, gain a
tenth: per second of CPU ResNet-18 41 pictures rather than 36 with glibc's own settings, a small encoder 236 texts
rather than 216. Still larger blocks are returned at once, and the kept memory is bounded.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import NamedTuple

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
_MIB = 1024 * 1024


class Kept(NamedTuple):
    """What a process keeps: freed blocks of up to `block_bytes`, and no more than `free_bytes` of them."""

    block_bytes: int
    free_bytes: int


# A server holds bodies of all sizes; after a large one its memory should go back.
BY_SERVER = Kept(4 * _MIB, 64 * _MIB)
# A worker makes tensors of the same sizes over and over. 32 MiB is the maximum to which glibc raises its threshold by
# itself, as long as the threshold is not set; less would keep fewer blocks than that. With 64 MiB in all instead of 256
# the gain is halved.
BY_WORKER = Kept(32 * _MIB, 256 * _MIB)


def keep_large_blocks(kept: Kept) -> None:
    """Reuse freed blocks as `kept` says. Does nothing without glibc."""
    mallopt = _of_glibc("mallopt")
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, kept.block_bytes)
        mallopt(_M_TRIM_THRESHOLD, kept.free_bytes)


def give_back_free_memory() -> None:
    """Give all free memory to the system, since every worker forked from a template has to copy what it keeps."""
    malloc_trim = _of_glibc("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    """A function of glibc; None without glibc."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
