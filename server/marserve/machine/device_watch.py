"""Keeps the latest readings of the devices that workers may see, for whoever asks from the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence

from marserve.machine.accelerators import Accelerator
from marserve.machine.device_readings import DeviceReader, DeviceReading

LOOK_EVERY_S = 5.0
# A tool is a process: it is not started more often than so, whoever asks.
LOOK_BY_TOOL_EVERY_S, LEAST_PAUSE_S = 15.0, 1.0
# Whoever asks for many devices in a row is answered from one reading.
FRESH_S = 0.05


class DeviceWatch:
    """The readings of `devices`, by their index. All but `look` belongs to the event loop's thread."""

    def __init__(self, reader: DeviceReader, devices: Sequence[Accelerator]) -> None:
        self.reader = reader
        self.devices = tuple(devices)
        self._readings: Mapping[str, DeviceReading] = {}
        self._read_at = -1.0
        self._soon = asyncio.Event()

    @property
    def read_at(self) -> float:
        """When the reading was taken that `of` answers from, monotonic seconds."""
        return self._read_at

    def look(self) -> None:
        """Read now. Blocks where a tool has to be started."""
        began = time.monotonic()
        readings = {reading.label: reading for reading in self.reader.read()}
        self._readings, self._read_at = readings, began

    def of(self, device: int) -> DeviceReading | None:
        """What is known of a device: a moment old, or where a tool has to be started up to 15 s. None: nothing."""
        if self.reader.is_quick and time.monotonic() - self._read_at > FRESH_S:
            self.look()
        return self._readings.get(self.devices[device].label) if device < len(self.devices) else None

    def look_soon(self) -> None:
        """Something has changed: read again in a moment."""
        self._soon.set()

    async def run(self) -> None:
        """Read for ever, as often as there is reason to."""
        while True:
            self._soon.clear()
            await asyncio.to_thread(self.look)
            pause_s = LOOK_EVERY_S if self.reader.is_quick else LOOK_BY_TOOL_EVERY_S
            await asyncio.sleep(0.0 if self.reader.is_quick else LEAST_PAUSE_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._soon.wait()
