"""Which process listens on a port of this machine, for an error that names it. Linux; elsewhere nothing is found."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from marserve.names import escaped

_LISTEN = "0A"
# How much of a command line an error shows, in characters.
_MOST_SHOWN = 120


def holder_of(port: int) -> tuple[int, str] | None:
    """The id and the command line of a process that listens on the TCP port; None if this user cannot see one."""
    inodes = {inode for table in ("tcp", "tcp6") for inode in _listening(Path("/proc/net") / table, port)}
    if not inodes:
        return None
    targets = {f"socket:[{inode}]" for inode in inodes}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if not targets.isdisjoint(_links(process / "fd")):
                words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
                return int(process.name), words
        except OSError:  # another user's, or it has ended
            continue
    return None


def say_holder(port: int) -> str:
    """`process 4711 (python -m …)`; empty if this user cannot see it."""
    holder = holder_of(port)
    return "" if holder is None else f"process {holder[0]} ({escaped(holder[1][:_MOST_SHOWN])})"


def _links(folder: Path) -> Iterator[str]:
    """What the descriptors of a process lead to. Raises OSError."""
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):  # closed meanwhile
            yield os.readlink(folder / name)


def _listening(table: Path, port: int) -> list[str]:
    """The inodes of listening sockets of this port in one of the kernel's tables."""
    try:
        rows = [line.split() for line in table.read_text("ascii").splitlines()[1:]]
    except (OSError, UnicodeError):
        return []
    return [row[9] for row in rows if len(row) > 9 and row[3] == _LISTEN and row[1].endswith(f":{port:04X}")]
