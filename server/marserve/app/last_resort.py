"""Ends the process when its orderly end takes longer than it may: a thread hangs, or the event loop does.

A file system that does not answer keeps a system call for ever, and the thread that made it cannot be ended. Waited for
is the signal itself, not what the event loop makes of it; one that hangs so that no signal interrupts it is seen by the
signal that waits for it. Workers end with the process.
"""

from __future__ import annotations

import os
import queue
import threading
import time

from marserve.machine.hanging import pending_signals

STATUS = 1
# How often it is looked whether a signal waits for the main thread. Twice in a row: that does not hear it.
LOOK_EVERY_S = 1.0
# After a second signal, which asks for haste.
HURRIED_S = 10.0
# Its thread does nothing that could take longer.
CLOSE_LIMIT_S = 1.0


class LastResort:
    """Ends this process `limit_s` after the first signal, or `HURRIED_S` after the second, if it is still there."""

    def __init__(self, limit_s: float, *, hurried_s: float = HURRIED_S) -> None:
        """Raises RuntimeError where the system gives no thread."""
        self._limit_s, self._hurried_s = limit_s, hurried_s
        # A queue of this kind may be put into by a signal handler, whatever it interrupted.
        self._signals: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait, name="last-resort", daemon=True)
        self._thread.start()

    def on_signal(self) -> None:
        """A signal asked for the end."""
        self._signals.put(True)

    def close(self) -> None:
        """The process has ended what it had to, or goes on with other things. The thread has ended then."""
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
        os.write(2, said.encode())  # the log's file may be what hangs
        os._exit(STATUS)
