"""Runs the vendors' tools, each as a process with a deadline that always holds, and a bound on its output.

A tool whose driver hangs cannot be ended, not even by SIGKILL: it is left behind, and reaped when it has ended.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

# How long a tool that was killed may take to go, before it is left behind.
_GONE_S = 0.5
# A tool that prints more is ended: a table of 128 devices has 10 KiB.
MOST_BYTES = 1 << 20
_READ_BYTES = 1 << 16
# How much of a tool's complaint is kept.
_WORDS = 300


class ToolOutput(NamedTuple):
    """What a tool printed, and its exit status; the status is None if it did not start or end.

    `complaint` is a sentence without a full stop about what went wrong, empty after status 0.
    """

    text: str
    status: int | None = 0
    complaint: str = ""


Run = Callable[[Sequence[str]], ToolOutput]


def each_within(limit_s: float) -> Run:
    """Runs tools of which each may take `limit_s`. While one that was left behind has not ended, nothing is started."""
    last: list[Tools] = []

    def run(command: Sequence[str]) -> ToolOutput:
        if last and last[0].is_stuck:
            return ToolOutput("", None, f"{command[0].rpartition('/')[2]} has not ended")
        last[:] = [Tools(limit_s)]
        return last[0](command)

    return run


class _TooMuch(Exception):
    """A tool prints more than is read."""


class Tools:
    """Runs tools, which together may take `total_s`. Thread-safe; blocks, so do not call it on the event loop.

    They have this `environment`, None for the server's. With `ends_groups` each leads a process group, which is
    ended with it when its time is over, it prints too much, or it is cancelled.
    """

    def __init__(
        self, total_s: float = 10.0, environment: Mapping[str, str] | None = None, *, ends_groups: bool = False
    ) -> None:
        self._total_s = total_s
        self._environment = environment
        self._ends_groups = ends_groups
        self._deadline: float | None = None
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._running: set[subprocess.Popen[bytes]] = set()

    def __call__(self, command: Sequence[str]) -> ToolOutput:
        """What `command` prints, whatever its exit status is. The time for all calls begins with the first."""
        tool = command[0].rpartition("/")[2]
        if self._deadline is None:
            self._deadline = time.monotonic() + self._total_s
        left_s = self._deadline - time.monotonic()
        late = ToolOutput("", None, f"{tool} did not answer within {self._total_s:g} s")
        if left_s <= 0:
            return late
        self._reap()
        try:
            with self._lock:
                if self._is_cancelled:
                    return late
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=self._environment,
                    start_new_session=self._ends_groups,
                )
                self._running.add(process)
        except (OSError, ValueError) as error:
            return ToolOutput("", None, f"{tool} could not be started ({error})")
        try:
            text, words = _read(process, self._deadline)
        except subprocess.TimeoutExpired:
            self._leave(process)
            return late
        except _TooMuch:
            self._leave(process)
            return ToolOutput("", None, f"{tool} printed more than {MOST_BYTES} bytes")
        except (OSError, ValueError):  # its pipes were closed by `cancel`
            return late
        finally:
            if process.poll() is not None:
                self._running.discard(process)
        if process.returncode == 0:
            return ToolOutput(text)
        said = " ".join((words.strip() or text.strip()).split())[:_WORDS]
        return ToolOutput(
            text, process.returncode, f"{tool} ended with status {process.returncode}{f': {said}' if said else ''}"
        )

    @property
    def is_stuck(self) -> bool:
        """Whether a tool that was left behind has not ended."""
        self._reap()
        return bool(self._running)

    def cancel(self) -> None:
        """End what runs, and start nothing more."""
        with self._lock:
            self._is_cancelled = True
            running = list(self._running)
        for process in running:
            self._kill(process)

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(OSError):
            if self._ends_groups and process.returncode is None:  # not reaped: its number is not another group's
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()

    def _leave(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a tool, and wait only a moment: one that waits for its driver does not end."""
        self._kill(process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GONE_S)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError, ValueError):
                    pipe.close()

    def _reap(self) -> None:
        """Collect what was left behind and has ended since."""
        for process in [each for each in self._running if each.stdout is not None and each.stdout.closed]:
            if process.poll() is not None:
                self._running.discard(process)


def _read(process: subprocess.Popen[bytes], deadline: float) -> tuple[str, str]:
    """What a process prints to its two outputs until it has ended. Raises TimeoutExpired, _TooMuch and OSError."""
    assert process.stdout is not None
    assert process.stderr is not None
    pieces: dict[int, list[bytes]] = {process.stdout.fileno(): [], process.stderr.fileno(): []}
    total = 0
    with selectors.DefaultSelector() as outputs:
        for output in pieces:
            outputs.register(output, selectors.EVENT_READ)
        while outputs.get_map():
            left_s = deadline - time.monotonic()
            ready = outputs.select(left_s) if left_s > 0 else []
            if not ready:
                raise subprocess.TimeoutExpired(process.args, left_s)
            for key, _ in ready:
                piece = os.read(key.fd, _READ_BYTES)
                if not piece:
                    outputs.unregister(key.fd)
                pieces[key.fd].append(piece)
                total += len(piece)
            if total > MOST_BYTES:
                raise _TooMuch
    process.wait(max(0.0, deadline - time.monotonic()))
    process.stdout.close()
    process.stderr.close()
    text, words = (b"".join(each).decode(errors="replace").replace("\r\n", "\n") for each in pieces.values())
    return text, words
