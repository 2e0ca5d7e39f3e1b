"""The kernel's locks on files (`flock`). They end with their process, however it ends, so a crash leaves none.

A lock belongs to an open file, and a process that inherits the descriptor has it too. The file's name may be deleted or
given to another file before the lock is taken: the lock is then useless, and `is_at` returns False.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

LOOK_S: Final = 0.02


class LockHeld(OSError):
    """Another process keeps the lock; `strerror` says for how long it was waited for."""


def lock(descriptor: int, *, is_shared: bool = False) -> None:
    """Lock an open file, or exchange its lock; waits. Raises OSError if files cannot be locked."""
    fcntl.flock(descriptor, fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX)


def try_lock(descriptor: int, *, is_shared: bool = False) -> bool:
    """Lock an open file; False while another process excludes that. Raises OSError if files cannot be locked.

    A lock that the file has already is exchanged; if that fails, it may be lost.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_at(path: Path, descriptor: int) -> bool:
    """Whether a path names this open file. Raises OSError."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def open_locked(path: Path, *, is_shared: bool = False) -> int | None:
    """A locked descriptor of a lock file, which is made if missing; None while others exclude that. Raises OSError.

    Also None if its name was deleted before the lock was taken; the caller tries again.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if try_lock(descriptor, is_shared=is_shared) and is_at(path, descriptor):
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


@contextmanager
def locked(path: Path, *, within_s: float) -> Iterator[None]:
    """Hold the lock of a folder, or of a file, which is made if missing. Blocks. Raises LockHeld, OSError.

    Holders keep it for moments, but a stopped process (SIGSTOP, a frozen container) keeps it for good.
    """
    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        until = time.monotonic() + within_s
        while not try_lock(descriptor):
            if time.monotonic() >= until:
                why = f"its lock has been held for {within_s:g} s by another process, which may be stopped"
                raise LockHeld(errno.ETIMEDOUT, why, str(path))
            time.sleep(LOOK_S)
        yield
    finally:
        os.close(descriptor)
