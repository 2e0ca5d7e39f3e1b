"""The processors and threads of a worker or a template, and how it ends."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

log = logging.getLogger("marserve.worker")


def stay_on(cpus: Sequence[int]) -> None:
    """Keep this process, and all that it starts from now on, to these processors; empty for no restriction.

    Processors that were taken away meanwhile are left out; if all were, nothing changes.
    """
    if not cpus or not hasattr(os, "sched_setaffinity"):
        return
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        log.warning("the worker does not stay on the processors near its device: %s", error)


def use_threads(threads: int) -> None:
    """Let the numeric libraries use `threads` threads (0: all cores that this process may use)."""
    if not threads:
        threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)


def use_inter_threads(threads: int) -> None:
    """Let torch, if it is imported, run operators side by side on `threads` threads, 0 for its own choice.

    It takes that once, and only before it has done so: what the author's code has set, or begun, stays.
    """
    torch = sys.modules.get("torch")
    if threads and torch is not None and torch.get_num_interop_threads() != threads:
        with contextlib.suppress(RuntimeError):
            torch.set_num_interop_threads(threads)


def exit_status(error: SystemExit) -> int:
    """The status of `sys.exit`: None is 0, anything but a number is 1."""
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def leave(status: int) -> NoReturn:
    """End the process at once, output flushed: no thread or exit hook of the author's code may keep it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):  # the author's code may have closed or replaced it
            stream.flush()
    os._exit(status)
