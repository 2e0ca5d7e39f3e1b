"""Ends the process when its orderly end takes too long, because a thread or the event loop hangs.

A system call on a file system that does not answer may never return, and its thread cannot be ended. So this waits for
the signal itself, not for the event loop's handling of it. If the main thread hangs so that no signal interrupts it,
the pending signal shows that. Workers end with the process.
"""

from __future__ import annotations

import os
import queue
import threading
import time

from marserve.machine.hanging import pending_signals

STATUS = 1
# How often pending signals of the main thread are checked. If one is pending twice in a row, that thread hangs.
LOOK_EVERY_S = 1.0
# The limit after a second signal.
HURRIED_S = 10.0
# How long `close` waits for the thread, which does nothing that takes longer.
CLOSE_LIMIT_S = 1.0


class LastResort:
    """Ends this process `limit_s` after the first signal, or `HURRIED_S` after the second, if it still runs."""

    def __init__(self, limit_s: float, *, hurried_s: float = HURRIED_S) -> None:
        """Raises RuntimeError if the system cannot start a thread."""
        self._limit_s, self._hurried_s = limit_s, hurried_s
        # A signal handler may put into a SimpleQueue, whatever it interrupted.
        self._signals: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait, name="last-resort", daemon=True)
        self._thread.start()

    def on_signal(self) -> None:
        """Begin to count the time: a signal asked for the end."""
        self._signals.put(True)

    def close(self) -> None:
        """Do not end the process any more; the thread has ended when this returns."""
        self._signals.put(False)
        self._thread.join(CLOSE_LIMIT_S)

    def _wait(self) -> None:
        until, limit_s, is_unheard = None, self._limit_s, False
        while True:
            wait_s = LOOK_EVERY_S if until is None else max(0.0, until - time.monotonic())
            try:
                is_signal = self._signals.get(timeout=wait_s)
            except queue.Empty:
                if until is not None:
                    break
                was_unheard, is_unheard = is_unheard, bool(pending_signals())
                is_signal = was_unheard and is_unheard
                if not is_signal:
                    continue
            if not is_signal:
                return
            now = time.monotonic()
            if until is None:
                until = now + self._limit_s
            elif now + self._hurried_s < until:
                until, limit_s = now + self._hurried_s, self._hurried_s
        said = f"marserve ends now: its orderly end was to take {limit_s:g} s at most, and something in it hangs\n"
        os.write(2, said.encode())  # not to the log, whose file may be what hangs
        os._exit(STATUS)
