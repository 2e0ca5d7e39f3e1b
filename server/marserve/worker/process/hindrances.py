"""What keeps a worker from its work: garbage collections, other processes on the processor, its own printing.

Sums since the process began to count, from which a batch takes the difference. A collection and a printed line cost
two looks at the clock. What the kernel says of waiting costs two microseconds, so before a batch it is asked again only
if that was some time ago, and after it only if it took long. Of a worker with several threads it is that of the main
thread alone, which runs the author's code.
"""

from __future__ import annotations

import gc
import os
from time import monotonic
from typing import Any, Final, NamedTuple

# Per thread: nanoseconds on a processor, nanoseconds of waiting for one, and how often it got one (Linux).
_SCHEDSTAT: Final = "/proc/thread-self/schedstat"
# How old the kernel's word may be when a batch begins: so much of waiting may be taken for that of the batch.
_FRESH_S: Final = 0.02
# A batch that took less was not held up by others.
_SHORT_S: Final = 0.001


class Held(NamedTuple):
    """Seconds, since the process began to count: in collections, waiting for a processor, in writing what it prints."""

    collected_s: float
    waited_s: float
    printed_s: float


class Hindrances:
    """The sums of this process. There is one for the process: what prints, or collects, does not know its worker."""

    def __init__(self) -> None:
        self.printed_s = 0.0
        """Added to by what prints."""
        self._collected_s = 0.0
        self._collects_since = 0.0
        self._descriptor = -1
        self._pid = 0
        self._known_s = 0.0  # of waiting, as it was known last
        self._known_at = 0.0

    def begin(self) -> None:
        """Begin to count in this process: a forked one begins anew. Called again, it does nothing."""
        if self._pid == os.getpid():
            return
        self._pid = os.getpid()
        if self._on_collection not in gc.callbacks:
            gc.callbacks.append(self._on_collection)
        try:
            self._descriptor = os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # another system, or a kernel without it: nothing is known of waiting
            self._descriptor = -1

    def before(self, now: float) -> Held:
        """The sums as a batch begins."""
        if now - self._known_at > _FRESH_S:
            self._known_s, self._known_at = self._ask(), now
        return Held(self._collected_s, self._known_s, self.printed_s)

    def after(self, now: float, seconds: float) -> Held:
        """The sums as a batch has ended that took so long."""
        if seconds >= _SHORT_S:
            self._known_s, self._known_at = self._ask(), now
        return Held(self._collected_s, self._known_s, self.printed_s)

    def _ask(self) -> float:
        if self._descriptor < 0:
            return 0.0
        try:
            return int(os.pread(self._descriptor, 64, 0).split()[1]) / 1e9
        except (OSError, ValueError, IndexError):  # an author's code may have closed the descriptor, or reused it
            self._descriptor = -1
            return 0.0

    def _on_collection(self, phase: str, _: dict[str, Any]) -> None:
        if phase == "start":
            self._collects_since = monotonic()
        elif self._collects_since:
            self._collected_s += monotonic() - self._collects_since
            self._collects_since = 0.0


hindrances = Hindrances()
