"""Ends the process when its orderly end takes longer than it may: a thread hangs, or the event loop does.

A file system that does not answer keeps a system call for ever, and the thread that made it cannot be ended. Waited for
is the signal itself, not what the event loop makes of it. Workers end with the process.
"""

from __future__ import annotations

import os
import queue
import threading
import time

STATUS = 1
# After a second signal, which asks for haste.
HURRIED_S = 10.0


class LastResort:
    """Ends this process `limit_s` after the first signal, or `HURRIED_S` after the second, if it is still there."""

    def __init__(self, limit_s: float, *, hurried_s: float = HURRIED_S) -> None:
        """Raises RuntimeError where the system gives no thread."""
        self._limit_s, self._hurried_s = limit_s, hurried_s
        # A queue of this kind may be put into by a signal handler, whatever it interrupted.
        self._signals: queue.SimpleQueue[bool] = queue.SimpleQueue()
        threading.Thread(target=self._wait, name="last-resort", daemon=True).start()

    def on_signal(self) -> None:
        """A signal asked for the end."""
        self._signals.put(True)

    def close(self) -> None:
        """The process has ended what it had to, or goes on with other things."""
        self._signals.put(False)

    def _wait(self) -> None:
        until, limit_s = None, self._limit_s
        while True:
            try:
                is_signal = self._signals.get(timeout=None if until is None else max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            if not is_signal:
                return
            now = time.monotonic()
            if until is None:
                until = now + self._limit_s
            elif now + self._hurried_s < until:
                until, limit_s = now + self._hurried_s, self._hurried_s
        said = f"marserve ends now: its orderly end was to take {limit_s:g} s at most, and something in it hangs\n"
        os.write(2, said.encode())  # the log's file may be what hangs
        os._exit(STATUS)
