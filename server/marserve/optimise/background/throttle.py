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

from marserve.lineage import adopt_orphans
from marserve.optimise.background.share import Share

LOOK_EVERY_S: Final = 0.1
# One that waits for a disk does not end at once.
_MOST_ROUNDS = 100
_BETWEEN_ROUNDS_S = 0.02
_TICKS = os.sysconf("SC_CLK_TCK")


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
            _signal(others - self._stopped, signal.SIGSTOP)
            self._stopped = others
        else:
            self._share.forgive(now, total)
            self._go_on()

    def _go_on(self) -> None:
        if self._stopped:  # numbers are used again: only what is still of the family is continued
            _signal(self._stopped & set(family(os.getpid())), signal.SIGCONT)
        self._stopped = set()
        self._is_free.set()


def _set_priority(priority: int) -> None:
    """Of all threads of the family without this process. Does nothing where that needs a right that is not there."""
    for pid in set(family(os.getpid())) - {os.getpid()}:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                os.setpriority(os.PRIO_PROCESS, int(thread), priority)


def end_family() -> None:
    """Kill all that this process started, also what left its session and took no environment along."""
    _kill_below(os.getpid())
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def end_with_family(root: int) -> None:
    """Kill another process and all below it, also what left its session. Blocks, for seconds at most.

    The process is stopped first, so that it starts nothing more; it keeps its orphans until it is killed itself.
    """
    _signal({root}, signal.SIGSTOP)
    _kill_below(root)
    _signal({root}, signal.SIGKILL)


def _kill_below(root: int) -> None:
    for _ in range(_MOST_ROUNDS):
        living = {pid for pid in set(family(root)) - {root} if not _has_ended(pid)}
        if not living:
            return
        _signal(living, signal.SIGKILL)
        time.sleep(_BETWEEN_ROUNDS_S)


def _has_ended(pid: int) -> bool:
    """Whether only its status is left, for which its parent has not asked."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] == b"Z"
    except OSError:
        return True


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def family(root: int) -> dict[int, float]:
    """Each process below `root`, and `root`, with the seconds of processor time that it used.

    A process counts what its ended children used, once it has waited for them. Empty where the system has no `/proc`.
    """
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    try:
        names = os.listdir("/proc")
    except OSError:
        return {}
    for name in names:
        if not name.isdecimal():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b") ")[2].split()
        except OSError:  # it has ended
            continue
        parents[int(name)] = int(fields[1])
        used[int(name)] = sum(map(int, fields[11:15])) / _TICKS
    members = {root: True}
    return {pid: seconds for pid, seconds in used.items() if _is_below(pid, parents, members)}


def _is_below(pid: int, parents: dict[int, int], known: dict[int, bool]) -> bool:
    chain = []
    while pid not in known and pid in parents:
        chain.append(pid)
        pid = parents[pid]
    found = known.get(pid, False)
    known.update(dict.fromkeys(chain, found))
    return found
