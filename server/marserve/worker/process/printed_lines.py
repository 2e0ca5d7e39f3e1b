"""What a worker prints and logs, on its way to the server: lines with a mark that says what they belong to.

A mark is `␞LEVEL+ IDS␞` with the ASCII character RS for `␞`: the level of a logged line, `+` if the next line belongs
to the same record, and the ids of the requests that the worker works for. Each part may be missing, and a line with
none has no mark. `pool/worker_end/output_lines.py` reads it.

Ids are found when something is printed: a batch that prints nothing costs one assignment. A task's own requests
(`asyncCommunication`) have precedence over those of the process, which threads of the author's see as well. What is
printed past Python's streams, as by C code or a child process, belongs to no request.
"""

from __future__ import annotations

import faulthandler
import io
import logging
import sys
from collections.abc import Sequence
from time import monotonic
from typing import TextIO

from marserve.messages import Named, line_ids
from marserve.worker.process.hindrances import hindrances
from marserve_handlers.support.line_owner import of_this_task

MARK = "\x1e"
_LEVELS = frozenset(("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"))
_TRACEBACK = "Traceback (most recent call last):"
_NONE: tuple[Named, ...] = ()


class Running:
    """The requests that this process works for. There is one for the process: what prints does not know its worker."""

    __slots__ = ("_ids", "_ids_of", "items")

    def __init__(self) -> None:
        self.items: Sequence[Named] = _NONE
        """Set by the worker's loop before it calls the author's code, and to nothing afterwards."""
        self._ids_of: Sequence[Named] = _NONE
        self._ids = ""

    def ids(self) -> str:
        """Their ids, as `messages.line_ids` writes them."""
        items = of_this_task.get()
        if items is None:
            items = self.items
        if not items:
            return ""
        if items is not self._ids_of:
            self._ids, self._ids_of = line_ids(items), items
        return self._ids


running = Running()


class MarkFormatter(logging.Formatter):
    """The message text, as TorchServe's workers print it, after marks."""

    def format(self, record: logging.LogRecord) -> str:
        """One record: a mark before each of its lines, of which all but the last go on."""
        level = record.levelname if record.levelname in _LEVELS else ""
        ids = running.ids()
        tail = f" {ids}{MARK}" if ids else MARK
        *lines, last = super().format(record).split("\n")
        goes_on = f"{MARK}{level}+{tail}"
        return "".join([f"{goes_on}{line}\n" for line in lines]) + f"{MARK}{level}{tail}{last}"


class MarkedStream(io.TextIOWrapper):
    """Standard output or standard error: printed lines get the ids of the running requests.

    A traceback that is printed is one record. A logged line that comes after an incomplete one begins a line of its
    own.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream.buffer, stream.encoding, "backslashreplace", line_buffering=True)
        self._replaced = stream  # its end would close the buffer, which both share
        self._is_at_begin = True
        self._is_in_traceback = False

    def write(self, text: str) -> int:
        """Write text, with a mark before each line that begins in it; returns the length of `text`.

        Blocks while the server reads slowly; that time is counted.
        """
        began = monotonic()
        try:
            return self._write(text)
        finally:
            hindrances.printed_s += monotonic() - began

    def _write(self, text: str) -> int:
        if not text or not isinstance(text, str):
            return super().write(text)
        if text.startswith(MARK):
            super().write(text if self._is_at_begin else "\n" + text)
            self._is_at_begin = text.endswith("\n")
            return len(text)
        ids = running.ids()
        if ids and not self._is_in_traceback and _TRACEBACK not in text:
            # A worker may print a million lines: no line is looked at by itself.
            mark = f"{MARK} {ids}{MARK}"
            first = mark if self._is_at_begin else ""
            self._is_at_begin = text.endswith("\n")
            end = "\n" if self._is_at_begin else ""
            super().write(first + text.removesuffix(end).replace("\n", f"\n{mark}") + end)
        elif ids or self._is_in_traceback or (self._is_at_begin and text.startswith(_TRACEBACK)):
            lines = text.split("\n")
            for index, line in enumerate(lines):
                if self._is_at_begin and (line or index < len(lines) - 1):
                    lines[index] = self._mark(line, ids) + line
                    self._is_at_begin = False
                if index < len(lines) - 1:
                    self._is_at_begin = True
            super().write("\n".join(lines))
        else:
            super().write(text)
            self._is_at_begin = text.endswith("\n")
        return len(text)

    def _mark(self, line: str, ids: str) -> str:
        if line.startswith(_TRACEBACK):
            self._is_in_traceback = True
        elif self._is_in_traceback and not line.startswith(" "):  # the exception, which ends it
            self._is_in_traceback = False
        goes_on = "+" if self._is_in_traceback else ""
        if not goes_on and not ids:
            return MARK * 2
        return f"{MARK}{goes_on} {ids}{MARK}" if ids else f"{MARK}{goes_on}{MARK}"


def configure_output() -> None:
    """Logging at INFO to standard output, and both streams written line by line: the server reads them as they come."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:
            stream.flush()
            marked = MarkedStream(stream)
            setattr(sys, name, marked)
            setattr(sys, f"__{name}__", marked)
        elif (reconfigure := getattr(stream, "reconfigure", None)) is not None:
            reconfigure(line_buffering=True, errors="backslashreplace")
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(MarkFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)
    if sys.stderr is not None:
        faulthandler.enable()  # a crash in C code prints where it was in Python, and describe shows that line


def set_level(level: str) -> None:
    """Log from this level on; the level of a logger that the author's code has set stays."""
    logging.getLogger().setLevel(level)
