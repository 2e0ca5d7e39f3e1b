"""Accelerators as plain data."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

Vendor = Literal["nvidia", "amd", "intel", "apple"]

MIB = 1024 * 1024


class Accelerator(NamedTuple):
    """One device that a process can be given. Empty, or 0, stands for an unknown value.

    `label` is its number as the vendor's tool counts, `GPU:INSTANCE` for a MIG instance; `handle` stands for it
    in the variable that says which devices a process sees. `bus_id` is the PCI address as /sys writes it.
    """

    name: str
    label: str
    handle: str
    uuid: str = ""
    memory_bytes: int = 0
    bus_id: str = ""

    @property
    def is_instance(self) -> bool:
        """Whether it is a part of a GPU (MIG)."""
        return ":" in self.label

    @property
    def gpu(self) -> str:
        """The number of the GPU that it is, or is a part of."""
        return self.label.partition(":")[0]


class DeviceReading(NamedTuple):
    """One device. `label` is its number as the vendor counts (`GPU:INSTANCE` for MIG); None for an unreported value.

    `busy_percent` is the time in which it computed, `memory_busy_percent` that in which its memory was read or written.
    `used_bytes` is what no process could have any more; the driver's own share counts. `trouble` says why a device
    reports nothing. `is_lost`: it is gone until it, or the machine, is reset. `uuid` and `bus_id`, a PCI
    address as /sys writes it, identify the device if they are known; `label` is empty if only these are.
    """

    label: str
    used_bytes: int | None
    total_bytes: int | None
    busy_percent: float | None = None
    memory_busy_percent: float | None = None
    celsius: float | None = None
    trouble: str = ""
    is_lost: bool = False
    uuid: str = ""
    bus_id: str = ""

    @property
    def free_bytes(self) -> int | None:
        """How much a process could still have."""
        if self.used_bytes is None or not self.total_bytes:
            return None
        return max(0, self.total_bytes - self.used_bytes)


def sys_bus_id(bus_id: str) -> str:
    """A PCI address as /sys writes it: `00000000:3B:00.0` is `0000:3b:00.0`; empty for any other text."""
    match = re.fullmatch(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2}\.[0-7])", bus_id)
    return f"{match[1][-4:]}:{match[2]}:{match[3]}".lower() if match else ""
