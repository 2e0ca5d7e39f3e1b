"""Notes which lines of one file run: one line of text each, in a file, the first time since it was last emptied.

It is loaded by whatever process finds it: the tests' own, and every interpreter that a test starts, where it lies in
the copy as `sitecustomize`. What is noted is there at once, so that a process may be killed afterwards.
"""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType
from typing import Any

TARGET = os.environ.get("MARSERVE_MUTANTS_TRACED", "")
NOTES = os.environ.get("MARSERVE_MUTANTS_NOTES", "")

# What a process notes first that a test has started.
STARTED = 0

_seen: set[int] = set()
_notes = -1


def begin() -> None:
    """Note what runs in this process from now on."""
    global _notes
    _notes = os.open(NOTES, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    threading.settrace(_on_call)
    sys.settrace(_on_call)


def begin_again() -> None:
    """Note what was noted once more: the notes were read, and another test begins."""
    _seen.clear()
    sys.settrace(_on_call)


def _on_call(frame: FrameType, event: str, arg: object) -> Any:
    return _on_line if frame.f_code.co_filename == TARGET else None


def _on_line(frame: FrameType, event: str, arg: object) -> Any:
    number = frame.f_lineno
    if number not in _seen:
        _seen.add(number)
        try:
            os.write(_notes, b"%d\n" % number)
        except OSError:  # someone closed every descriptor
            sys.settrace(None)
    return _on_line


if TARGET and NOTES and __name__ == "sitecustomize":
    begin()
    os.write(_notes, b"%d\n" % STARTED)
