"""NVIDIA's library, as nvidia-ml-py shows it, over GPUs that a test makes up."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

MIB = 1024 * 1024


class NVMLError(Exception):
    """What the library raises."""


class NVMLError_NotSupported(NVMLError):
    """The device does not tell."""


class NVMLError_NotFound(NVMLError):
    """There is no instance at this place."""


class NVMLError_NoPermission(NVMLError):
    """Not for this user."""


class NVMLError_InvalidArgument(NVMLError):
    """Not of such a handle."""


class NVMLError_GpuIsLost(NVMLError):
    """The device has fallen off its bus."""


class NVMLError_Unknown(NVMLError):
    """A sensor that stumbles, or a device that is gone."""


@dataclass
class FakeGpu:
    """One GPU, or one of its MIG instances. None is what it does not tell; sizes in MiB. A `lost` one raises."""

    used: int | None = 0
    total: int = 81559
    busy: int | None = 0
    celsius: int | None = 40
    instances: list[FakeGpu | None] | None = None
    lost: bool = False
    uuid: str = ""


@dataclass
class FakeNvml:
    """The module. `error` is raised by whatever is asked next, and from then on."""

    gpus: list[FakeGpu]
    error: NVMLError | None = None
    opened: int = 0
    closed: int = 0
    asked: int = 0
    NVML_TEMPERATURE_GPU: int = 0
    NVML_DEVICE_MIG_ENABLE: int = 1
    NVMLError: type[NVMLError] = NVMLError
    NVMLError_NotSupported: type[NVMLError] = NVMLError_NotSupported
    NVMLError_NotFound: type[NVMLError] = NVMLError_NotFound
    NVMLError_NoPermission: type[NVMLError] = NVMLError_NoPermission
    NVMLError_InvalidArgument: type[NVMLError] = NVMLError_InvalidArgument
    NVMLError_GpuIsLost: type[NVMLError] = NVMLError_GpuIsLost
    NVMLError_Unknown: type[NVMLError] = NVMLError_Unknown

    def __post_init__(self) -> None:
        """UUIDs by number."""
        for number, gpu in enumerate(self.gpus):
            gpu.uuid = f"GPU-{number}"
            for place, instance in enumerate(gpu.instances or ()):
                if instance is not None:
                    instance.uuid = f"MIG-{number}-{place}"

    def _check(self) -> None:
        self.asked += 1
        if self.error is not None:
            raise self.error

    def nvmlInit(self) -> None:
        """As the library's."""
        self._check()
        self.opened += 1

    def nvmlShutdown(self) -> None:
        """As the library's."""
        self.closed += 1

    def nvmlDeviceGetCount(self) -> int:
        """As the library's."""
        self._check()
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, number: int) -> FakeGpu:
        """As the library's."""
        self._check()
        if self.gpus[number].lost:
            raise NVMLError_GpuIsLost("GPU is lost")
        return self.gpus[number]

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> bytes:
        """As an older library's."""
        return b"H100"

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        """As the library's."""
        return gpu.uuid

    def nvmlDeviceGetPciInfo(self, gpu: FakeGpu) -> Any:
        """As the library's."""
        return SimpleNamespace(busId=b"00000000:1B:00.0")

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> list[int]:
        """As the library's."""
        self._check()
        return [int(gpu.instances is not None)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: FakeGpu) -> int:
        """As the library's."""
        return len(gpu.instances or ())

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGpu, place: int) -> FakeGpu:
        """As the library's."""
        instance = (gpu.instances or [])[place]
        if instance is None:
            raise NVMLError_NotFound
        return instance

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> Any:
        """As the library's."""
        if gpu.used is None:
            raise NVMLError_NotSupported
        return SimpleNamespace(total=gpu.total * MIB, free=(gpu.total - gpu.used) * MIB, used=gpu.used * MIB)

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> Any:
        """As the library's."""
        if gpu.busy is None:
            raise NVMLError_NotSupported
        return SimpleNamespace(gpu=gpu.busy, memory=gpu.busy // 2)

    def nvmlDeviceGetTemperature(self, gpu: FakeGpu, sensor: int) -> int:
        """As the library's."""
        if gpu.celsius is None:
            raise NVMLError_InvalidArgument
        if gpu.celsius < 0:
            raise NVMLError_Unknown("Unknown Error")
        return gpu.celsius


def missing() -> ModuleType:
    """A machine without the package."""
    raise ImportError("No module named 'pynvml'")
