"""What accelerators are doing now: memory, use, temperature. By NVIDIA's library (extra `gpu`), else by vendors' tools.

The library is imported where it is used and only on machines with such devices. It is quick enough for the event loop
(`is_quick`); a tool is a process, and belongs in a thread.
"""

from __future__ import annotations

import csv
import logging
import re
from collections.abc import Callable
from typing import Any

from marserve.machine.accelerators import MIB, DeviceReading, Vendor
from marserve.machine.finding import card_rows
from marserve.machine.nvml import Nvml, NvmlMissing, import_nvml
from marserve.machine.tools import Run

log = logging.getLogger("marserve.machine")

_NVIDIA_QUERY = "index,utilization.gpu,memory.free,memory.total,utilization.memory,temperature.gpu"
# What nvidia-smi writes into a row of a device that is gone.
_LOST = re.compile(r"GPU is lost|Unknown Error|Reset Required|GPU requires reset", re.IGNORECASE)


def describe_usage(gpu_id: int, reading: DeviceReading | None) -> str:
    """What TorchServe's describe says of a worker's device."""
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
    """Reads the devices of one vendor. `close` when done. All but `is_quick` blocks; call it off the event loop.

    A device in trouble gets a reading that says so, and the others are read. The library answers in microseconds where
    the driver is well, and may hang where it is not, as the tools may.
    """

    def __init__(
        self, vendor: Vendor | None, run: Run, load_nvml: Callable[[], Any] = import_nvml, tool: str = "nvidia-smi"
    ) -> None:
        """`tool` is the path of NVIDIA's tool, asked where there is no library."""
        self._vendor = vendor
        self._run = run
        self._tool = tool
        self._nvml: Nvml | None = None
        self._told = ""
        if vendor == "nvidia":
            try:
                self._nvml = Nvml(load_nvml)
            except NvmlMissing as error:
                log.info("Devices are read by nvidia-smi, a process each time (%s; marserve[gpu] has it).", error)

    @property
    def is_quick(self) -> bool:
        """Whether reading takes microseconds, not the time of a process."""
        return self._nvml is not None

    @property
    def reads_something(self) -> bool:
        """Whether there is anything to be read for this vendor's devices."""
        return self._vendor in ("nvidia", "amd")

    def read(self) -> list[DeviceReading]:
        """All installed devices, visible or not; empty where nothing tells."""
        if self._nvml is not None:
            try:
                return self._nvml.read()
            except NvmlMissing as error:
                self._tell(f"{error}; devices are read by nvidia-smi meanwhile")
        if self._vendor == "nvidia":
            query = [f"--query-gpu={_NVIDIA_QUERY}", "--format=csv,noheader,nounits"]
            return self._read_tool([self._tool, *query], read_table)
        if self._vendor == "amd":
            asked = ["rocm-smi", "--showuse", "--showmeminfo", "vram", "--showtemp", "--csv"]
            return self._read_tool(asked, read_cards)
        return []

    def close(self) -> None:
        """Let go of the library."""
        nvml, self._nvml = self._nvml, None
        if nvml is not None:
            nvml.close()

    def _read_tool(self, command: list[str], read: Callable[[str], list[DeviceReading]]) -> list[DeviceReading]:
        told = self._run(command)
        self._tell(told.complaint)
        return read(told.text)

    def _tell(self, complaint: str) -> None:
        """Log a complaint when it begins or changes."""
        if complaint != self._told:
            self._told = complaint
            if complaint:
                log.warning("Devices: %s", complaint)


def read_table(text: str) -> list[DeviceReading]:
    """The rows of nvidia-smi's table; cells it has no figure for say so in words, as `[GPU is lost]`."""
    readings = []
    for row in csv.reader(text.splitlines()):
        if len(row) != 6 or not row[0].strip().isdecimal():
            continue
        busy, free, total, memory_busy, celsius = (_number(cell) for cell in row[1:])
        lost = next((found[0] for cell in row[1:] if (found := _LOST.search(cell))), "")
        size = None if total is None else int(total * MIB)
        used = None if free is None or size is None else size - int(free * MIB)
        label = row[0].strip()
        readings.append(DeviceReading(label, used, size, busy, memory_busy, celsius, lost, is_lost=bool(lost)))
    return readings


def read_cards(text: str) -> list[DeviceReading]:
    """The rows of rocm-smi's table, by the place of each card."""
    readings = []
    for place, row in enumerate(card_rows(text)):
        memory = [_number(row.get(name) or "") for name in ("VRAM Total Used Memory (B)", "VRAM Total Memory (B)")]
        used, total = (None if size is None else int(size) for size in memory)
        celsius = next((_number(cell or "") for name, cell in row.items() if name and "edge" in name), None)
        readings.append(DeviceReading(str(place), used, total, _number(row.get("GPU use (%)") or ""), celsius=celsius))
    return readings


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
