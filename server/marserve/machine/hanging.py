"""Finds the call that a thread hangs in, and its file: for calls that a file system never answers.

A system call cannot be taken back. What can be read is the thread's clock: a thread that uses no processor time waits.
Its Python frames name the call, and are only read once the thread has waited for long.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path
from types import FrameType

# Frames of the caller among which a file is looked for.
FRAMES = 8
_STATUS = "/proc/self/status"
# Where Python has called uvloop's loop, and where asyncio's own waits.
_WAITS = {("runners.py", "run"), ("selectors.py", "select")}


class Stillness:
    """Since when each of some threads has used no processor time. Called again and again; `now` is in seconds.

    It knows nothing about threads on systems that do not report a thread's time (others than Linux).
    """

    def __init__(self) -> None:
        self._since: dict[int, tuple[float, float]] = {}

    def look(self, threads: Iterable[int], now: float) -> dict[int, float]:
        """For each of these threads that is there: how long it has stood still."""
        by_system = {each.ident: each.native_id for each in threading.enumerate()}
        # After a fork Python has the old process's id for it.
        by_system[threading.main_thread().ident] = os.getpid()
        since: dict[int, tuple[float, float]] = {}
        for thread in threads:
            used = _processor_s(by_system.get(thread))
            if used is None:
                continue
            known = self._since.get(thread)
            since[thread] = known if known is not None and known[0] == used else (used, now)
        self._since = since
        return {thread: now - began for thread, (_, began) in since.items()}


def describe_call(thread: int) -> str:
    """A thread's call: `FUNCTION of FILE`, or its place in the code if no file is known."""
    frame = _frame_of(thread)
    if frame is None:
        return "a call"
    path = _file_of(frame)
    if path is None:
        return f"{frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno})"
    return f"{frame.f_code.co_name} of {path}"


def is_waiting_for_events(thread: int) -> bool:
    """Whether a thread waits in an event loop for the next event."""
    frame = _frame_of(thread)
    if frame is None:
        return False
    return (os.path.basename(frame.f_code.co_filename), frame.f_code.co_name) in _WAITS


def _processor_s(thread: int | None) -> float | None:
    """The processor time that a thread, by the system's number, has taken; None for one that has ended."""
    if thread is None or sys.platform != "linux":
        return None
    try:
        return time.clock_gettime(~thread << 3 | 6)  # Linux: the clock of one thread
    except OSError:
        return None


def _frame_of(thread: int) -> FrameType | None:
    """The innermost frame of this thread.

    One call in C from the frames of all threads to that of one. If Python held them in between, another thread could
    return from its functions meanwhile, and what their variables held would be freed in this thread: handles of the
    event loop and of gRPC break by that.
    """
    try:
        frame: FrameType = next(map(itemgetter(thread), iter(sys._current_frames, None)))
    except KeyError:
        return None
    return frame


def _file_of(frame: FrameType | None) -> str | None:
    """The first path among the arguments and variables of the innermost frames."""
    for _ in range(FRAMES):
        if frame is None:
            return None
        for value in frame.f_locals.values():
            if isinstance(value, Path) or (isinstance(value, str) and value.startswith("/")):
                return str(value)
        frame = frame.f_back
    return None


def pending_signals() -> set[int]:
    """The signals that wait for the main thread, which is in a call that the system does not interrupt.

    Empty on systems without Linux's `/proc`.
    """
    try:
        with open(_STATUS, "rb") as file:
            lines = dict(line.split(b":", 1) for line in file if line.startswith((b"SigPnd:", b"ShdPnd:")))
        bits = 0
        for value in lines.values():
            bits |= int(value, 16)
    except (OSError, ValueError):
        return set()
    return {number for number in (signal.SIGINT, signal.SIGTERM) if bits >> (number - 1) & 1}
