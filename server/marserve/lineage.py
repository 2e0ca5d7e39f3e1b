"""Finds processes that have left their owner's process group, and ends those whose owner has ended.

A worker's processes end with its process group. A process that left the group (`setsid`, a daemon) is found by what it
has inherited: the variable `_MARSERVE_LINEAGE` of its environment (`SERVER/TEMPLATE/WORKER`, each a random word), and,
forked without a new program, the mapping of its worker's page. Neither needs further rights. A process that was started
with an empty environment, or runs as another user, is not found. Below a process that adopts orphans all are found, by
whose children they are (`family`).

Linux only: elsewhere nothing is found. Blocks for some milliseconds, so not for the event loop.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path

VARIABLE = "_MARSERVE_LINEAGE"
_MARK = f"{VARIABLE}=".encode()
# How often processes are searched again, since one may fork during a search.
_ROUNDS = 10
_READ_BYTES = 65536
_PR_SET_CHILD_SUBREAPER = 36
_END_TIMEOUT_S = 1.0
# One that waits for a disk does not end at once.
_MOST_KILLS = 100
_BETWEEN_KILLS_S = 0.02
_TICKS = os.sysconf("SC_CLK_TCK")


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


def end_family() -> None:
    """Kill all that this process started, also what left its session and took no environment along."""
    _kill_below(os.getpid())
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def end_with_family(root: int) -> None:
    """Kill another process and all below it, also what left its session. Blocks, for seconds at most.

    The process is stopped first, so that it starts nothing more; it keeps its orphans until it is killed itself.
    """
    send_all({root}, signal.SIGSTOP)
    _kill_below(root)
    send_all({root}, signal.SIGKILL)


def _kill_below(root: int) -> None:
    for _ in range(_MOST_KILLS):
        living = {pid for pid in set(family(root)) - {root} if not _has_ended(pid)}
        if not living:
            return
        send_all(living, signal.SIGKILL)
        time.sleep(_BETWEEN_KILLS_S)


def _has_ended(pid: int) -> bool:
    """Whether only its status is left, for which its parent has not asked."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] == b"Z"
    except OSError:
        return True


def send_all(pids: Collection[int], number: signal.Signals) -> None:
    """Send a signal to those of these processes that are there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def family(root: int) -> dict[int, float]:
    """Each process below `root`, and `root`, with the seconds of processor time that it used.

    A process counts what its ended children used, once it has waited for them. Empty where the system has no `/proc`.
    """
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    try:
        names = os.listdir("/proc")
    except OSError:
        return {}
    for name in names:
        if not name.isdecimal():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b") ")[2].split()
        except OSError:  # it has ended
            continue
        parents[int(name)] = int(fields[1])
        used[int(name)] = sum(map(int, fields[11:15])) / _TICKS
    members = {root: True}
    return {pid: seconds for pid, seconds in used.items() if _is_below(pid, parents, members)}


def _is_below(pid: int, parents: dict[int, int], known: dict[int, bool]) -> bool:
    chain = []
    while pid not in known and pid in parents:
        chain.append(pid)
        pid = parents[pid]
    found = known.get(pid, False)
    known.update(dict.fromkeys(chain, found))
    return found
