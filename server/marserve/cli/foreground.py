"""Runs a server in this process, from settings to exit status, and keeps its PID file while it runs.

Knows the process's title and PID file. Knows nothing of flags, nor of what serving is: that is `marserve.app`.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

import setproctitle

from marserve.cli.pid_file import PidFile
from marserve.settings import Settings


def serve(settings: Settings, pid_file: PidFile) -> int:
    """Serve until stopped; returns the exit status.

    Raises AlreadyRunning when the PID file belongs to another running server, OSError when it cannot be written.
    """
    pid = os.getpid()
    # Until the server has handlers of its own: told to stop now, it ends with nothing left behind.
    before = {number: signal.signal(number, _leave) for number in (signal.SIGINT, signal.SIGTERM)}
    # Before the file: whoever reads the id from it must find the word in the command line. The word alone, because
    # SageMaker's toolkit looks for an argument that is exactly TorchServe's, and a title counts as one argument.
    setproctitle.setproctitle(pid_file.word)
    try:
        pid_file.claim(pid)
        # Late, because this brings in the web framework: a refusal above costs no second.
        from marserve.app import run

        return run(settings)
    finally:
        pid_file.release(pid)
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(0)
