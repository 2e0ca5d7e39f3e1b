"""How much memory processes hold, and whether the kernel has killed any for want of it. Reads `/proc` and cgroups.

A worker's own memory is what would be free again if it alone ended: its private dirty pages, and its swap. Pages that
it shares with its template are not its own. Knows no workers and decides nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

# For how long after a kill was seen a worker's end may be attributed to it.
CLAIM_WITHIN_S = 5.0

_KIB = 1024


class Held(NamedTuple):
    """What a process holds, in bytes: its own, and with its share of shared pages (PSS); both with swap.

    Zeros if that cannot be read.
    """

    own: int
    proportional: int


def held_bytes(pid: int, proc: Path = Path("/proc")) -> Held:
    """What the process holds.

    The kernel walks the process's page tables: milliseconds for gigabytes, so call it from a thread, and once.
    """
    try:
        text = (proc / str(pid) / "smaps_rollup").read_text()
    except (OSError, ValueError):
        return Held(0, 0)
    sizes = dict(_sizes(text))
    swapped = sizes.get("SwapPss", 0)
    return Held((sizes.get("Private_Dirty", 0) + swapped) * _KIB, (sizes.get("Pss", 0) + swapped) * _KIB)


def own_bytes(pid: int, proc: Path = Path("/proc")) -> int:
    """The process's own memory in bytes; 0 if that cannot be read. Costs as much as `held_bytes`."""
    return held_bytes(pid, proc).own


def past_peak_bytes(pid: int, proc: Path = Path("/proc")) -> int:
    """How much more the process held at its peak than now; 0 if that cannot be read."""
    try:
        sizes = dict(_sizes((proc / str(pid) / "status").read_text()))
    except (OSError, ValueError):
        return 0
    return max(0, sizes.get("VmHWM", 0) - sizes.get("VmRSS", 0)) * _KIB


def resident_bytes(pid: int, proc: Path = Path("/proc")) -> int:
    """Resident memory of a process, shared pages included; 0 if that cannot be read."""
    if pid <= 0:
        return 0
    try:
        return int((proc / str(pid) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _sizes(text: str) -> Iterable[tuple[str, int]]:
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdigit():
            yield name, int(words[0])


def count_oom_kills(events: str) -> int:
    """The number behind `oom_kill` in a cgroup's `memory.events` (v2) or `memory.oom_control` (v1); 0 without one."""
    for line in events.splitlines():
        name, _, number = line.partition(" ")
        if name == "oom_kill" and number.strip().isdigit():
            return int(number)
    return 0


def find_events_file(self_cgroup: str, mounts: str) -> Path | None:
    """The file that counts kills for memory in the cgroup of a process, from its `/proc/…/cgroup` and `…/mounts`.

    None if no memory cgroup can be seen. A container sees its own cgroup as the root.
    """
    v1, v2 = "", ""
    for line in self_cgroup.splitlines():
        _, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "-", "")
        if "memory" in controllers.split(","):
            v1 = path
        elif not controllers:
            v2 = path
    for line in mounts.splitlines():
        words = line.split(" ")
        if len(words) < 4:
            continue
        _, where, kind, options = words[:4]
        if kind == "cgroup" and v1 and "memory" in options.split(","):
            path, name = v1, "memory.oom_control"
        elif kind == "cgroup2" and v2 and not v1:
            path, name = v2, "memory.events"
        else:
            continue
        for folder in (Path(where) / path.lstrip("/"), Path(where)):
            if (folder / name).is_file():
                return folder / name
    return None


class OomKills:
    """Kills for memory in the server's cgroup, as the kernel counts them.

    `events` is the file that counts, None without one: then no kill is ever seen. A kill that is not claimed soon
    was of another's process. Call `look` once a second. Times are monotonic seconds.
    """

    def __init__(self, events: Path | None) -> None:
        self._events = events
        self._seen = self._count()
        self._unclaimed: list[float] = []

    @property
    def can_be_seen(self) -> bool:
        """Whether there is a file that counts."""
        return self._events is not None

    def look(self, now: float) -> None:
        """Count the kills since the last look, and forget old ones that were not claimed."""
        count = self._count()
        self._unclaimed = [at for at in self._unclaimed if now - at < CLAIM_WITHIN_S]
        self._unclaimed += [now] * (count - self._seen)
        self._seen = max(self._seen, count)

    def claim(self, now: float) -> bool:
        """Whether there was a recent kill to which no death was attributed yet; the caller's is attributed to it."""
        self.look(now)
        if not self._unclaimed:
            return False
        del self._unclaimed[0]
        return True

    def _count(self) -> int:
        if self._events is None:
            return 0
        try:
            return count_oom_kills(self._events.read_text())
        except OSError:
            return 0


def watch_oom_kills(proc: Path = Path("/proc")) -> OomKills:
    """The counter of the cgroup that this process is in."""
    try:
        file = find_events_file((proc / "self/cgroup").read_text(), (proc / "self/mounts").read_text())
    except OSError:
        file = None
    return OomKills(file)
