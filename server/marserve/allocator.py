"""How this process's C library gives memory back: a setting that a server makes at its start and a worker once loaded.

glibc returns every block above a threshold to the system when it is freed, and then pays for fresh zeroed pages, one
fault each 4 KiB, when the next is asked for. Told to keep such blocks, an echo of 1 MB bodies is about twice as quick
(`python benchmarks/run.py --only echo`), and networks on the CPU, which make the same tensors for every batch, gain a
tenth: per second of CPU ResNet-18 41 pictures rather than 36 with glibc's own settings, a small encoder 236 texts
rather than 216. What is larger still goes back at once, and no more than the bound is kept.
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


# A server holds bodies of all sizes, and a large one is not to cost more than itself.
BY_SERVER = Kept(4 * _MIB, 64 * _MIB)
# A worker makes tensors of the same sizes over and over. 32 MiB is glibc's own maximum: a smaller one would keep less
# than glibc, which raises its threshold by itself until somebody sets it. With 64 MiB of them the gain is halved.
BY_WORKER = Kept(32 * _MIB, 256 * _MIB)


def keep_large_blocks(kept: Kept) -> None:
    """Reuse freed blocks as `kept` says. Does nothing where there is no glibc."""
    mallopt = _of_glibc("mallopt")
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, kept.block_bytes)
        mallopt(_M_TRIM_THRESHOLD, kept.free_bytes)


def give_back_free_memory() -> None:
    """Give all free memory to the system: what a template keeps, every worker forked from it has to copy."""
    malloc_trim = _of_glibc("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    """A function of glibc, or None where there is no glibc."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
