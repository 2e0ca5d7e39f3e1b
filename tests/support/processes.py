"""What the system says of processes and descriptors: who lives, who was left behind, what is open."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable

import psutil

from support.patience import PATIENCE_S, pause_s
from support.prepared import source_pids


def living(pids: Iterable[int]) -> set[int]:
    """Those of these processes that exist. A zombie counts, unless it has become the system's own to reap."""
    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if _lives(psutil.Process(pid)):
                found.add(pid)
    return found


def left_of(family: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that have not ended after this time at most, in seconds; what counts is as in `living`.

    `psutil.wait_procs` counts an orphan until the system's first process has reaped it, which may take that seconds.
    """
    begun = time.monotonic()
    while (left := [process for process in family if _lives(process)]) and time.monotonic() < begun + timeout_s:
        time.sleep(pause_s(begun))
    return left


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and not (process.status() == psutil.STATUS_ZOMBIE and process.ppid() == 1)
    except psutil.NoSuchProcess:
        return False


def descendants(pid: int | None = None) -> set[int]:
    """All processes below this one (or below us), zombies included; not those that programs are forked from."""
    top = os.getpid() if pid is None else pid
    if sys.platform != "linux":
        return {child.pid for child in psutil.Process(top).children(recursive=True)} - source_pids()
    children, found = _children(), {top}
    below = [top]
    while below:
        below = [each for each in children.get(below.pop(), []) if each not in found] + below
        found.update(below)
    return found - {top} - source_pids()


def _children() -> dict[int, list[int]]:
    """The children of each process of the machine; pools' tests ask some thousand times."""
    found: dict[int, list[int]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            descriptor = os.open(f"/proc/{name}/stat", os.O_RDONLY)
            try:
                told = os.read(descriptor, 1024)
            finally:
                os.close(descriptor)
        except OSError:  # it has gone
            continue
        parent = int(told[told.rindex(b")") + 2 :].split(b" ", 2)[1])
        found.setdefault(parent, []).append(int(name))
    return found


def group_of(group: int) -> set[int]:
    """All processes of this process group."""
    found = set()
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group:
                found.add(process.pid)
        except ProcessLookupError:
            continue
    return found


def open_descriptors() -> dict[int, str]:
    """Our open descriptors and what they point at."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the listing's own
            continue
    return found


async def until(holds: Callable[[], object], what: str, *, timeout_s: float = PATIENCE_S) -> None:
    """Wait until the system's tables say so; they tell nobody of themselves. Fails with `what` after the limit."""
    begun = time.monotonic()
    while not holds():
        assert time.monotonic() < begun + timeout_s, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(pause_s(begun))


def until_blocking(holds: Callable[[], object], what: str, *, timeout_s: float = PATIENCE_S) -> None:
    """As `until`, for tests without an event loop."""
    begun = time.monotonic()
    while not holds():
        assert time.monotonic() < begun + timeout_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(pause_s(begun))
