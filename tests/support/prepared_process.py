"""The process behind `prepared.py`: imports what a server needs, once, and forks a program for each order.

Run by its path and with nothing of the tests' imported, so that a program finds what it would have found in a new
interpreter. A fork is the child of *our* parent (`CLONE_PARENT`): the test waits for it, signals it and reads its
status as that of any process it started. It is single-threaded by need.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import platform
import runpy
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import setproctitle

SYS_CLONE3 = 435
CLONE_PARENT, CLONE_CHILD_CLEARTID, CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
MOST_DESCRIPTORS = 64
# Room in which the C library keeps a thread's own id, counted from where the thread's record begins.
THREAD_RECORD_BYTES = 1024
# The program that runs another one, mostly a server, in a process that it forks.
CONTAINER = "marserve.cli.container"
OWN_SCRIPTS = ("torchserve", "marserve")


def main() -> None:
    """Answer orders until the test's process has gone; in a forked process run what was ordered."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    with recorded_reads() as looked_at:
        for name in sys.argv[2:]:
            with suppress(ImportError):  # an optional package that is not there
                importlib.import_module(name)
    setproctitle.getproctitle()  # it looks for its place beside the environment, which is another one in a program
    gc.collect()
    gc.freeze()  # what is imported stays where it is, also when a program collects its garbage
    thread_id = find_thread_id()
    can_fork = thread_id != 0 and len(os.listdir("/proc/self/task")) == 1
    say(connection, {"looked_at": sorted(looked_at), "can_fork": can_fork})
    while True:
        head, descriptors, _, _ = socket.recv_fds(connection, 4, MOST_DESCRIPTORS)
        if not head:
            return
        order = json.loads(receive(connection, int.from_bytes(receive(connection, 4 - len(head), head), "big")))
        pid = fork_sibling(thread_id)
        if pid == 0:
            become(order, descriptors, connection)
            if order["module"] == CONTAINER:
                run_own_scripts_in_place()
            runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
            return
        for descriptor in descriptors:
            os.close(descriptor)
        if pid < 0:
            say(connection, {"pid": 0})


def say(connection: socket.socket, told: dict[str, Any]) -> None:
    """One line of JSON."""
    connection.sendall(json.dumps(told).encode() + b"\n")


def receive(connection: socket.socket, count: int, data: bytes = b"") -> bytes:
    """This many bytes, after those that are there."""
    wanted = len(data) + count
    while len(data) < wanted:
        piece = connection.recv(wanted - len(data))
        if not piece:
            os._exit(0)
        data += piece
    return data


@contextmanager
def recorded_reads() -> Iterator[set[str]]:
    """The names of environment variables that are looked at while the block runs."""
    looked_at: set[str] = set()
    kind = type(os.environ)
    original = kind.__getitem__

    def read(self: Any, name: str) -> str:
        looked_at.add(name)
        return original(self, name)

    kind.__getitem__ = read  # type: ignore[method-assign]
    try:
        yield looked_at
    finally:
        kind.__getitem__ = original  # type: ignore[method-assign]


def find_thread_id() -> int:
    """Where the C library keeps this thread's id, which a fork has to change; 0 where it is not found."""
    libc = ctypes.CDLL(None)
    libc.pthread_self.restype = ctypes.c_void_p
    if platform.libc_ver()[0] != "glibc":
        return 0
    record = int(libc.pthread_self())
    pid = os.getpid()
    found = (ctypes.c_int * (THREAD_RECORD_BYTES // 4)).from_address(record)
    places = [index for index, value in enumerate(found) if value == pid]
    return record + 4 * places[0] if len(places) == 1 else 0


def fork_sibling(thread_id: int) -> int:
    """Fork a process that is a child of our parent. Returns 0 in it, its id here, -1 when the system would not."""
    flags = CLONE_PARENT | CLONE_CHILD_CLEARTID | CLONE_CHILD_SETTID
    # flags, pidfd, child_tid, parent_tid, exit_signal (our own), stack, stack_size, tls, set_tid, set_tid_size, cgroup
    arguments = array.array("Q", [flags, 0, thread_id, 0, 0, 0, 0, 0, 0, 0, 0])
    address, count = arguments.buffer_info()
    api = ctypes.pythonapi
    clone = ctypes.PyDLL(None).syscall  # keeps Python's lock: there is one thread, and it goes on in both
    clone.restype = ctypes.c_long
    size = ctypes.c_size_t(count * arguments.itemsize)
    api.PyOS_BeforeFork()
    pid = int(clone(ctypes.c_long(SYS_CLONE3), ctypes.c_void_p(address), size))
    if pid == 0:
        api.PyOS_AfterFork_Child()
    else:
        api.PyOS_AfterFork_Parent()
    return pid


def open_streams() -> None:
    """Standard streams as the interpreter makes them at its start, which asks what they are."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        before = getattr(sys, name)
        made = os.fdopen(number, "w" if number else "r", encoding=before.encoding, errors=before.errors, closefd=False)
        if number == 2:
            made.reconfigure(line_buffering=True)
        setattr(sys, name, made)
        setattr(sys, f"__{name}__", made)


def become(order: dict[str, Any], descriptors: list[int], connection: socket.socket) -> None:
    """Be the program: its session, descriptors, folder, environment and arguments. Then the test hears its id."""
    numbers: list[int] = order["numbers"]
    if order["new_session"]:
        os.setsid()
    *moved, last = [
        fcntl.fcntl(descriptor, fcntl.F_DUPFD, max(numbers) + 1 + MOST_DESCRIPTORS)
        for descriptor in (*descriptors, connection.detach())
    ]
    for number, descriptor in zip(numbers, moved, strict=True):
        os.dup2(descriptor, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in (*numbers, last):
            with suppress(OSError):  # the listing's own
                os.close(int(name))
    open_streams()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    time.tzset()
    setproctitle.setproctitle(" ".join(order["words"]))
    sys.orig_argv = order["words"]
    sys.argv = [order["module"], *order["arguments"]]
    if not order["is_safe"]:
        sys.path.insert(0, os.getcwd())
    with socket.socket(fileno=last) as connection:
        say(connection, {"pid": os.getpid()})


def run_own_scripts_in_place() -> None:
    """Have `os.execvpe` run a script of this environment in the process as it is: it has imported what the script does.

    Other programs, and other changes of the environment than to settings, are executed.
    """
    execute = os.execvpe

    def run(file: str, arguments: list[str], environment: dict[str, str]) -> NoReturn:
        script = shutil.which(file, path=environment.get("PATH"))
        changed = {name for name, value in {*os.environ.items()} ^ {*environment.items()}}
        if script is None or not is_own(script) or not all(name.startswith(("MARSERVE_", "TS_")) for name in changed):
            execute(file, arguments, environment)
        os.environ.clear()
        os.environ.update(environment)
        run_script([script, *arguments[1:]])

    os.execvpe = run


def is_own(script: str) -> bool:
    """Whether it is a console script of this interpreter's environment."""
    with open(script, "rb") as file:
        return os.path.basename(script) in OWN_SCRIPTS and file.readline().rstrip() == b"#!" + os.fsencode(
            sys.executable
        )


def run_script(arguments: list[str]) -> NoReturn:
    """Run the script to its end and leave the process with its status, as an interpreter of its own would."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own
            if not os.get_inheritable(int(name)):
                os.close(int(name))
    sys.orig_argv = [sys.executable, *arguments]
    sys.argv = arguments
    sys.path.insert(0, os.path.dirname(arguments[0]))
    setproctitle.setproctitle(" ".join(sys.orig_argv))
    status = 0
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
