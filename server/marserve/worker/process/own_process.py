"""What a worker or a template sets for its own process, and how it ends."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

# Marks the level of a log line on its way to the server; see `pool/worker_end/output.py`.
LEVEL_MARK = "\x1e"

log = logging.getLogger("marserve.worker")


class LevelFormatter(logging.Formatter):
    """The message text, as TorchServe's workers print it, after a mark that carries the level to the server."""

    def format(self, record: logging.LogRecord) -> str:
        """One record; every line of it has the mark."""
        mark = f"{LEVEL_MARK}{record.levelname}{LEVEL_MARK}"
        return mark + super().format(record).replace("\n", "\n" + mark)


def configure_output() -> None:
    """Logging at INFO to standard output, and both streams written line by line: the server reads them as they come."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure: Callable[..., None] | None = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(line_buffering=True, errors="backslashreplace")
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(LevelFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)
    if sys.stderr is not None:
        faulthandler.enable()  # a crash in C code prints where it was in Python, and describe shows that line


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
