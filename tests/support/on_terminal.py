"""Runs a command on a pseudo-terminal, as a person does."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

LIMIT_S = 60.0


class Reader:
    """What comes from a descriptor, read until its other end is closed."""

    def __init__(self, descriptor: int) -> None:
        self.text = ""
        self._descriptor = descriptor
        self._more = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._descriptor, 65536)
            except OSError:  # a terminal whose last writer has gone
                data = b""
            with self._more:
                self.text += data.decode(errors="replace")
                self._more.notify_all()
            if not data:
                return

    def wait_for(self, words: str) -> None:
        """Until the words have come."""
        with self._more:
            assert self._more.wait_for(lambda: words in self.text or not self._thread.is_alive(), LIMIT_S), self.text
            assert words in self.text, self.text

    def close(self) -> None:
        """Read the rest."""
        self._thread.join(LIMIT_S)
        os.close(self._descriptor)


class OnTerminal:
    """A process in a terminal of its own, as a shell starts one: keys for signals reach it, and it can be stopped."""

    def __init__(self, shell: subprocess.Popen[bytes], pid: int, master: int, slave: int) -> None:
        self.pid = pid
        self._shell = shell
        self.screen = Reader(master)
        self._master, self._slave = master, slave

    def press(self, keys: str) -> None:
        """Type."""
        os.write(self._master, keys.encode())

    def resize(self, rows: int, columns: int) -> None:
        """Change the size of the window."""
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    @property
    def attributes(self) -> list[Any]:
        """How the terminal is set."""
        return termios.tcgetattr(self._slave)

    def ended(self) -> int:
        """Wait for the end; gives the status as a shell does."""
        return self._shell.wait(LIMIT_S)

    def signal(self, number: signal.Signals) -> None:
        """Send the process a signal."""
        os.kill(self.pid, number)

    def end(self) -> None:
        """Kill what still runs."""
        if self._shell.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self._shell.wait(LIMIT_S)


@contextmanager
def on_terminal(*arguments: str, rows: int = 30, columns: int = 120) -> Iterator[OnTerminal]:
    """`marserve ARGUMENTS…` on a terminal of this size. Its other end stays open, so that its settings can be read."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    words: Sequence[str] = [sys.executable, "-m", "marserve.cli", *arguments]
    left_out = ("MARSERVE_", "TS_", "NO_COLOR", "TERM", "COLUMNS", "LINES")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    tells, told = os.pipe()
    shell = subprocess.Popen(
        [sys.executable, "-c", _SHELL, str(told), *words],
        pass_fds=[told],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        env={**inherited, "TERM": "xterm"},
    )
    os.close(told)
    with open(tells, encoding="ascii") as pipe:
        pid = int(pipe.readline())
    running = OnTerminal(shell, pid, master, slave)
    try:
        yield running
    finally:
        running.end()
        os.close(slave)
        running.screen.close()


# The least that a shell does: a job in the foreground, in a process group of its own.
_SHELL = r"""
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
told, *words = sys.argv[1:]
pid = os.fork()
if not pid:
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpid())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.write(int(told), f"{os.getpid()}\n".encode())
    os.close(int(told))
    os.execv(words[0], words)
os.close(int(told))
while True:
    status = os.waitpid(pid, os.WUNTRACED)[1]
    if not os.WIFSTOPPED(status):
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
"""
