"""Limits on processes, threads and open files: which one was reached, and which are too low to start."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
# A server with its log, its listeners and gRPC, and without a worker, has so many threads and open files. A worker
# takes ten more files, each connection one.
LEAST_THREADS = 24
LEAST_FILES = 64


def explain(error: OSError | RuntimeError, root: Path = _ROOT) -> str:
    """Which limit an error of `fork`, `open` or a thread's start has met, as a clause; empty for any other error."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EMFILE:
        return f"this process may open {_shown(resource.RLIMIT_NOFILE)} files (RLIMIT_NOFILE), and has as many open"
    if number == errno.ENFILE:
        return "the system has no more open files to give (fs.file-max)"
    if number == errno.ENOMEM:
        return "the system has no memory for another process"
    if number == errno.EAGAIN or (number is None and "can't start new thread" in str(error)):
        return f"the system gives no more processes or threads ({process_limits(root)})"
    return ""


def process_limits(root: Path = _ROOT) -> str:
    """The limits on this process's processes and threads: a control group's that is met, else all that are known."""
    groups = list(_pids(root))
    met = [(most, used) for most, used in groups if used >= most]
    found = [f"pids.max of its control group is {most}, {used} are there" for most, used in met or groups]
    if not met and resource.getrlimit(resource.RLIMIT_NPROC)[0] != resource.RLIM_INFINITY:
        found.append(f"RLIMIT_NPROC of user {os.geteuid()} is {_shown(resource.RLIMIT_NPROC)}")
    return "; ".join(found) or "no limit of this process is known, so it may be the machine's own"


def too_low(least_threads: int = LEAST_THREADS, least_files: int = LEAST_FILES) -> str:
    """Why a server cannot start under the limits of this process, as a sentence; empty if it can.

    Threads are tried, since what a user's other processes have cannot be read.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY and files < least_files:
        return (
            f"This process may open {files} files (RLIMIT_NOFILE), and a server needs {least_files} at least; "
            "raise the limit (ulimit -n, LimitNOFILE=, --ulimit nofile)"
        )
    begun = _try_threads(least_threads)
    if begun < least_threads:
        return (
            f"This process gets {begun} more threads, and a server needs {least_threads} at least "
            f"({process_limits()}); raise the limit (ulimit -u, TasksMax=, --pids-limit)"
        )
    return ""


def _try_threads(count: int) -> int:
    """How many threads can be begun, `count` at most; they have ended when this returns."""
    end = threading.Event()
    threads: list[threading.Thread] = []
    try:
        for _ in range(count):
            thread = threading.Thread(target=end.wait, name="limit", daemon=True)
            thread.start()
            threads.append(thread)
    except RuntimeError:
        pass
    end.set()
    for thread in threads:
        thread.join()
    return len(threads)


def _pids(root: Path) -> Iterator[tuple[int, int]]:
    """The bounds on processes and threads of this process's control group and those above, and how many there are."""
    for line in read_or_empty(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "pids" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("pids" if controllers else "")
        folder = top / path.lstrip("/")
        # In a container the path may be the host's, and only the top is there.
        for place in (folder, *folder.parents) if folder.is_dir() and top in (folder, *folder.parents) else (top,):
            most, used = read_or_empty(place / "pids.max").strip(), read_or_empty(place / "pids.current").strip()
            if most.isdigit() and used.isdigit():
                yield int(most), int(used)
            if place == top:
                break


def read_or_empty(path: Path) -> str:
    """The text of a file of the system's; empty where it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _shown(limit: int) -> str:
    soft = resource.getrlimit(limit)[0]
    return "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
