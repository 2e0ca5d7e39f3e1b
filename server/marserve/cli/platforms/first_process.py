"""A minimal init: runs one command, passes signals on, reaps orphans, and ends with the command's status.

It is process 1 of a container. Outside of one it makes itself the subreaper of its orphans and works the same. A server
that the command leaves behind counts as part of the command: it gets the signals too, and when it ends the command is
ended, so that no container goes on without its server.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from marserve.cli.server.pid_file import MARSERVE_WORD, TORCHSERVE_WORD, PidFile
from marserve.lineage import adopt_orphans

NAME_BYTES = 15  # what the kernel keeps of a process's name

# Not passed on: signals about this process itself, and signals that no process can catch.
_OWN = {signal.SIGCHLD, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGABRT}
_OWN |= {signal.SIGSYS, signal.SIGPIPE, signal.SIGTTIN, signal.SIGTTOU, signal.SIGKILL, signal.SIGSTOP}
_PASSED_ON = frozenset(signal.valid_signals() - _OWN)
_WORDS = (TORCHSERVE_WORD, MARSERVE_WORD)
_SERVERS = frozenset(word[:NAME_BYTES] for word in _WORDS)


class CannotRun(Exception):
    """The command cannot be started; `status` is that of a shell."""

    def __init__(self, program: str, error: OSError) -> None:
        self.status = 127 if isinstance(error, FileNotFoundError) else 126
        super().__init__(f"{program!r} cannot be run ({error.strerror})")


def look_after(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the command to its end and return its status; 128 plus the signal's number if a signal killed it.

    If the command leaves a server behind, it is that server's status. Raises CannotRun.
    """
    adopt_orphans()
    awaited = _PASSED_ON | {signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    try:
        return _Family(_start(command, environment, before)).wait(awaited)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Family:
    """The command, and the servers that it leaves behind."""

    def __init__(self, command: int) -> None:
        self._command: int | None = command
        self._servers: set[int] = set()
        self._status = 0
        self._server_status: int | None = None

    def wait(self, awaited: frozenset[signal.Signals]) -> int:
        """Pass signals on and reap until the command and every server it left have ended."""
        while self._command is not None or self._find_servers():
            number = signal.sigwait(awaited)
            if number == signal.SIGCHLD:
                self._reap()
            else:
                self._find_servers()
                self._pass_on(number)
        return self._status if self._server_status is None else self._server_status

    def _find_servers(self) -> set[int]:
        """The servers among this process's children, besides the command."""
        self._servers |= {pid for pid in _children() if pid != self._command and _is_server(pid)}
        return self._servers

    def _pass_on(self, number: int) -> None:
        for pid in {*self._servers, *([] if self._command is None else [self._command])}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _reap(self) -> None:
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            pid = found.si_pid
            # A process that has ended still has its name, but no command line.
            was_server = pid != self._command and (pid in self._servers or _name(pid) in _SERVERS)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            status = code if code >= 0 else 128 - code
            self._servers.discard(pid)
            if pid == self._command:
                self._command, self._status = None, status
            elif was_server:
                self._server_status = status
                # A command that only waits (`tail -f /dev/null`) would wait for ever.
                self._pass_on(signal.SIGTERM)


def _start(command: Sequence[str], environment: Mapping[str, str], mask: set[int | signal.Signals]) -> int:
    """Start the command with the signal mask that it would have had. Raises CannotRun."""
    has_terminal = sys.stdin is not None and os.isatty(0)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            if has_terminal:
                _take_terminal()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.execvpe(command[0], list(command), dict(environment))
        except OSError as error:
            os.write(writer, str(error.errno).encode())
        finally:
            os._exit(127)
    os.close(writer)
    with open(reader, "rb") as said:
        wrong = said.read()
    if wrong:
        os.waitpid(pid, 0)
        number = int(wrong)
        raise CannotRun(command[0], OSError(number, os.strerror(number)))
    return pid


def _take_terminal() -> None:
    """Let Ctrl-C reach only the command: this process would pass it on a second time."""
    os.setpgid(0, 0)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    with contextlib.suppress(OSError):
        os.tcsetpgrp(0, os.getpid())
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _children() -> list[int]:
    """Children of this process; empty without /proc."""
    own = str(os.getpid())
    return [int(stat.parent.name) for stat in Path("/proc").glob("[0-9]*/stat") if _parent(stat) == own]


def _parent(stat: Path) -> str:
    try:
        return stat.read_text("utf-8", "replace").rpartition(")")[2].split()[1]
    except (OSError, IndexError):
        return ""


def _is_server(pid: int) -> bool:
    """Whether the process runs and has a server's word in its command line, as servers do from their first instant."""
    return any(PidFile(Path(os.devnull), word).is_server(pid) for word in _WORDS)


def _name(pid: int) -> str:
    """The kernel's name of a process, also of one that has ended and was not reaped; empty for an unknown process."""
    try:
        return Path(f"/proc/{pid}/comm").read_text("utf-8", "replace").rstrip("\n")
    except OSError:
        return ""
