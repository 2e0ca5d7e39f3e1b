"""Reads what accelerators do now: memory, use, temperature. By NVIDIA's library (extra `gpu`), else by vendors' tools.

The library is imported where it is used and only on machines with such devices. It answers in microseconds (`is_quick`)
where the driver is well; library and tools may hang where it is not, and belong in a thread of their own.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from marserve.machine.accelerators import MIB, DeviceReading, Vendor, sys_bus_id
from marserve.machine.finding import card_rows
from marserve.machine.vendors.nvml import Nvml, NvmlMissing, import_nvml
from marserve.machine.vendors.tables import Unreadable, read_figure, read_integer, read_rows
from marserve.machine.vendors.tools import Run

log = logging.getLogger("marserve.machine")

_NVIDIA_QUERY = "index,utilization.gpu,memory.free,memory.total,utilization.memory,temperature.gpu,uuid"
# What nvidia-smi writes in the row of a device that is gone, and of one that may be gone: its figures are missing then.
_LOST = re.compile(r"GPU is lost|Reset Required|GPU requires reset", re.IGNORECASE)
_UNKNOWN = re.compile(r"Unknown Error", re.IGNORECASE)
# What it prints in place of the row, of a device that fell off its bus.
_NO_HANDLE = re.compile(
    r"Unable to determine the device handle for (?:GPU)?\s*(?:\d+:\s*)?"
    r"([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]):\s*(.*?)\s*(?=Unable to determine|\n|$)",
    re.IGNORECASE,
)
_NO_DEVICES = re.compile(r"No devices were found", re.IGNORECASE)
# How long the library, in trouble or with a lost device, is used before it is opened anew: what it knows of a device
# may be that of before its reset.
REOPEN_S = 15.0


class Readings(NamedTuple):
    """All installed devices, visible or not; empty if nothing can be read.

    `is_complete`: all devices were read, so a device that is missing here is gone.
    """

    devices: Sequence[DeviceReading] = ()
    is_complete: bool = False


def describe_usage(gpu_id: int, reading: DeviceReading | None) -> str:
    """A worker's device in the words of TorchServe's describe."""
    if reading is None or reading.used_bytes is None:
        return "failed to obtained gpu usage"
    busy, memory = (
        "N/A" if share is None else f"{share:g}" for share in (reading.busy_percent, reading.memory_busy_percent)
    )
    return (
        f"gpuId::{gpu_id} utilization.gpu::{busy} % utilization.memory::{memory} % "
        f"memory.used::{reading.used_bytes // MIB} MiB"
    )


class DeviceReader:
    """Reads the devices of one vendor. `close` when done. `read` and `close` block; call them off the event loop.

    A device in trouble gets a reading that says so, and the others are read. The library answers in microseconds where
    the driver is well, and may hang where it is not, as the tools may.
    """

    def __init__(
        self,
        vendor: Vendor | None,
        run: Run,
        load_nvml: Callable[[], Any] = import_nvml,
        tool: str = "nvidia-smi",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tool` is the path of NVIDIA's tool, asked where there is no library. Nothing is opened before `read`."""
        self._vendor = vendor
        self._run = run
        self._tool = tool
        self._load_nvml = load_nvml
        self._clock = clock
        self._nvml: Nvml | None = None
        self._open_again_at = -math.inf if vendor == "nvidia" else math.inf
        self._told = self._told_of_library = ""

    @property
    def is_quick(self) -> bool:
        """Whether reading takes microseconds, not the time of a process."""
        return self._nvml is not None

    @property
    def reads_something(self) -> bool:
        """Whether this vendor's devices can be read."""
        return self._vendor in ("nvidia", "amd")

    def read(self) -> Readings:
        """All installed devices, visible or not; empty if nothing can be read."""
        nvml = self._open()
        if nvml is not None:
            try:
                devices = nvml.read()
            except NvmlMissing as error:
                self._complain(f"{error}; devices are read by nvidia-smi meanwhile")
                self._open_again_at = min(self._open_again_at, self._clock() + REOPEN_S)
            else:
                if any(device.is_lost for device in devices):
                    self._open_again_at = min(self._open_again_at, self._clock() + REOPEN_S)
                return Readings(devices, is_complete=True)
        if self._vendor == "nvidia":
            query = [f"--query-gpu={_NVIDIA_QUERY}", "--format=csv,noheader,nounits"]
            return self._read_tool([self._tool, *query], read_table)
        if self._vendor == "amd":
            asked = ["rocm-smi", "--showuse", "--showmeminfo", "vram", "--showtemp", "--csv"]
            return self._read_tool(asked, read_cards)
        return Readings()

    def close(self) -> None:
        """Close the library for good."""
        self._open_again_at = math.inf
        self._let_go()

    def _open(self) -> Nvml | None:
        """The opened library; reopened if it is due."""
        if self._clock() < self._open_again_at:
            return self._nvml
        self._open_again_at = math.inf
        self._let_go()
        try:
            self._nvml = Nvml(self._load_nvml)
        except NvmlMissing as error:
            if not isinstance(error.__cause__, ImportError):
                self._open_again_at = self._clock() + REOPEN_S
            self._tell_once("Devices are read by nvidia-smi, a process each time (%s; marserve[gpu] has it).", error)
        return self._nvml

    def _let_go(self) -> None:
        nvml, self._nvml = self._nvml, None
        if nvml is not None:
            nvml.close()

    def _tell_once(self, text: str, error: NvmlMissing) -> None:
        if self._told_of_library != str(error):
            self._told_of_library = str(error)
            log.info(text, error)

    def _read_tool(self, command: list[str], read: Callable[[str], Readings]) -> Readings:
        output = self._run(command)
        try:
            readings = read(f"{output.text}\n{output.complaint}")  # text beside its table may be in either
        except Unreadable as error:
            self._complain(f"what {command[0].rpartition('/')[2]} printed cannot be read: {error}")
            return Readings()
        self._complain(output.complaint)
        return readings

    def _complain(self, complaint: str) -> None:
        """Log a complaint when it is new or has changed."""
        if complaint != self._told:
            self._told = complaint
            if complaint:
                log.warning("Devices: %s", complaint)


