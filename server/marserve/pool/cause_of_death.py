"""Why a worker ended, from its exit status and what is known beside it. Pure.

The names are the label of `marserve_worker_deaths_total`, the header `x-marserve-cause` and the word in describe.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from enum import StrEnum

from marserve.errors import MarserveError, OutOfMemory, WorkerDied


class Cause(StrEnum):
    """Classes of cause."""

    KILLED = "killed"
    SIGNAL = "signal"
    EXIT = "exit"
    OUT_OF_MEMORY = "out_of_memory"
    RESPONSE_TIMEOUT = "response_timeout"
    STARTUP_TIMEOUT = "startup_timeout"
    MISSING_MODULE = "missing_module"
    MISSING_FILE = "missing_file"
    LOAD_FAILED = "load_failed"
    FORK_REFUSED = "fork_refused"
    BAD_FRAME = "bad_frame"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Death:
    """One end of a worker: the class of cause, and a sentence with what is known."""

    cause: Cause
    detail: str


def classify_exit(status: int | None, *, known: Death | None = None) -> Death:
    """The death behind a wait status (as from `os.waitpid`; None if it could not be had).

    `known` is what the server knew before the process ended (a time-out, a refused load); it wins.
    """
    if known is not None:
        return known
    if status is None:
        return Death(Cause.KILLED, "the worker is gone; its exit status could not be read")
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGKILL:
            return Death(Cause.KILLED, "killed by SIGKILL: by hand, by an orchestrator, or by the kernel for memory")
        return Death(Cause.SIGNAL, f"ended by signal {number} ({_signal_name(number)})")
    code = os.WEXITSTATUS(status)
    return Death(Cause.EXIT, f"the worker's process ended by itself with exit status {code}")


def error_of(death: Death) -> MarserveError:
    """What a client is told whose request the worker took with it."""
    if death.cause is Cause.OUT_OF_MEMORY:
        return OutOfMemory("Worker died.")
    return WorkerDied(death.cause.value)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
