"""What accelerators are doing now: memory, use, temperature. By NVIDIA's library (extra `gpu`), else by vendors' tools.

The library is imported where it is used and only on machines with such devices. It is quick enough for the event loop
(`is_quick`); a tool is a process, and belongs in a thread.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from marserve.machine.accelerators import MIB, Run, Vendor, card_rows

log = logging.getLogger("marserve.machine")

_NVIDIA_QUERY = "index,utilization.gpu,memory.used,memory.total,utilization.memory,temperature.gpu"


class DeviceReading(NamedTuple):
    """One device. `label` is its number as the vendor counts (`GPU:INSTANCE` for MIG); None is what it does not tell.

    `busy_percent` is the time in which it computed, `memory_busy_percent` that in which its memory was read or written.
    """

    label: str
    used_bytes: int | None
    total_bytes: int | None
    busy_percent: float | None = None
    memory_busy_percent: float | None = None
    celsius: float | None = None

    @property
    def free_bytes(self) -> int | None:
        """What a process could still have."""
        if self.used_bytes is None or not self.total_bytes:
            return None
        return max(0, self.total_bytes - self.used_bytes)


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


def import_nvml() -> Any:
    """NVIDIA's library by the package nvidia-ml-py. Raises ImportError without it."""
    return importlib.import_module("pynvml")


class DeviceReader:
    """Reads the devices of one vendor. `close` when done."""

    def __init__(self, vendor: Vendor | None, run: Run, load_nvml: Callable[[], Any] = import_nvml) -> None:
        self._vendor = vendor
        self._run = run
        self._nvml: Any = None
        if vendor == "nvidia":
            self._open(load_nvml)

    def _open(self, load_nvml: Callable[[], Any]) -> None:
        try:
            nvml = load_nvml()
        except ImportError:
            log.info("Devices are read by nvidia-smi; pip install marserve[gpu] reads them without starting a process.")
            return
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            log.warning("Devices are read by nvidia-smi: NVIDIA's library does not answer (%s)", error)
            return
        self._nvml = nvml

    @property
    def is_quick(self) -> bool:
        """Whether reading takes microseconds, not the time of a process."""
        return self._nvml is not None

    @property
    def reads_something(self) -> bool:
        """Whether there is anything to be read for this vendor's devices."""
        return self._vendor in ("nvidia", "amd")

    def read(self) -> list[DeviceReading]:
        """All installed devices, visible or not; empty where nothing tells. Blocks unless `is_quick`."""
        if self._nvml is not None:
            try:
                return _read_nvml(self._nvml)
            except self._nvml.NVMLError as error:
                log.warning("Devices are read by nvidia-smi from now on: NVIDIA's library failed (%s)", error)
                self.close()
        if self._vendor == "nvidia":
            query = [f"--query-gpu={_NVIDIA_QUERY}", "--format=csv,noheader,nounits"]
            return read_table(self._run(["nvidia-smi", *query]))
        if self._vendor == "amd":
            return read_cards(self._run(["rocm-smi", "--showuse", "--showmeminfo", "vram", "--showtemp", "--csv"]))
        return []

    def close(self) -> None:
        """Let go of the library."""
        nvml, self._nvml = self._nvml, None
        if nvml is not None:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlShutdown()


def _read_nvml(nvml: Any) -> list[DeviceReading]:
    found = []
    for number in range(nvml.nvmlDeviceGetCount()):
        gpu = nvml.nvmlDeviceGetHandleByIndex(number)
        instances = _instances(nvml, gpu)
        if instances is None:
            found.append(_read_device(nvml, gpu, str(number)))
            continue
        celsius = _temperature(nvml, gpu)
        for place, instance in instances:  # what an instance does is not told, what its GPU's temperature is, is
            found.append(_read_device(nvml, instance, f"{number}:{place}")._replace(celsius=celsius))
    return found


def _instances(nvml: Any, gpu: Any) -> list[tuple[int, Any]] | None:
    """The MIG instances of a GPU with their numbers; None where it is whole."""
    mode = _ask(nvml, lambda: nvml.nvmlDeviceGetMigMode(gpu))
    if not mode or mode[0] != nvml.NVML_DEVICE_MIG_ENABLE:
        return None
    most = _ask(nvml, lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)) or 0
    found = []
    for place in range(most):
        instance = _ask(nvml, partial(nvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu, place))
        if instance is not None:
            found.append((place, instance))
    return found


def _read_device(nvml: Any, handle: Any, label: str) -> DeviceReading:
    memory = _ask(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    use = _ask(nvml, lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
    return DeviceReading(
        label,
        # What the driver keeps for itself is in neither `free` nor, with the newer call, `used`: free is what counts.
        None if memory is None else int(memory.total) - int(memory.free),
        None if memory is None else int(memory.total),
        None if use is None else float(use.gpu),
        None if use is None else float(use.memory),
        _temperature(nvml, handle),
    )


def _temperature(nvml: Any, handle: Any) -> float | None:
    celsius = _ask(nvml, lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
    return None if celsius is None else float(celsius)


def _ask(nvml: Any, question: Callable[[], Any]) -> Any:
    """An answer of the library, None for what a device does not tell. A library that is gone still raises."""
    try:
        return question()
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_NotFound, nvml.NVMLError_NoPermission):
        return None
    except nvml.NVMLError_InvalidArgument:  # some drivers' word for "not of an instance"
        return None


def read_table(text: str) -> list[DeviceReading]:
    """The rows of nvidia-smi's table; cells it has no figure for say so in words."""
    readings = []
    for row in csv.reader(text.splitlines()):
        index, busy, used, total, memory_busy, celsius = ([_number(cell) for cell in row] + [None] * 6)[:6]
        if index is not None:
            memory = [None if mib is None else int(mib * MIB) for mib in (used, total)]
            readings.append(DeviceReading(str(int(index)), memory[0], memory[1], busy, memory_busy, celsius))
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
