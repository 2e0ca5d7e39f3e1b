"""A process that the server started: its number, its end, its signals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from marserve.lineage import VARIABLE
from marserve.messages import Load
from marserve.pool.interpreter import program_of
from marserve.pool.worker_end.cause_of_death import Death

log = logging.getLogger("marserve.pool.launchers")

KILL_TIMEOUT_S = 10.0
LOOK_AT_END_S = 0.1


class WorkerProcess:
    """One worker (or template) process and the process group it leads.

    `exited` is done when the process has ended and was reaped: its wait status as from `os.waitpid`, or None if that
    could not be had. By `lineage` processes are found that it leaves behind outside of its group.
    """

    def __init__(self, pid: int, exited: asyncio.Future[int | None], lineage: str = "") -> None:
        self.pid = pid
        self.exited = exited
        self.lineage = lineage
        self.node = ""
        """The name of its machine; empty for this one."""
        self.remote_bytes = 0
        """How much memory it holds on another machine."""

    @property
    def has_lost_template(self) -> bool:
        """Whether the template that it was forked from has stopped answering, so that it should be replaced."""
        return False

    @property
    def pids(self) -> list[int]:
        """Its process ids: one, or those of a group of ranks (`group.py`)."""
        return [self.pid]

    @property
    def lineages(self) -> list[str]:
        """The lineages by which processes are found that it, or a rank of it, leaves behind."""
        return [self.lineage]

    def load(self, order: Load) -> Load:
        """The order to load as it is sent to this process."""
        return order

    @property
    def reported_death(self) -> tuple[Death, str] | None:
        """Why it ended, if that was not said on its wire, with the author's traceback."""
        return None

    def item_cancelled(self, number: int, index: int) -> None:
        """An item was marked as cancelled on the page. On this machine the worker sees that by itself."""

    def rank_said(self, rank: int, death: Death, traceback: str) -> None:
        """A rank of a group says why it is about to end."""

    def explain(self, death: Death) -> Death:
        """Its death, with details that are known here."""
        return death

    async def is_whole(self) -> bool:
        """Wait until all its ranks have loaded the model; False if it ended before."""
        return True

    def signal_group(self, number: int) -> None:
        """Send a signal to the process's group; ignored once the process is gone."""
        if self.exited.done():
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:  # forked a moment ago, and not yet a group's leader
                os.kill(self.pid, number)

    async def end(self, grace_s: float) -> int | None:
        """SIGTERM, after `grace_s` SIGKILL; returns the wait status once the process is reaped."""
        self.signal_group(signal.SIGTERM)
        return await self.wait(grace_s)

    async def wait(self, grace_s: float) -> int | None:
        """Wait for the process's end, and force it by SIGKILL after `grace_s` seconds; returns the wait status.

        A process that even the kernel cannot end (stuck in a driver) is left behind, and logged.
        """
        done, _ = await asyncio.wait([self.exited], timeout=grace_s)
        if not done:
            self.signal_group(signal.SIGKILL)
            done, _ = await asyncio.wait([self.exited], timeout=KILL_TIMEOUT_S)
        if not done:
            log.error("process %d does not end, not even by SIGKILL; it is left behind", self.pid)
            return None
        return self.exited.result()


def limit_threads(count: int) -> dict[str, str]:
    """The variables from which numeric libraries read their number of threads; empty for 0, their own choice."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return dict.fromkeys(names, str(count)) if count else {}


def spawn(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    pass_fds: Sequence[int],
    out: int,
    err: int,
    *,
    lineage: str = "",
    program: Sequence[str] = (),
) -> WorkerProcess:
    """Start `python -m marserve.worker …` in a session of its own, on the event loop's thread.

    `program` are the words that start it, without any the server's own interpreter. (The thread matters: the kernel
    ties `PR_SET_PDEATHSIG` to the thread that started the process.)
    """
    popen = subprocess.Popen(
        [*(program or program_of(None)), *arguments],
        env={**environment, VARIABLE: lineage} if lineage else dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        pass_fds=pass_fds,
        start_new_session=True,
    )
    exited: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
    _watch(popen, exited)
    return WorkerProcess(popen.pid, exited, lineage)


def _watch(popen: subprocess.Popen[bytes], exited: asyncio.Future[int | None]) -> None:
    """Reap the process when it ends: by its pidfd if the system has them, else in a thread, else by polling."""

    def reap() -> None:
        # Until it is reaped its number cannot be given to another group, so what it left in its own can be ended.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(popen.pid, signal.SIGKILL)
        status: int | None = None
        with contextlib.suppress(ChildProcessError):  # a program that embeds the server may have reaped it
            _, status = os.waitpid(popen.pid, 0)
        popen.returncode = 0 if status is None else os.waitstatus_to_exitcode(status)
        if not exited.done():
            exited.set_result(status)

    descriptor = open_pidfd(popen.pid)
    if descriptor is not None:
        call_at_end(descriptor, reap)
        return
    loop = asyncio.get_running_loop()

    def look() -> None:
        with contextlib.suppress(ChildProcessError):
            if os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                loop.call_later(LOOK_AT_END_S, look)
                return
        reap()

    def wait() -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server is ending
            loop.call_soon_threadsafe(reap)

    try:
        threading.Thread(target=wait, name=f"reap-{popen.pid}", daemon=True).start()
    except RuntimeError:  # a limit on threads as well as one on descriptors
        loop.call_later(LOOK_AT_END_S, look)


def open_pidfd(pid: int) -> int | None:
    """A descriptor that is readable once the process has ended; None if the system gives none."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def call_at_end(descriptor: int, ended: Callable[[], None]) -> None:
    """Call `ended` on the event loop when the process behind this pidfd has ended; closes the descriptor then."""
    loop = asyncio.get_running_loop()

    def hear() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        ended()

    loop.add_reader(descriptor, hear)


def parent_of(pid: int) -> int | None:
    """The id of a process's parent, also for one that has ended and is not reaped; None for an unknown process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
        # The second field is the program's name in parentheses and may hold anything, parentheses too.
        return int(text[text.rindex(b")") + 1 :].split()[1])
    except (OSError, ValueError, IndexError):
        return None
