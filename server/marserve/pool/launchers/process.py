"""A process that the server started: its number, its end, its signals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence


class WorkerProcess:
    """One worker (or template) process and the process group it leads.

    `exited` is done when the process has ended and was reaped: its wait status as from `os.waitpid`, or None where
    that could not be had.
    """

    def __init__(self, pid: int, exited: asyncio.Future[int | None]) -> None:
        self.pid = pid
        self.exited = exited

    def signal_group(self, number: int) -> None:
        """Send a signal to the process and everything it started in its group; nothing if it is gone."""
        if self.exited.done():
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    async def end(self, grace_s: float) -> int | None:
        """SIGTERM, after `grace_s` SIGKILL; returns the wait status once the process is reaped."""
        self.signal_group(signal.SIGTERM)
        done, _ = await asyncio.wait([self.exited], timeout=grace_s)
        if not done:
            self.signal_group(signal.SIGKILL)
        return await asyncio.shield(self.exited)


def spawn(
    arguments: Sequence[str], environment: Mapping[str, str], pass_fds: Sequence[int], out: int, err: int
) -> WorkerProcess:
    """Start `python -m marserve.worker …` in a session of its own, on the event loop's thread.

    (The thread matters: the kernel ties `PR_SET_PDEATHSIG` to the thread that started the process.)
    """
    popen = subprocess.Popen(
        # -P: the server's working directory is no place to import from.
        [sys.executable, "-P", "-m", "marserve.worker", *arguments],
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        pass_fds=pass_fds,
        start_new_session=True,
    )
    exited: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
    _watch(popen, exited)
    return WorkerProcess(popen.pid, exited)


def _watch(popen: subprocess.Popen[bytes], exited: asyncio.Future[int | None]) -> None:
    """Reap the process when it ends: by its pidfd where the system has them, else in a thread."""
    loop = asyncio.get_running_loop()

    def reap() -> None:
        # Before it is reaped its number is nobody else's: what it left in its process group goes with it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(popen.pid, signal.SIGKILL)
        _, status = os.waitpid(popen.pid, 0)
        popen.returncode = os.waitstatus_to_exitcode(status)
        if not exited.done():
            exited.set_result(status)

    if hasattr(os, "pidfd_open"):
        descriptor = os.pidfd_open(popen.pid)

        def ended() -> None:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            reap()

        loop.add_reader(descriptor, ended)
        return

    def wait() -> None:
        os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server is ending
            loop.call_soon_threadsafe(reap)

    threading.Thread(target=wait, name=f"reap-{popen.pid}", daemon=True).start()
