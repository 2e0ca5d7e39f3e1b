"""A handler that, at a request's word, does something to every descriptor that its process holds.

The body is the name of a trick. It is tried on each descriptor, whatever that is; the answer says, as JSON, what the
descriptors were and how each try ended. Where the environment names a trick (`VANDAL`), it is done while loading.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import json
import mmap
import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

PAGE_BYTES = 4096
FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE = 1, 2
SEED = 15


def handle(rows: list[dict[str, Any]] | None, context: Any) -> Any:
    """One answer a row: what the trick did, or the body where it names none."""
    if rows is None:
        if "VANDAL" in os.environ:
            with open("tried", "w") as tried:
                tried.write(vandalise(os.environ["VANDAL"]))
        return None
    return [_one(bytes(row["body"]).decode()) for row in rows]


def _one(word: str) -> str:
    return vandalise(word) if word in TRICKS else word


def vandalise(word: str) -> str:
    """Try the trick on every descriptor; what came of it."""
    trick = TRICKS[word]
    ended: dict[str, str] = {}
    for descriptor, target in held():
        try:
            told = trick(descriptor)
        except (OSError, ValueError, OverflowError) as error:
            told = f"{type(error).__name__}: {error}"
        ended[f"{descriptor} {target}"] = str(told)
    return json.dumps(ended)


def held() -> Iterator[tuple[int, str]]:
    """The descriptors of this process that a worker is born with, the page first, and what they point at."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    yield from sorted(found.items(), key=lambda one: ("marserve-page" not in one[1], one[0]))


# ------------------------------------------------------------------------------------------- what it tries


def truncate(descriptor: int) -> Any:
    """Make it empty."""
    os.ftruncate(descriptor, 0)


def grow(descriptor: int) -> Any:
    """Make it a gigabyte."""
    os.ftruncate(descriptor, 1 << 30)


def allocate(descriptor: int) -> Any:
    """Have the system fill in a hundred megabytes."""
    os.posix_fallocate(descriptor, 0, 100 << 20)


def punch(descriptor: int) -> Any:
    """Take its memory away, and keep its size."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_long(PAGE_BYTES)
    if libc.fallocate(descriptor, FALLOC_KEEP_SIZE | FALLOC_PUNCH_HOLE, ctypes.c_long(0), size):
        raise OSError(ctypes.get_errno(), "fallocate")


def seal(descriptor: int) -> Any:
    """Forbid the server to write."""
    seals = fcntl.F_SEAL_WRITE | getattr(fcntl, "F_SEAL_FUTURE_WRITE", 0x10)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)


def reopen(descriptor: int) -> Any:
    """Open what it points at once more, to empty it."""
    os.close(os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_TRUNC | os.O_NONBLOCK))


def garbage(descriptor: int) -> Any:
    """Write noise into it."""
    os.set_blocking(descriptor, False)
    return os.write(descriptor, random.Random(SEED).randbytes(50_000))


def overwrite(descriptor: int) -> Any:
    """Write noise over it, from its beginning and beyond its end."""
    noise = random.Random(SEED).randbytes(3 * PAGE_BYTES)
    return os.pwrite(descriptor, noise, 0), os.pwrite(descriptor, noise, 1 << 40)


def ones(descriptor: int) -> Any:
    """Write the largest numbers, and doubles that are none, over it."""
    return os.pwrite(descriptor, b"\xff" * PAGE_BYTES, 0)


def flicker(descriptor: int) -> Any:
    """Write ever new noise over it for as long as the process lives."""
    if "marserve-page" not in os.readlink(f"/proc/self/fd/{descriptor}"):
        return "left alone"
    mapped = mmap.mmap(descriptor, PAGE_BYTES)

    def write() -> None:
        noise = random.Random(SEED)
        while True:
            mapped[:] = noise.randbytes(PAGE_BYTES)
            time.sleep(0.0001)

    threading.Thread(target=write, daemon=True).start()
    return "begun"


def close(descriptor: int) -> Any:
    """Close it."""
    os.close(descriptor)


def shut(descriptor: int) -> Any:
    """Let nothing in or out of it any more."""
    with socket.socket(fileno=os.dup(descriptor)) as sock:
        sock.shutdown(socket.SHUT_RDWR)


def shut_reading(descriptor: int) -> Any:
    """Take nothing more from it: who writes to it gets an error."""
    with socket.socket(fileno=os.dup(descriptor)) as sock:
        sock.shutdown(socket.SHUT_RD)


def dup_over(descriptor: int) -> Any:
    """Put something else in its place."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, descriptor)
    os.close(null)


def shift(descriptor: int) -> Any:
    """Put every other one that it has in its place, one after the other."""
    for other, _ in list(held()):
        with contextlib.suppress(OSError):
            os.dup2(other, descriptor)


def flags(descriptor: int) -> Any:
    """Change what all who share the open file share: never wait, append, signal, packets."""
    before = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    for flag in (os.O_NONBLOCK, os.O_APPEND, os.O_ASYNC, os.O_DIRECT, os.O_NOATIME):
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_SETFL, before | flag)
    return oct(fcntl.fcntl(descriptor, fcntl.F_GETFL))


def inherit(descriptor: int) -> Any:
    """Leave it to a process that stays."""
    os.set_inheritable(descriptor, True)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        time.sleep(60)
        os._exit(0)
    return pid


def lock(descriptor: int) -> Any:
    """Lock it in every way that there is, and take a lease of it."""
    for take in (
        lambda: fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB),
        lambda: fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB),
        lambda: fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK),
    ):
        with contextlib.suppress(OSError):
            take()


def widen(descriptor: int) -> Any:
    """Have the system keep a megabyte for it."""
    return fcntl.fcntl(descriptor, 1031, 1 << 20)  # F_SETPIPE_SZ


def narrow(descriptor: int) -> Any:
    """Have a socket keep as little as can be."""
    with socket.socket(fileno=os.dup(descriptor)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)


def rights(descriptor: int) -> Any:
    """Send descriptors along with messages that are none, and with some that are."""
    message = b"\x92\xa7metrics\x90"
    frame = b"mW" + struct.pack("<HIIQ", 1, len(message), 0, 0) + message
    many = array.array("i", [0] * 100)
    with socket.socket(fileno=os.dup(descriptor)) as sock:
        sock.setblocking(False)
        return [
            sock.sendmsg([frame], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, many)]),
            sock.sendmsg([b"\0" * 10], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, many)]),
        ]


def steal(descriptor: int) -> Any:
    """Read what was meant for the loop, and what its own pipes hold."""
    os.set_blocking(descriptor, False)
    other = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_NONBLOCK)
    threading.Thread(target=_read_for_ever, args=(other,), daemon=True).start()
    return "begun"


def _read_for_ever(descriptor: int) -> None:
    while True:
        with contextlib.suppress(OSError):
            os.read(descriptor, 65536)
        time.sleep(0.001)


def stop(descriptor: int) -> Any:
    """Stop altogether, whoever waits."""
    os.kill(os.getpid(), signal.SIGSTOP)


TRICKS: dict[str, Callable[[int], Any]] = {
    trick.__name__: trick
    for trick in (
        *(truncate, grow, allocate, punch, seal, reopen, garbage, overwrite, ones, flicker, close, shut, shut_reading),
        *(dup_over, shift, flags, inherit, lock, widen, narrow, rights, steal, stop),
    )
}
