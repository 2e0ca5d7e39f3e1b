"""Runs a server in this process, from settings to exit status, and keeps its PID file while it runs.

It sets the process's title and keeps the PID file; `marserve.app` serves.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

import setproctitle

from marserve.cli import INTERRUPTED_STATUS
from marserve.cli.server.pid_file import PidFile
from marserve.machine.start_watch import StartWatch
from marserve.settings import Settings

if TYPE_CHECKING:
    from marserve.app.server import Companion


def serve(
    settings: Settings, pid_file: PidFile, watch: StartWatch | None = None, companion: Companion | None = None
) -> int:
    """Serve until stopped; returns the exit status. `watch` is closed when the server is up.

    `companion` lives beside the server.

    When the server has ended, further signals are ignored: the process is to end. Raises AlreadyRunning if the PID file
    belongs to another running server, BadSettings if the file or a folder cannot be written.
    """
    pid = os.getpid()

    def leave_at_once(number: int, frame: FrameType | None) -> None:
        # No exception: an import that it interrupts may lose it, or print it.
        pid_file.release(pid)
        os._exit(_status_of(number))

    # Until the server has handlers of its own, a signal to stop ends the process, and nothing is left behind.
    stop_signals = {"SIGINT", "SIGTERM", settings.preemption_signal} & set(signal.Signals.__members__)
    before = {signal.Signals[name]: signal.signal(signal.Signals[name], leave_at_once) for name in stop_signals}
    # A process inherits the signals that its parent has blocked; blocked ones would never come here.
    blocked = signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # Before the file: a reader of its id must find the word in the command line. The title is the word alone, because
    # SageMaker's toolkit looks for an argument that is exactly TorchServe's, and a title counts as one argument.
    setproctitle.setproctitle(pid_file.word)
    # Most objects of a start stay, and collections would take a tenth of its time. The server collects once, when up.
    gc.disable()
    try:
        pid_file.claim(pid)
        # Late: it imports the web framework, which takes a second that a refusal above need not cost.
        from marserve.app.server import run

        # Imports leave 100,000 objects and hardly any garbage; later collections skip them.
        gc.freeze()
        for number in before:
            signal.signal(number, leave)
        status = run(settings, watch, companion)
        # The server has ended, and this process ends with its status; a further signal must not change that.
        before = dict.fromkeys(before, signal.SIG_IGN)
        return status
    finally:
        gc.enable()
        pid_file.release(pid)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number, handler in before.items():
            signal.signal(number, handler)


def leave(number: int, frame: FrameType | None) -> None:
    """End the process at a signal by an exception, so that what is under way is tidied up."""
    sys.exit(_status_of(number))


def finishing_line(requests: int, limit_s: float) -> str:
    """What a stop waits for, and for how long at most, in seconds."""
    what = f"{requests} request{'' if requests == 1 else 's'}"
    return f"Finishing {what} ({limit_s:g} s at most); Ctrl-C again ends at once"


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """Let SIGINT and SIGTERM wait until what is imported here is there.

    Inside an import their exceptions may end as the failure of a module. Call it in the main thread.
    """
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    earlier = [signal.signal(number, lambda seen, frame: came.append(seen)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, earlier, strict=True):
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def _status_of(number: int) -> int:
    """The status of a start that a signal ended: 130 for Ctrl-C, as for any command, 0 for other signals."""
    return INTERRUPTED_STATUS if number == signal.SIGINT else 0