def read_table(text: str) -> Readings:
    """The rows of nvidia-smi's table; cells it has no figure for say so in words, as `[GPU is lost]`.

    A device that fell off its bus may have a sentence with its address in place of a row. Raises Unreadable.
    """
    readings = []
    for row in read_rows(text):
        if len(row) not in (6, 7) or read_integer(row[0]) is None:
            continue
        busy, free, total, memory_busy, celsius = (read_figure(cell) for cell in row[1:6])
        patterns = (_LOST,) if total is not None else (_LOST, _UNKNOWN)
        lost = next((found[0] for cell in row[1:] for each in patterns if (found := each.search(cell))), "")
        size = None if total is None else int(total * MIB)
        used = None if free is None or size is None else size - int(free * MIB)
        uuid = row[6] if len(row) == 7 else ""
        reading = DeviceReading(row[0], used, size, busy, memory_busy, celsius, lost, is_lost=bool(lost))
        readings.append(reading._replace(uuid=uuid if uuid.startswith("GPU-") else ""))
    gone = {sys_bus_id(found[1]): found[2] for found in _NO_HANDLE.finditer(text)}
    readings += [DeviceReading("", None, None, trouble=gone[at], is_lost=True, bus_id=at) for at in gone]
    # Where a sentence stands for a device, rows of others may be missing with it.
    return Readings(readings, is_complete=not gone and (bool(readings) or _NO_DEVICES.search(text) is not None))


def read_cards(text: str) -> Readings:
    """The rows of rocm-smi's table, by the place of each card. Raises Unreadable."""
    readings = []
    for place, row in enumerate(card_rows(text)):
        memory = [read_figure(row.get(name) or "") for name in ("VRAM Total Used Memory (B)", "VRAM Total Memory (B)")]
        used, total = (None if size is None else int(size) for size in memory)
        celsius = next((read_figure(cell or "") for name, cell in row.items() if name and "edge" in name), None)
        readings.append(
            DeviceReading(str(place), used, total, read_figure(row.get("GPU use (%)") or ""), celsius=celsius)
        )
    return Readings(readings, is_complete=bool(readings))
