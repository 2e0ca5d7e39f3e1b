"""Watches a start from a thread of its own: a file system that does not answer may hold it up for ever.

Logs once which call the start waits for. A thread that hangs in the system cannot handle a signal that asks for the
end, so a signal that has waited for longer than a moment ends the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

from marserve.machine.hanging import Stillness, describe_call, is_waiting_for_events, pending_signals
from marserve.machine.threads import DaemonThreads

STATUS = 1
SAY_AFTER_S = 5.0
LOOK_EVERY_S = 0.25
# A signal that has waited for so long will not be handled.
UNHEARD_S = 1.0
# The thread may hang in a write to standard error.
CLOSE_LIMIT_S = 1.0


class StartWatch:
    """Watches from now on, until `close`."""

    def __init__(self, *, say_after_s: float = SAY_AFTER_S, look_every_s: float = LOOK_EVERY_S) -> None:
        self._say_after_s, self._look_every_s = say_after_s, look_every_s
        self._is_over = threading.Event()
        self._stillness = Stillness()
        self._said: set[int] = set()
        self._threads: DaemonThreads | None = None
        self._unheard_since: float | None = None
        self._thread: threading.Thread | None = None
        with contextlib.suppress(RuntimeError):  # the system gives no thread; the start reports that itself
            thread = threading.Thread(target=self._watch, name="start-watch", daemon=True)
            thread.start()
            self._thread = thread

    def follow(self, threads: DaemonThreads) -> None:
        """Watch the calls of these threads, too."""
        self._threads = threads

    def close(self) -> None:
        """End the thread, for the start is over: one that wakes while the interpreter ends may crash it."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(CLOSE_LIMIT_S)

    def _watch(self) -> None:
        while not self._is_over.wait(self._look_every_s):
            self._look(time.monotonic())

    def _look(self, now: float) -> None:
        main = threading.main_thread().ident or 0
        calls = self._threads.calls() if self._threads is not None else {}
        still = self._stillness.look([main, *calls], now)
        for thread, seconds in still.items():
            if seconds >= self._say_after_s and thread not in self._said and not is_waiting_for_events(thread):
                self._said.add(thread)
                _say(f"the start waits: {describe_call(thread)} has not come back for {self._say_after_s:g} s")
        unheard = pending_signals()
        if not unheard or still.get(main, 0.0) < UNHEARD_S:
            self._unheard_since = None
            return
        if self._unheard_since is None:
            self._unheard_since = now
        if now - self._unheard_since >= UNHEARD_S:
            name = signal.Signals(min(unheard)).name
            _say(f"{name}: the start ends, though {describe_call(main)} has not come back")
            os._exit(STATUS)


def _say(sentence: str) -> None:
    os.write(2, f"marserve: {sentence}\n".encode())  # the log's file may be the one that hangs
