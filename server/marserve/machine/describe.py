"""Looks at the machine: cores, memory, disk, host name, accelerators. Plain data; never imports a device's library.

A container's limits (cgroup v2 and v1) count, not the host's. Looking is cheap: files of /proc and /sys, and a
vendor's tool only where it is installed. Accelerators are found by these tools, in TorchServe's order: `rocm-smi`,
`nvidia-smi`, `xpu-smi`, and Apple's by the kind of machine.
"""

from __future__ import annotations

import csv
import os
import platform
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from marserve.machine.devices import Vendor, count_visible

Run = Callable[[Sequence[str]], str]

_ROOT = Path("/")
_MIB = 1024 * 1024
_GIB = 1024 * _MIB


class Machine(NamedTuple):
    """What there is. Memory and disk in bytes; `cores` is how many may be busy at once, at least 1.

    `accelerators` are those that workers may see, `gpu_names` their models as the vendor calls them.
    """

    hostname: str
    cores: int
    memory_bytes: int
    disk_bytes: int
    vendor: Vendor | None
    accelerators: int
    gpu_names: tuple[str, ...]


class Reading(NamedTuple):
    """One figure of the machine under TorchServe's name. `device` is set for figures of an accelerator."""

    name: str
    value: float
    device: int | None = None


def run_tool(command: Sequence[str]) -> str:
    """What a vendor's tool prints, or nothing when it fails or takes longer than 10 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def describe_machine(environment: Mapping[str, str], root: Path = _ROOT, run: Run = run_tool) -> Machine:
    """Look once, at start.

    `environment` says which devices are visible. `root` stands for `/` in tests. May start a vendor's tool, so do not
    call it on the event loop. Raises BadSettings for a list of visible devices that is no list of numbers.
    """
    vendor, names = _find_accelerators(environment, run)
    return Machine(
        hostname=_hostname(),
        cores=count_cores(root),
        memory_bytes=_memory(root)[0],
        disk_bytes=shutil.disk_usage(root).total,
        vendor=vendor,
        accelerators=count_visible(len(names), vendor, environment),
        gpu_names=names,
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

    def __init__(self, machine: Machine, root: Path = _ROOT, run: Run = run_tool) -> None:
        self._machine = machine
        self._root = root
        self._run = run
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
        if self._machine.vendor == "nvidia" and self._machine.accelerators:
            return _read_nvidia(self._run)
        if self._machine.vendor == "amd" and self._machine.accelerators:
            return _read_amd(self._run)
        return []


def _hostname() -> str:
    return socket.gethostname() or "Unknown"


def _find_accelerators(environment: Mapping[str, str], run: Run) -> tuple[Vendor | None, tuple[str, ...]]:
    search = environment.get("PATH")
    tools: tuple[tuple[Vendor, str, Callable[[str, Run], list[str]]], ...] = (
        ("amd", "rocm-smi", _amd_names),
        ("nvidia", "nvidia-smi", _nvidia_names),
        ("intel", "xpu-smi", _intel_names),
    )
    for vendor, tool, names in tools:
        path = shutil.which(tool, path=search)
        found = names(path, run) if path else []
        if found:
            return vendor, tuple(found)
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return "apple", ("Apple GPU",)
    return None, ()


def _nvidia_names(tool: str, run: Run) -> list[str]:
    return [
        line.strip() for line in run([tool, "--query-gpu=name", "--format=csv,noheader"]).splitlines() if line.strip()
    ]


def _amd_names(tool: str, run: Run) -> list[str]:
    rows = _csv_rows(run([tool, "--showproductname", "--csv"]))
    return [row.get("Card Series") or row.get("Card series") or "AMD GPU" for row in rows]


def _intel_names(tool: str, run: Run) -> list[str]:
    return re.findall(r"Device Name:\s*(.+?)\s*\|?\s*$", run([tool, "discovery"]), re.MULTILINE)


def _read_nvidia(run: Run) -> list[Reading]:
    query = "--query-gpu=index,utilization.gpu,memory.used,memory.total"
    readings = []
    for row in csv.reader(run(["nvidia-smi", query, "--format=csv,noheader,nounits"]).splitlines()):
        index, busy, used, total = ([_float(cell) for cell in row] + [None] * 4)[:4]
        if index is not None:
            readings += _gpu_readings(int(index), busy, used, total)
    return readings


def _read_amd(run: Run) -> list[Reading]:
    readings = []
    for index, row in enumerate(_csv_rows(run(["rocm-smi", "--showuse", "--showmeminfo", "vram", "--csv"]))):
        used, total = (_float(row.get(name, "")) for name in ("VRAM Total Used Memory (B)", "VRAM Total Memory (B)"))
        readings += _gpu_readings(
            index,
            _float(row.get("GPU use (%)", "")),
            None if used is None else used / _MIB,
            None if total is None else total / _MIB,
        )
    return readings


def _gpu_readings(index: int, busy: float | None, used_mib: float | None, total_mib: float | None) -> list[Reading]:
    readings = []
    if used_mib is not None:
        if total_mib:
            readings.append(Reading("GPUMemoryUtilization", round(100.0 * used_mib / total_mib, 1), index))
        readings.append(Reading("GPUMemoryUsed", used_mib, index))
    if busy is not None:
        readings.append(Reading("GPUUtilization", busy, index))
    return readings


def _csv_rows(text: str) -> list[dict[str, str]]:
    return [row for row in csv.DictReader(text.strip().splitlines()) if (row.get("device") or "").startswith("card")]


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


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
