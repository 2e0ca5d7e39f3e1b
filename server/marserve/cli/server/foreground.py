"""Runs a server in this process, from settings to exit status, and keeps its PID file while it runs.

Knows the process's title and PID file. Knows nothing of flags, nor of what serving is: that is `marserve.app`.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from types import FrameType

import setproctitle

from marserve.cli import INTERRUPTED_STATUS
from marserve.cli.server.pid_file import PidFile
from marserve.machine.start_watch import StartWatch
from marserve.settings import Settings


def serve(settings: Settings, pid_file: PidFile, watch: StartWatch | None = None) -> int:
    """Serve until stopped; returns the exit status. `watch` is closed when the server is up.

    After that its signals are ignored: the process is to end. Raises AlreadyRunning when the PID file belongs to
    another running server, BadSettings when it, or a folder, cannot be written.
    """
    pid = os.getpid()

    def leave_at_once(number: int, frame: FrameType | None) -> None:
        # No exception: the import that it falls into may lose it, or print it.
        pid_file.release(pid)
        os._exit(_status_of(number))

    # Until the server has handlers of its own: a signal to stop now ends it with nothing left behind.
    told_by = {"SIGINT", "SIGTERM", settings.preemption_signal} & set(signal.Signals.__members__)
    before = {signal.Signals[name]: signal.signal(signal.Signals[name], leave_at_once) for name in told_by}
    # A starter may have blocked signals for its own sake, and what it starts inherits that: none would ever come here.
    blocked = signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # Before the file: a reader of its id must find the word in the command line. The word alone, because
    # SageMaker's toolkit looks for an argument that is exactly TorchServe's, and a title counts as one argument.
    setproctitle.setproctitle(pid_file.word)
    # What a start makes stays, and looking through it for garbage takes a tenth of the time: the server will, once.
    gc.disable()
    try:
        pid_file.claim(pid)
        # Late, because this brings in the web framework: a refusal above costs no second.
        from marserve.app import run

        # Imports leave 100,000 objects and next to no garbage: the server's collection, once it is up, leaves them out.
        gc.freeze()
        for number in before:
            signal.signal(number, _leave)
        status = run(settings, watch)
        # The server has ended, and this process ends with its status: a further signal changes neither.
        before = dict.fromkeys(before, signal.SIG_IGN)
        return status
    finally:
        gc.enable()
        pid_file.release(pid)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(_status_of(number))


def _status_of(number: int) -> int:
    """Of a server that never served: 130 for Ctrl-C, as for any command, and 0 for a service manager's word."""
    return INTERRUPTED_STATUS if number == signal.SIGINT else 0
