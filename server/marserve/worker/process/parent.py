"""Ties a process's life to its parent's: no process that marserve starts outlives the server, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

from marserve.lineage import VARIABLE, end_families

_PR_SET_PDEATHSIG = 1
# A process's files are closed a moment before it has ended; this is the wait for the end.
_END_TIMEOUT_S = 1.0


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; end at once if it has already.

    `parent` is the parent's process id as its creator knew it. Linux only: elsewhere the end of the wire must do.
    """
    _have_signal_at_parents_end(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def wake_at_parents_end(parent: int) -> None:
    """Undo `die_with_parent`: this process is woken by its parent's end, even if it was stopped, and goes on."""
    _have_signal_at_parents_end(signal.SIGCONT)
    if os.getppid() != parent:
        os._exit(0)


def end_the_parents_family(parent: int) -> None:
    """If the parent has ended, kill all processes that it and its children had started, and wait for their end.

    `parent` is as for `die_with_parent`. Does nothing while the parent lives.
    """
    limit = time.monotonic() + _END_TIMEOUT_S
    while os.getppid() == parent:
        if time.monotonic() > limit:
            return
        time.sleep(0.005)
    lineage = os.environ.get(VARIABLE, "").split("/")[0]
    if lineage:
        end_families({lineage: 0})


def _have_signal_at_parents_end(number: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
