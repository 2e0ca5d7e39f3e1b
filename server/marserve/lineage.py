"""Finds processes that have left their owner's process group, and ends those whose owner has ended.

A worker's processes end with its process group. A process that left the group (`setsid`, a daemon) is found by what it
has inherited: the variable `_MARSERVE_LINEAGE` of its environment (`SERVER/TEMPLATE/WORKER`, each a random word), and,
forked without a new program, the mapping of its worker's page. Neither needs further rights. A process that was started
with an empty environment, or runs as another user, is not found.

Linux only: elsewhere nothing is found. Blocks for some milliseconds, so not for the event loop.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

VARIABLE = "_MARSERVE_LINEAGE"
_MARK = f"{VARIABLE}=".encode()
# How often processes are searched again, since one may fork during a search.
_ROUNDS = 10
_READ_BYTES = 65536
_PR_SET_CHILD_SUBREAPER = 36
_END_TIMEOUT_S = 1.0


def adopt_orphans() -> None:
    """Have orphans among what this process starts become its children, where the system can do that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_families(lineages: Mapping[str, int]) -> list[int]:
    """Kill every process of these lineages except this one, and wait for their ends; returns the process ids.

    `lineages` maps each to the inode of its worker's page, 0 for none.
    """
    ended: list[int] = []
    for _ in range(_ROUNDS):
        found = find_families(lineages)
        if not found:
            break
        ended += [pid for pid in found if _kill(pid, lineages)]
    return ended


def find_families(lineages: Mapping[str, int]) -> list[int]:
    """The living processes of these lineages, without this one."""
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    inodes = {str(inode) for inode in lineages.values() if inode}
    mine = os.getpid()
    return [pid for pid in map(int, filter(str.isdecimal, names)) if pid != mine and _is_of(pid, lineages, inodes)]


def _is_of(pid: int, lineages: Collection[str], inodes: Collection[str]) -> bool:
    environment = _environment(pid)
    at = environment.find(_MARK)
    if at < 0 or (at and environment[at - 1]):
        return False
    words = environment[at + len(_MARK) :].split(b"\0", 1)[0].decode("ascii", "replace").split("/")
    if any("/".join(words[:count]) in lineages for count in range(1, len(words) + 1)):
        return True
    return bool(inodes) and _maps(pid, inodes)


def _environment(pid: int) -> bytes:
    """A process's environment; empty if it has ended, or is another user's.

    Read for every process of the machine, so by system calls: with a path and a file object it took far longer.
    """
    pieces = []
    try:
        descriptor = os.open(f"/proc/{pid}/environ", os.O_RDONLY | os.O_CLOEXEC)
        try:
            while piece := os.read(descriptor, _READ_BYTES):
                pieces.append(piece)
        finally:
            os.close(descriptor)
    except OSError:
        return b""
    return b"".join(pieces)


def _maps(pid: int, inodes: Collection[str]) -> bool:
    """Whether a process has mapped one of these pages."""
    try:
        text = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return False
    return any(line.split(maxsplit=5)[4] in inodes for line in text.splitlines() if "marserve-page" in line)


def _kill(pid: int, lineages: Mapping[str, int]) -> bool:
    """Kill one process if the number still belongs to one of these lineages; False if it had gone."""
    try:
        descriptor = os.pidfd_open(pid)
    except (OSError, AttributeError):
        return False
    try:
        # Numbers are used again, so the process is checked once more, now that its descriptor is held.
        if not _is_of(pid, lineages, {str(inode) for inode in lineages.values() if inode}):
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        ended = select.poll()  # select takes no descriptor above 1023, and a busy server has more
        ended.register(descriptor, select.POLLIN)
        ended.poll(_END_TIMEOUT_S * 1000)
        return True
    finally:
        os.close(descriptor)
