"""A process that does nothing but show a word in its command line, as a server does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def bystander(word: str) -> Iterator[int]:
    """Its process id; it runs while the block does."""
    # It says when it is there: right after `exec` the kernel may still show an empty command line.
    waits = "import sys; print('up', flush=True); sys.stdin.read()"
    command = [sys.executable, "-S", "-X", word, "-c", waits]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        yield process.pid
        process.communicate()
