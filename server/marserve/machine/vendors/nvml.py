"""Asks NVIDIA's library (package nvidia-ml-py, extra `gpu`), device by device: a broken one does not hide the others.

The library is imported where it is used, and only on machines with such devices.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Any

from marserve.machine.accelerators import Accelerator, DeviceReading, sys_bus_id
from marserve.optional import trouble

# A device that answers so is gone; a device that fell off its bus may also be "not found" or "unknown".
_LOSSES = ("GpuIsLost", "ResetRequired", "IrqIssue")


class NvmlMissing(Exception):
    """The library cannot be asked; the message says why."""


def import_nvml() -> Any:
    """The library's module. Raises ImportError without it."""
    return importlib.import_module("pynvml")


class Nvml:
    """The opened library; close it, or use it as a context. Its calls take microseconds where the driver is well."""

    def __init__(self, load: Callable[[], Any] = import_nvml) -> None:
        """Open it. Raises NvmlMissing."""
        try:
            self._nvml = load()
        except ImportError as error:
            raise NvmlMissing("NVIDIA's library was not asked: the package nvidia-ml-py is not installed") from error
        except Exception as error:  # a broken library raises any class
            raise NvmlMissing(f"NVIDIA's library was not asked: {trouble('gpu', error)}") from error
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise NvmlMissing(f"NVIDIA's library does not answer ({error})") from error

    def __enter__(self) -> Nvml:
        """Give itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """Close the library."""
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def list_devices(self) -> tuple[list[Accelerator], list[str]]:
        """The devices that answer, MIG instances in the place of a GPU that is cut; and sentences about the others."""
        nvml = self._nvml
        found: list[Accelerator] = []
        complaints: list[str] = []
        try:
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            return [], [f"NVIDIA's library does not tell its devices ({error})"]
        for number in range(count):
            try:
                found += self._describe(number)
            except nvml.NVMLError as error:
                complaints.append(f"NVIDIA's library does not tell device {number} ({error})")
        return found, complaints

    def read(self) -> list[DeviceReading]:
        """All devices, one that is in trouble among them. Raises NvmlMissing where the library itself is gone."""
        nvml = self._nvml
        try:
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            raise NvmlMissing(f"NVIDIA's library failed ({error})") from error
        found: list[DeviceReading] = []
        for number in range(count):
            try:
                gpu = nvml.nvmlDeviceGetHandleByIndex(number)
            except nvml.NVMLError as error:
                is_lost = isinstance(error, self._kinds(*_LOSSES, "NotFound", "Unknown"))
                found.append(DeviceReading(str(number), None, None, trouble=str(error), is_lost=is_lost))
                continue
            try:
                found += self._read(number, gpu)
            except nvml.NVMLError as error:
                is_lost = isinstance(error, self._kinds(*_LOSSES))
                found.append(DeviceReading(str(number), None, None, trouble=str(error), is_lost=is_lost))
        return found

    def _kinds(self, *names: str) -> tuple[type[Exception], ...]:
        """The library's classes of these errors; an older package may lack some."""
        kinds = (getattr(self._nvml, f"NVMLError_{name}", None) for name in names)
        return tuple(kind for kind in kinds if isinstance(kind, type))

    def _describe(self, number: int) -> Iterator[Accelerator]:
        nvml = self._nvml
        gpu = nvml.nvmlDeviceGetHandleByIndex(number)
        name, bus_id = _text(nvml.nvmlDeviceGetName(gpu)), sys_bus_id(_text(nvml.nvmlDeviceGetPciInfo(gpu).busId))
        instances = self._instances(gpu)
        if instances is None:
            memory = self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(gpu))
            uuid = _text(self._ask(lambda: nvml.nvmlDeviceGetUUID(gpu)) or "")
            size = 0 if memory is None else int(memory.total)
            return iter([Accelerator(name, str(number), str(number), uuid, size, bus_id)])
        parts = []
        for place, instance in instances:
            uuid = _text(nvml.nvmlDeviceGetUUID(instance))
            memory = self._ask(partial(nvml.nvmlDeviceGetMemoryInfo, instance))
            size = 0 if memory is None else int(memory.total)
            parts.append(Accelerator(f"{name} MIG", f"{number}:{place}", uuid, uuid, size, bus_id))
        return iter(parts)

    def _read(self, number: int, gpu: Any) -> list[DeviceReading]:
        instances = self._instances(gpu)
        if instances is None:
            return [self._read_device(gpu, str(number))]
        celsius = self._temperature(gpu)  # an instance does not report its own
        return [
            self._read_device(instance, f"{number}:{place}")._replace(celsius=celsius) for place, instance in instances
        ]

    def _instances(self, gpu: Any) -> list[tuple[int, Any]] | None:
        """The MIG instances of a GPU with their numbers; None where it is whole."""
        nvml = self._nvml
        mode = self._ask(lambda: nvml.nvmlDeviceGetMigMode(gpu))
        if not mode or mode[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return None
        most = self._ask(lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)) or 0
        asked = ((place, partial(nvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu, place)) for place in range(most))
        return [(place, instance) for place, ask in asked if (instance := self._ask(ask)) is not None]

    def _read_device(self, handle: Any, label: str) -> DeviceReading:
        nvml = self._nvml
        memory = self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        use = self._ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        return DeviceReading(
            label,
            # What the driver keeps is in neither `free` nor, with the newer call, `used`: free is what counts.
            None if memory is None else int(memory.total) - int(memory.free),
            None if memory is None else int(memory.total),
            None if use is None else float(use.gpu),
            None if use is None else float(use.memory),
            self._temperature(handle),
            uuid=_text(self._ask(lambda: nvml.nvmlDeviceGetUUID(handle)) or ""),
        )

    def _temperature(self, handle: Any) -> float | None:
        nvml = self._nvml
        celsius = self._ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        return None if celsius is None else float(celsius)

    def _ask(self, question: Callable[[], Any]) -> Any:
        """An answer of the library, None for a value that the device does not report; a lost device still raises."""
        nvml = self._nvml
        try:
            return question()
        except self._kinds("NotSupported", "NotFound", "NoPermission", "Unknown"):
            return None
        except nvml.NVMLError_InvalidArgument:  # some drivers' word for "not of an instance"
            return None


def _text(value: Any) -> str:
    """Older releases of the package answer in bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
