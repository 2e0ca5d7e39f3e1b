"""Looks at the machine: cores, memory, disk, host name, accelerators. Plain data; never imports a device's library.

A container's limits (cgroup v2 and v1) count, not the host's. Looking is cheap: files of /proc and /sys, and a
vendor's tool only where it is installed (`accelerators.py`, `device_readings.py`).
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from marserve.machine.accelerators import Accelerator, Run, Vendor, find_installed
from marserve.machine.device_readings import DeviceReader, DeviceReading
from marserve.machine.visible import choose_visible

_ROOT = Path("/")
_MIB = 1024 * 1024
_GIB = 1024 * _MIB


class Machine(NamedTuple):
    """What there is. Memory and disk in bytes; `cores` is how many may be busy at once, at least 1.

    `devices` are those that workers may see, as they count them.
    """

    hostname: str
    cores: int
    memory_bytes: int
    disk_bytes: int
    vendor: Vendor | None
    devices: tuple[Accelerator, ...]

    @property
    def accelerators(self) -> int:
        """How many devices workers may see."""
        return len(self.devices)


class Reading(NamedTuple):
    """One figure of the machine under TorchServe's name. `device` is the number of the accelerator that it is of."""

    name: str
    value: float
    device: str | None = None


def run_tool(command: Sequence[str]) -> str:
    """What a vendor's tool prints, or nothing when it fails or takes longer than 10 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def describe_machine(
    environment: Mapping[str, str], root: Path = _ROOT, run: Run = run_tool, *, is_strict: bool = False
) -> Machine:
    """Look once, at start.

    `environment` says which devices are visible, `is_strict` how that is read (`visible.py`). `root` stands for `/` in
    tests. May start a vendor's tool, so do not call it on the event loop. Raises BadSettings for a list of visible
    devices that cannot be.
    """
    vendor, installed = find_installed(environment, run)
    return Machine(
        hostname=_hostname(),
        cores=count_cores(root),
        memory_bytes=_memory(root)[0],
        disk_bytes=shutil.disk_usage(root).total,
        vendor=vendor,
        devices=choose_visible(installed, vendor, environment, is_strict=is_strict),
    )


def count_cores(root: Path = _ROOT) -> int:
    """How many cores may be busy at once: those of the affinity mask, cut by the container's quota, at least 1."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    quota = _cpu_quota(root)
    return max(1, min(cores, int(quota))) if quota else max(1, cores)


def available_bytes(root: Path = _ROOT) -> int | None:
    """How many bytes of memory could be had now, the container's where it has a limit; None where that is not told."""
    total, available = _memory(root)
    return available if total else None


class Meter:
    """Reads TorchServe's system metrics. The processor's share is that since the reading before."""

    def __init__(self, reader: DeviceReader | None = None, root: Path = _ROOT) -> None:
        """`reader` reads the accelerators; None: there are none."""
        self._reader = reader
        self._root = root
        self._cpu_before = _cpu_ticks(root)

    def read(self) -> list[Reading]:
        """Read everything now. May start a vendor's tool, so do not call it on the event loop."""
        return [*self._cpu(), *self._memory(), *self._disk(), *self._gpus()]

    def _cpu(self) -> list[Reading]:
        busy, total = _cpu_ticks(self._root)
        busy_before, total_before = self._cpu_before
        self._cpu_before = busy, total
        if total <= total_before:
            return [Reading("CPUUtilization", 0.0)]
        share = 100.0 * (busy - busy_before) / (total - total_before)
        return [Reading("CPUUtilization", round(min(100.0, max(0.0, share)), 1))]

    def _memory(self) -> list[Reading]:
        total, available = _memory(self._root)
        if not total:
            return []
        return [
            Reading("MemoryUsed", (total - available) / _MIB),
            Reading("MemoryAvailable", available / _MIB),
            Reading("MemoryUtilization", round(100.0 * (total - available) / total, 1)),
        ]

    def _disk(self) -> list[Reading]:
        disk = shutil.disk_usage(self._root)
        return [
            Reading("DiskUsage", disk.used / _GIB),
            Reading("DiskAvailable", disk.free / _GIB),
            Reading("DiskUtilization", round(100.0 * disk.used / max(1, disk.used + disk.free), 1)),
        ]

    def _gpus(self) -> list[Reading]:
        return [] if self._reader is None else figures_of(self._reader.read())


def figures_of(devices: Sequence[DeviceReading]) -> list[Reading]:
    """TorchServe's figures of these devices; none that a device does not tell."""
    readings = []
    for device in devices:
        if device.used_bytes is not None:
            if device.total_bytes:
                share = 100.0 * device.used_bytes / device.total_bytes
                readings.append(Reading("GPUMemoryUtilization", round(share, 1), device.label))
            readings.append(Reading("GPUMemoryUsed", device.used_bytes / _MIB, device.label))
        if device.busy_percent is not None:
            readings.append(Reading("GPUUtilization", device.busy_percent, device.label))
    return readings


def _hostname() -> str:
    return socket.gethostname() or "Unknown"


def _cpu_ticks(root: Path) -> tuple[int, int]:
    """Busy and total ticks since boot, of all processors together."""
    fields = [int(field) for field in _read(root / "proc/stat").split("\n", 1)[0].split()[1:9]]
    if len(fields) < 5:
        return 0, 0
    idle = fields[3] + fields[4]
    return sum(fields) - idle, sum(fields)


def _memory(root: Path) -> tuple[int, int]:
    """Total and available bytes, those of the container where it has a limit under the host's."""
    kib = {name: int(size) for name, size in re.findall(r"(\w+):\s+(\d+) kB", _read(root / "proc/meminfo"))}
    total, available = kib.get("MemTotal", 0) * 1024, kib.get("MemAvailable", 0) * 1024
    if not total:  # no /proc: macOS
        try:
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (ValueError, OSError):
            return 0, 0
        return total, total
    for limit_file, used_file in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        limit, used = _int(_read(root / limit_file)), _int(_read(root / used_file))
        if limit is not None and limit < total:
            return limit, min(available, max(0, limit - (used or 0)))
    return total, available


def _cpu_quota(root: Path) -> float | None:
    quota, _, period = _read(root / "sys/fs/cgroup/cpu.max").partition(" ")
    if not period:
        quota = _read(root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us")
        period = _read(root / "sys/fs/cgroup/cpu/cpu.cfs_period_us")
    allowed, every = _int(quota), _int(period)
    return allowed / every if allowed and every and allowed > 0 else None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _int(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None
