"""Ends a command that has made files, or has processes, by an exception where a signal would end it at once."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def tidied() -> Iterator[None]:
    """SIGTERM leaves the block as Ctrl-C does, so that what its contexts delete and end is deleted and ended."""
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, frame: FrameType | None) -> None:
    """Raise the end of the process, with the status of a command that this signal ended."""
    sys.exit(128 + number)
