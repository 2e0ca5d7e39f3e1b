"""Looks at the machine: cores, memory, disk, host name, accelerators. Plain data; never imports a device's library.

A container's limits (cgroup v2 and v1) count, not the host's. Looking is cheap: files of /proc and /sys, and a
vendor's tool only where it is installed (`accelerators.py`, `device_readings.py`).
"""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from marserve.errors import BadSettings, without_stop
from marserve.machine.accelerators import Accelerator, DeviceReading, Vendor
from marserve.machine.finding import Installed, find_installed, has_nvidia_driver
from marserve.machine.limits import read_or_empty
from marserve.machine.vendors.nvml import import_nvml
from marserve.machine.vendors.tools import Run, Tools
from marserve.machine.visible import choose_visible, names_device

_ROOT = Path("/")
_MIB = 1024 * 1024
_GIB = 1024 * _MIB


class Machine(NamedTuple):
    """What there is. Memory and disk in bytes; `cores` is how many may be busy at once, at least 1.

    `devices` are those that workers may see, as they count them. `remarks` are sentences about devices that could not
    be read. `tool` is the path of the vendor's tool, empty without one.
    """

    hostname: str
    cores: int
    memory_bytes: int
    disk_bytes: int
    vendor: Vendor | None
    devices: tuple[Accelerator, ...]
    remarks: tuple[str, ...] = ()
    tool: str = ""

    @property
    def accelerators(self) -> int:
        """How many devices workers may see."""
        return len(self.devices)


class Reading(NamedTuple):
    """One figure of the machine under TorchServe's name. `device` is the number of the accelerator that it is of."""

    name: str
    value: float
    device: str | None = None


# How long all of the vendors' tools together may take at a start: one on a busy node takes more than ten seconds.
LOOK_S = 60.0


def describe_machine(
    environment: Mapping[str, str],
    root: Path = _ROOT,
    run: Run | None = None,
    *,
    is_strict: bool = False,
    uses_devices: bool = True,
    load_nvml: Callable[[], Any] = import_nvml,
) -> Machine:
    """Look once, at start.

    `environment` says which devices are visible, `is_strict` how that is read (`visible.py`). `root` stands for `/` in
    tests, `run` runs tools. Without `uses_devices` none is looked for. May start a vendor's tool and wait for it, up to
    60 s for all, so do not call it on the event loop. Raises BadSettings for a list of visible devices that cannot be,
    and, if strict, when the machine or the environment names devices and none can be read.
    """
    installed = Installed(None, ())
    if uses_devices:
        installed = find_installed(environment, run or Tools(LOOK_S), root, load_nvml)
    remarks = tuple(f"Accelerators: {complaint}" for complaint in installed.complaints)
    if uses_devices and not installed.devices and (why := _why_expected(environment, root)):
        said = "; ".join(installed.complaints) or "nvidia-smi is not installed, in PATH or /usr/local/nvidia/bin"
        sentence = f"{why}, and no device can be read: {said}"
        if is_strict:
            raise BadSettings(
                f"{without_stop(sentence)}. Mend the driver, or set number_of_gpu=0 to serve without devices",
                key="number_of_gpu",
            )
        remarks = (f"{without_stop(sentence)}. Models are served without devices.",)
    return Machine(
        hostname=_hostname(),
        cores=count_cores(root),
        memory_bytes=_memory(root)[0],
        disk_bytes=shutil.disk_usage(root).total,
        vendor=installed.vendor,
        devices=choose_visible(installed.devices, installed.vendor, environment, is_strict=is_strict),
        remarks=remarks,
        tool=installed.tool,
    )


def _why_expected(environment: Mapping[str, str], root: Path) -> str:
    """Which sign there is of NVIDIA devices; empty without one."""
    name = "CUDA_VISIBLE_DEVICES"
    if names_device(environment.get(name, "")):
        return f"{name} is {environment[name]!r}"
    if has_nvidia_driver(root) and name not in environment:
        return "NVIDIA's driver is here (/dev/nvidiactl)"
    return ""


def count_cores(root: Path = _ROOT) -> int:
    """How many cores may be busy at once: those of the affinity mask, cut by the container's quota, at least 1."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    quota = _cpu_quota(root)
    return max(1, min(cores, int(quota))) if quota else max(1, cores)


def available_bytes(root: Path = _ROOT) -> int | None:
    """How many bytes of memory are available, the container's if it has a limit; None if unknown."""
    total, available = _memory(root)
    return available if total else None


class Meter:
    """Reads TorchServe's system metrics. The processor's share is that since the reading before."""

    def __init__(self, devices: Callable[[], Sequence[DeviceReading]] = tuple, root: Path = _ROOT) -> None:
        """`devices` gives the latest readings of the accelerators."""
        self._devices = devices
        self._root = root
        self._cpu_before = _cpu_ticks(root)

    def read(self) -> list[Reading]:
        """Read everything except the accelerators now. Reads files, so do not call it on the event loop."""
        return [*self._cpu(), *self._memory(), *self._disk(), *figures_of(self._devices())]

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


def figures_of(devices: Sequence[DeviceReading]) -> list[Reading]:
    """TorchServe's figures of these devices, as far as each reports them."""
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
    fields = [int(field) for field in read_or_empty(root / "proc/stat").split("\n", 1)[0].split()[1:9]]
    if len(fields) < 5:
        return 0, 0
    idle = fields[3] + fields[4]
    return sum(fields) - idle, sum(fields)


def _memory(root: Path) -> tuple[int, int]:
    """Total and available bytes, those of the container where it has a limit under the host's."""
    kib = {name: int(size) for name, size in re.findall(r"(\w+):\s+(\d+) kB", read_or_empty(root / "proc/meminfo"))}
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
        limit, used = _int(read_or_empty(root / limit_file)), _int(read_or_empty(root / used_file))
        if limit is not None and limit < total:
            return limit, min(available, max(0, limit - (used or 0)))
    return total, available


def _cpu_quota(root: Path) -> float | None:
    quota, _, period = read_or_empty(root / "sys/fs/cgroup/cpu.max").partition(" ")
    if not period:
        quota = read_or_empty(root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us")
        period = read_or_empty(root / "sys/fs/cgroup/cpu/cpu.cfs_period_us")
    allowed, every = _int(quota), _int(period)
    return allowed / every if allowed and every and allowed > 0 else None


def _int(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None
