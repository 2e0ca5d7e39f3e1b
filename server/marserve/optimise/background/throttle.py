"""Holds the family of this process to a share of a core: its processes are stopped, and go on, by what they used.

The family is this process and all that it started, however deep; orphans among them become its children. This process
itself is never stopped. While something is measured nothing is; what that used is paid for afterwards.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Final

from marserve.lineage import adopt_orphans, family, send_all
from marserve.optimise.background.share import Share

LOOK_EVERY_S: Final = 0.1


class Throttle:
    """The stops of this process's family. Use it as a context; it leaves no process stopped."""

    def __init__(self, share: float, priority: int) -> None:
        """`share` is of one core; 1 and more: up to so many cores. `priority` is that of workers, as `nice` has it."""
        self._before = priority
        self._share = Share(share, time.monotonic(), sum(family(os.getpid()).values()))
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._stopped: set[int] = set()
        self._measuring = 0
        self._is_free = threading.Event()
        self._is_free.set()
        self._thread = threading.Thread(target=self._run, name="throttle", daemon=True)

    def __enter__(self) -> Throttle:
        adopt_orphans()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._go_on()

    @contextlib.contextmanager
    def unthrottled(self) -> Iterator[None]:
        """Nothing is stopped during the block. It begins when what was used before is paid for.

        Where the system allows that, the family has the priority of workers meanwhile: threads of the lowest one that
        wait for each other on a busy machine would measure the machine.
        """
        self._is_free.wait()
        with self._lock:
            self._measuring += 1
            self._go_on()
        _set_priority(self._before)
        try:
            yield
        finally:
            _set_priority(os.getpriority(os.PRIO_PROCESS, 0))
            with self._lock:
                self._measuring -= 1
                self._look()

    def _run(self) -> None:
        while not self._is_over.wait(LOOK_EVERY_S):
            with self._lock:
                self._look()

    def _look(self) -> None:
        if self._measuring:
            return
        used = family(os.getpid())
        now, total = time.monotonic(), sum(used.values())
        if self._share.debt_s(now, total) > 0:
            self._is_free.clear()
            others = set(used) - {os.getpid()}
            send_all(others - self._stopped, signal.SIGSTOP)
            self._stopped = others
        else:
            self._share.forgive(now, total)
            self._go_on()

    def _go_on(self) -> None:
        if self._stopped:  # numbers are used again: only what is still of the family is continued
            send_all(self._stopped & set(family(os.getpid())), signal.SIGCONT)
        self._stopped = set()
        self._is_free.set()


def _set_priority(priority: int) -> None:
    """Of all threads of the family without this process. Does nothing where that needs a right that is not there."""
    for pid in set(family(os.getpid())) - {os.getpid()}:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                os.setpriority(os.PRIO_PROCESS, int(thread), priority)
