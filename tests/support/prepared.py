"""Servers and commands of marserve that start without importing: a process that has imported them forks each.

The imports of a server take about a second of a processor, and the tests start hundreds of servers. `Prepared` is used
as `subprocess.Popen` is. It gives a process of its own, a child of the test's process, with the arguments, environment,
folder, descriptors and session that it was given. `prepared_process.py`, one for each pytest runner, forks it. `run` is
`subprocess.run` in the same way.

    process = Prepared([sys.executable, "-m", "marserve.cli.torchserve", "--start"], cwd=folder, env=environment)

It starts a new interpreter where a fork would not be the same: for other programs and options, for an environment that
differs in a variable that the interpreter or an import read, for a terminal, and on systems other than Linux.

A test uses `subprocess.Popen` if its claim is the start itself: imports, time, the command as users type it.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

PROGRAM = Path(__file__).with_name("prepared_process.py")


@dataclass(frozen=True, eq=False)
class Kind:
    """What programs of one kind have in common: the module that is run, what it imports, and in which environment.

    `entry` is how the module's name begins; it is run, and so not imported before. A program whose environment differs
    in a variable that begins with one of `read_early`, or in one that an import read, starts by itself. `indifferent`
    are variables that imports read to no effect, as sysconfig does with `HOME`.
    """

    entry: str
    imports: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    # What the interpreter, the C library or a library reads before any line of ours runs.
    read_early: tuple[str, ...] = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "GLIBC_", "COVERAGE_")
    indifferent: tuple[str, ...] = ()


COMMANDS = Kind(
    "marserve.cli",
    (
        "marserve.app.server",
        "marserve.app.grpc_ports",
        "marserve.api.grpc.listener",
        "marserve.cli.server.background",
        "marserve.cli.command_list",
        "marserve.cli.server.foreground",
        "marserve.cli.server.start",
        "marserve.plugins",
        "encodings.idna",
        "pydantic.v1",
        "rich.measure",
        "rich.progress",
        "uvicorn.lifespan.off",
        "uvloop",
    ),
)
# The arguments of `Popen._execute_child`, in their order.
_GIVEN = (
    *("args", "executable", "preexec_fn", "close_fds", "pass_fds", "cwd", "env", "startupinfo", "creationflags"),
    *("shell", "p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite", "restore_signals"),
    *("gid", "gids", "uid", "umask", "start_new_session", "process_group"),
)
# What they are where nothing out of the ordinary was asked for.
_AS_ANY = {
    "executable": None,
    "preexec_fn": None,
    "close_fds": True,
    "shell": False,
    "gid": None,
    "gids": None,
    "uid": None,
    "umask": -1,
    "process_group": -1,
}


class _Source:
    """The process that programs are forked from, and this runner's connection to it."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._environment = {**os.environ, **kind.environment}
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(PROGRAM), str(theirs.fileno()), *kind.imports],
                env=self._environment,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._connection = ours
        self._lock = threading.Lock()
        self.pid = self._process.pid
        self.owner = os.getpid()
        told = self._hear()
        self._looked_at = [
            name for name in told["looked_at"] if not name.startswith("PYTEST_") and name not in kind.indifferent
        ]
        self._can_fork: bool = told["can_fork"]
        atexit.register(self.close)

    def takes(self, environment: Mapping[str, str]) -> bool:
        """Whether a program with this environment would have been imported the same."""
        if not self._can_fork or os.getpid() != self.owner:
            return False
        early = {name for name in (*environment, *self._environment) if name.startswith(self._kind.read_early)}
        return all(environment.get(name) == self._environment.get(name) for name in (*early, *self._looked_at))

    def fork(self, order: dict[str, Any], descriptors: Sequence[int]) -> int:
        """The id of the new process, 0 when the system would not fork."""
        data = json.dumps(order).encode()
        with self._lock:
            head = len(data).to_bytes(4, "big")
            socket.send_fds(self._connection, [head], list(descriptors))
            self._connection.sendall(data)
            return int(self._hear()["pid"])

    def _hear(self) -> dict[str, Any]:
        line = b""
        while not line.endswith(b"\n"):
            piece = self._connection.recv(65536)
            if not piece:
                raise AssertionError("the process that programs are forked from has ended")
            line += piece
        told: dict[str, Any] = json.loads(line)
        return told

    def close(self) -> None:
        """End it; the programs go on."""
        if os.getpid() == self.owner:
            self._connection.close()
            self._process.wait()


_sources: dict[Kind, _Source] = {}


def source_pids() -> set[int]:
    """The processes that programs are forked from: they stay until the runner ends."""
    return {source.pid for source in _sources.values() if source.owner == os.getpid()}


def prepare(kind: Kind) -> None:
    """Start the process that programs of this kind are forked from, where there is none yet."""
    _find_source(kind)


def _find_source(kind: Kind) -> _Source:
    source = _sources.get(kind)
    if source is None or source.owner != os.getpid():
        source = _sources[kind] = _Source(kind)
    return source


class Prepared(subprocess.Popen[Any]):
    """As `subprocess.Popen`, and quicker for `python -m` with a module of marserve's command line.

    A subclass may have programs of another kind.
    """

    kind: ClassVar[Kind] = COMMANDS

    def _execute_child(self, *given: Any) -> None:
        if len(given) == len(_GIVEN) and self._fork(dict(zip(_GIVEN, given, strict=True))):
            return
        super()._execute_child(*given)  # type: ignore[misc]

    def _fork(self, given: dict[str, Any]) -> bool:
        words = [os.fsdecode(word) for word in given["args"]] if not isinstance(given["args"], str) else []
        is_safe, module, arguments = _read(words)
        if (
            not module.startswith(self.kind.entry)
            or sys.platform != "linux"
            or any(given[name] != value for name, value in _AS_ANY.items())
        ):
            return False
        environment = {
            os.fsdecode(k): os.fsdecode(v) for k, v in (os.environ if given["env"] is None else given["env"]).items()
        }
        folder = os.path.abspath(given["cwd"] or os.getcwd())
        streams = [
            number if number != -1 else own
            for own, number in enumerate((given["p2cread"], given["c2pwrite"], given["errwrite"]))
        ]
        if any(os.isatty(number) for number in streams) or not os.path.isdir(folder):
            return False
        source = _find_source(self.kind)
        if not source.takes(environment):
            return False
        order = {
            "module": module,
            "words": words,
            "arguments": arguments,
            "is_safe": is_safe,
            "environment": environment,
            "folder": folder,
            "numbers": [0, 1, 2, *given["pass_fds"]],
            "new_session": bool(given["start_new_session"]),
        }
        pid = source.fork(order, [*streams, *given["pass_fds"]])
        if pid <= 0:
            return False
        self.pid = pid
        self._child_created = True
        self._close_pipe_fds(*(given[name] for name in _GIVEN[10:16]))  # type: ignore[attr-defined]
        return True


def _read(words: Sequence[str]) -> tuple[bool, str, list[str]]:
    """Whether the folder is no place to import from, the module, and its arguments; no module for any other command."""
    if not words or words[0] != sys.executable:
        return False, "", []
    is_safe = words[1:2] == ["-P"]
    rest = words[2 if is_safe else 1 :]
    if len(rest) < 2 or rest[0] != "-m":
        return False, "", []
    return is_safe, rest[1], list(rest[2:])


def run(
    arguments: Sequence[str], *, timeout: float, check: bool = False, **more: Any
) -> subprocess.CompletedProcess[Any]:
    """As `subprocess.run` with `capture_output`."""
    with Prepared(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(arguments, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done
