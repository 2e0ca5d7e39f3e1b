"""Why a worker ended, from its exit status and other evidence. Pure.

The names are the label of `marserve_worker_deaths_total`, the header `x-marserve-cause` and the word in describe.
What the server knew before the process ended comes first (it ended the worker itself, or the worker said why it could
not load); then the kernel's count of kills for memory; then the worker's last lines; then the bare exit status.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from marserve.errors import MarserveError, OutOfMemory, WorkerDied
from marserve.messages import NotLoaded


class Cause(StrEnum):
    """Classes of cause."""

    KILLED = "killed"
    SIGNAL = "signal"
    EXIT = "exit"
    OUT_OF_MEMORY = "out_of_memory"
    DEVICE_LOST = "device_lost"
    RESPONSE_TIMEOUT = "response_timeout"
    STARTUP_TIMEOUT = "startup_timeout"
    IMPORT_ERROR = "import_error"
    MISSING_MODULE = "missing_module"
    MISSING_FILE = "missing_file"
    LOAD_FAILED = "load_failed"
    FORK_REFUSED = "fork_refused"
    BAD_FRAME = "bad_frame"
    OUT_OF_STEP = "out_of_step"
    NODE_LOST = "node_lost"
    NODE_UNFIT = "node_unfit"
    STOPPED = "stopped"


# Causes that lie with a node and not with the model: another node may do.
OF_NODES = frozenset({Cause.NODE_LOST, Cause.NODE_UNFIT})


def read_cause(name: str) -> Cause:
    """The cause of that name, sent by another machine; `LOAD_FAILED` for names that this version does not know."""
    try:
        return Cause(name)
    except ValueError:
        return Cause.LOAD_FAILED


@dataclass(frozen=True, slots=True)
class Death:
    """One end of a worker: the class of cause, and a sentence with what is known.

    `exit_code` is the process's own exit status, None if it did not exit by itself.
    """

    cause: Cause
    detail: str
    exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known beside the exit status.

    `last_lines` are the last that the worker printed to standard error, with the stack that Python prints of a crash
    and what stands before it. `was_killed_for_memory`: the kernel counted a kill for want of memory at that time.
    `memory_limit_bytes` is the worker's own limit, 0 for none.
    """

    last_lines: Sequence[str] = ()
    was_killed_for_memory: bool = False
    memory_limit_bytes: int = 0


_NO_EVIDENCE = Evidence()
# What allocators write last when they get no more memory.
_LAST_OF_PYTHON = 20
_MEMORY_WORDS = ("std::bad_alloc", "terminate called after throwing an instance of 'std::bad_array_new_length'")
# What C++ prints when an error of CUDA or HIP ends the process.
_LOST_WORDS = re.compile(
    r"^\s*what\(\):.*\b(?:CUDA|HIP)\b.*(?:device-side assert triggered|illegal memory access was encountered"
    r"|illegal instruction was encountered|misaligned address|unspecified launch failure|hardware stack error"
    r"|launch timed out and was terminated|uncorrectable \w+ error)"
)


def classify_exit(status: int | None, *, known: Death | None = None, evidence: Evidence = _NO_EVIDENCE) -> Death:
    """The death behind a wait status (as from `os.waitpid`; None if it could not be had).

    `known` is what the server knew before the process ended (a time-out, a refused load); it wins.
    """
    if known is not None:
        return known
    if status is None:
        if evidence.was_killed_for_memory:
            return _killed_for_memory(evidence)
        return Death(Cause.KILLED, "the worker is gone; its exit status could not be read")
    if os.WIFSIGNALED(status):
        return _ended_by_signal(os.WTERMSIG(status), evidence)
    code = os.WEXITSTATUS(status)
    if code and ran_out_of_memory(evidence.last_lines):
        return Death(
            Cause.OUT_OF_MEMORY,
            f"memory ran out{_limit(evidence)}, and the process ended with exit status {code}",
            code,
        )
    return Death(Cause.EXIT, f"the worker's process ended by itself with exit status {code}", code)


def ran_out_of_memory(last_lines: Sequence[str]) -> bool:
    """Whether a process's last lines are those of an allocation that failed.

    A MemoryError of Python's is looked for in the very last ones: an earlier one may have been caught.
    """
    return any(line.startswith("MemoryError") for line in last_lines[-_LAST_OF_PYTHON:]) or any(
        words in line for line in last_lines for words in _MEMORY_WORDS
    )


def death_of_load(failure: NotLoaded) -> Death:
    """The death of a worker, or a template, that said why it could not load the model."""
    try:
        cause = Cause(failure.kind)
    except ValueError:  # the worker is newer than the server, or lies
        cause = Cause.LOAD_FAILED
    return Death(cause, failure.message)


def error_of(death: Death) -> MarserveError:
    """The error for the clients whose requests the worker ran when it ended."""
    if death.cause is Cause.OUT_OF_MEMORY:
        return OutOfMemory("Worker died.")
    return WorkerDied(death.cause.value)


def _ended_by_signal(number: int, evidence: Evidence) -> Death:
    if number == signal.SIGKILL:
        if evidence.was_killed_for_memory:
            return _killed_for_memory(evidence)
        return Death(Cause.KILLED, "killed by SIGKILL: by hand, by an orchestrator, or by the kernel for memory")
    if ran_out_of_memory(evidence.last_lines):
        name = _signal_name(number)
        return Death(Cause.OUT_OF_MEMORY, f"memory ran out{_limit(evidence)}, and the process ended by {name}")
    if any(_LOST_WORDS.search(line) for line in evidence.last_lines):
        name = _signal_name(number)
        return Death(Cause.DEVICE_LOST, f"the device is lost to the worker, and the process ended by {name}")
    return Death(Cause.SIGNAL, f"ended by signal {number} ({_signal_name(number)})")


def _killed_for_memory(evidence: Evidence) -> Death:
    return Death(Cause.OUT_OF_MEMORY, f"killed by the kernel, which had no more memory to give{_limit(evidence)}")


def _limit(evidence: Evidence) -> str:
    if not evidence.memory_limit_bytes:
        return ""
    return f" (maxWorkerMemory is {evidence.memory_limit_bytes} bytes)"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
