"""A handler that does, at a request's word, what authors do by mistake and attackers on purpose.

The functions are kinds of badness; what they return is the element of the answer. The body is a kind's name, with words
behind it for some.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any


def handle(rows: list[dict[str, Any]] | None, context: Any) -> Any:
    """One element a row, unless the first row asks for another kind of answer."""
    if rows is None:
        return None
    bodies = [bytes(row["body"]) for row in rows]
    whole = WHOLE_ANSWERS.get(bodies[0].decode("ascii", "replace"))
    if whole is not None:
        return whole()
    return [_one(body) for body in bodies]


def _one(body: bytes) -> Any:
    word, _, value = body.partition(b" ")
    kind = globals().get(word.decode("ascii", "replace"))
    return kind(value) if callable(kind) else body


# ------------------------------------------------------------------------------------------- answers that are none

WHOLE_ANSWERS: dict[str, Any] = {
    "nothing": lambda: None,
    "text": lambda: "text",
    "mapping": lambda: {"0": "x"},
    "tuple": lambda: ("x",),
    "generator": lambda: (word for word in ["x"]),
    "none": list,
    "two": lambda: ["x", "y"],
}


class Unspeakable(RuntimeError):
    """An exception that raises when it is asked for its words."""

    def __str__(self) -> str:
        raise ValueError("no words")

    __repr__ = __str__


class Touchy(dict[str, str]):
    """A mapping that raises something odd when it is looked at."""

    def items(self) -> Any:
        """Raise."""
        raise KeyError("do not look")


def deep(value: bytes) -> Any:
    """A value nested deeper than any writer goes."""
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    return nested


def itself(value: bytes) -> Any:
    """A list in itself."""
    circle: list[Any] = []
    circle.append(circle)
    return circle


def surrogate(value: bytes) -> Any:
    """Text that no UTF-8 can say."""
    return "\ud800"


def touchy(value: bytes) -> Any:
    """A mapping that raises when it is written."""
    return Touchy(a="b")


def callback(value: bytes) -> Any:
    """A function is no answer."""
    return handle


# ------------------------------------------------------------------------------------------- raising


def unspeakable(value: bytes) -> Any:
    """Raise what cannot be described."""
    raise Unspeakable


def cancelled(value: bytes) -> Any:
    """Raise asyncio's cancellation, which is no Exception."""
    raise asyncio.CancelledError


def interrupt(value: bytes) -> Any:
    """Raise what Ctrl-C raises."""
    raise KeyboardInterrupt


def recursion(value: bytes) -> Any:
    """Run out of stack."""
    return recursion(value)


def memory(value: bytes) -> Any:
    """Run out of memory, and say so."""
    raise MemoryError


# ------------------------------------------------------------------------------------------- to the process


def thread(value: bytes) -> Any:
    """Leave a thread that never ends, and that Python would wait for."""
    threading.Thread(target=threading.Event().wait).start()
    return "ok"


def child(value: bytes) -> Any:
    """Leave a process."""
    return str(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid)


def fork(value: bytes) -> Any:
    """Leave a process that holds everything this one had open, in its process group."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
    return str(pid)


def escape_and_exit(value: bytes) -> Any:
    """Leave a process that holds everything and has left the process group; then end."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        time.sleep(60)
        os._exit(0)
    Path("escaped").write_text(str(pid))
    os._exit(0)


def daemon(value: bytes) -> Any:
    """Leave a process in a session of its own, whose parent has gone, with nothing inherited open."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        pid = os.fork()
        if pid == 0:
            os.closerange(0, 256)
            time.sleep(60)
            os._exit(0)
        os.write(writing, str(pid).encode())
        os._exit(0)
    os.wait()
    os.close(writing)
    with os.fdopen(reading) as told:
        return told.read()


def session(value: bytes) -> Any:
    """Leave a program in a session of its own."""
    command = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    return str(subprocess.Popen(command, start_new_session=True).pid)


def slowly(value: bytes) -> Any:
    """Do as the word says, and take so long that another worker has the next request."""
    done = globals()[value.decode()](b"")
    time.sleep(0.3)
    return f"{os.getpid()} {done}"


def close_streams(value: bytes) -> Any:
    """Close standard input, output and error."""
    os.closerange(0, 3)
    logging.getLogger().warning("nobody reads this")
    return "ok"


def close_everything(value: bytes) -> Any:
    """Close all that is open, the way to the server included."""
    os.closerange(0, 256)
    return "ok"


def no_stdout(value: bytes) -> Any:
    """Take Python's own streams away."""
    sys.stdout = sys.stderr = None  # type: ignore[assignment]
    logging.shutdown()
    return "ok"


def print_much(value: bytes) -> Any:
    """Print ten megabytes."""
    for _ in range(10_000):
        print("x" * 999)  # noqa: T201
    return "ok"


def print_a_gigabyte(value: bytes) -> Any:
    """Print a gigabyte, in lines."""
    line = b"x" * 9_999 + b"\n"
    for _ in range(100_000):
        sys.stdout.buffer.write(line)
    sys.stdout.flush()
    return "ok"


def answer_a_gigabyte(value: bytes) -> Any:
    """Answer more than anybody asked for."""
    return b"x" * 1_000_000_000


def print_binary(value: bytes) -> Any:
    """Print what is no text, with marks and without line ends."""
    os.write(1, bytes(range(256)) * 100 + b"\x1eERROR\x1e")
    os.write(2, b"\x1e\x1e\x1e\n" * 10)
    return "ok"


def lose_folder(value: bytes) -> Any:
    """Stand in a folder that is no more."""
    os.mkdir("lost")
    os.chdir("lost")
    os.rmdir("../lost")
    return "ok"


def no_descriptors(value: bytes) -> Any:
    """Allow itself nothing more to open."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    return "ok"


def deaf(value: bytes) -> Any:
    """Listen to no signal."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)
    return "ok"


def alarm(value: bytes) -> Any:
    """Be ended by a signal some time later."""
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    return "ok"


def kill_parent(value: bytes) -> Any:
    """End the process that this one was forked from."""
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


# ------------------------------------------------------------------------------------------- to the wire


def _wire() -> int:
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                return int(name)
        except OSError:
            continue
    raise LookupError("no socket")


def wire(value: bytes) -> Any:
    """Write bytes to the server, past the loop; then wait."""
    os.write(_wire(), value)
    time.sleep(60)


def wire_and_exit(value: bytes) -> Any:
    """Write bytes to the server, and end."""
    os.write(_wire(), value)
    os._exit(0)


def flood(value: bytes) -> Any:
    """Announce an answer within the bounds, and write far more than that."""
    descriptor = _wire()
    os.write(descriptor, b"mW" + struct.pack("<HIIQ", 1, 10, 1, 1_000_000))
    while True:
        os.write(descriptor, json.dumps([0] * 10_000).encode())
