"""Starts a server as a process of its own session, which outlives the command that started it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import IO


def start_server(
    module: str,
    arguments: Sequence[str],
    word: str,
    *,
    stdout: IO[bytes] | int | None = None,
    stderr: IO[bytes] | int | None = None,
) -> subprocess.Popen[bytes]:
    """Run `python -m module arguments…` in a new session; the caller owns the process.

    `word` is in its command line from the first instant (as an option that Python ignores), so that its PID file counts
    before the server has set its own title. Output goes where the caller's goes by default.
    """
    # -P: else a user's file json.py in the working directory would replace the standard library's.
    command = [sys.executable, "-P", "-X", word, "-m", module, *arguments]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True)
