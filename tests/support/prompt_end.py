"""How long a process took, as it would have on a machine that nobody else uses.

What it waited for a processor that others had is the system's to tell (`schedstat`, of its main thread), and is left
out; what it slept, waited for, wrote and computed is not. Where the system does not tell, all of it counts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any


def kept_waiting_s(pid: int) -> float:
    """How long a process, which may have ended but not been reaped, was ready to run and did not."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def run_to_end(
    command: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    stdout: IO[str],
    stderr: IO[str],
    timeout_s: float,
    program: type[subprocess.Popen[Any]] = subprocess.Popen,
) -> tuple[int, float]:
    """Run a command; its status, and the seconds that it took. One that takes longer than `timeout_s` is killed.

    `program` starts it: `support.prepared.Prepared` where the claim is not the start itself.
    """
    began = time.monotonic()
    process = program(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr)
    limit = threading.Timer(timeout_s, process.kill)
    limit.start()
    try:
        if sys.platform == "linux":
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        else:
            process.wait()
        took_s = time.monotonic() - began - kept_waiting_s(process.pid)
    finally:
        limit.cancel()
        limit.join()
        process.wait()
    return process.returncode, took_s
