"""Keeps the latest readings of the devices that workers may see, for callers on the event loop.

Devices are read in a thread of the watch's own, which may hang where a driver does: no reading is waited for on the
loop, and none keeps the server from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence

from marserve.machine.accelerators import Accelerator, DeviceReading
from marserve.machine.device_readings import DeviceReader
from marserve.machine.own_thread import in_own_thread

log = logging.getLogger("marserve.machine")

LOOK_EVERY_S = 1.0
# A tool is a process: it is not started more often than so, however often it is asked for.
LOOK_BY_TOOL_EVERY_S, LEAST_PAUSE_BY_TOOL_S = 15.0, 1.0
LEAST_PAUSE_S = 0.05
# A reading that takes longer is logged.
STUCK_S = 10.0


class DeviceWatch:
    """The readings of `devices`, by their index. All but `look` belongs to the event loop's thread."""

    def __init__(self, reader: DeviceReader, devices: Sequence[Accelerator]) -> None:
        self.reader = reader
        self.devices = tuple(devices)
        self._readings: Mapping[str, DeviceReading] = {}
        self._read_at = -1.0
        self._soon = asyncio.Event()
        self._is_stuck = False
        self._told: dict[int, str] = {}

    @property
    def read_at(self) -> float:
        """When the reading began that `of` answers from, monotonic seconds."""
        return self._read_at

    def look(self) -> None:
        """Read now. Blocks."""
        began = time.monotonic()
        self._take(began, self.reader.read())

    def of(self, device: int) -> DeviceReading | None:
        """The latest reading of a device: a second old at most, 15 s where a tool reads; None where there is none."""
        return self._readings.get(self.devices[device].label) if device < len(self.devices) else None

    def trouble_of(self, device: int) -> str:
        """Why a device takes no worker, empty where it can: the vendor's words for what is wrong with it.

        A device that tells nothing about itself, and one that was never read, count as sound.
        """
        if not self._readings or device >= len(self.devices):
            return ""
        reading = self.of(device)
        if reading is None:
            return "it is not listed any more"
        return reading.trouble if reading.is_lost else ""

    def look_soon(self) -> None:
        """Something has changed: read again in a moment."""
        self._soon.set()

    async def run(self) -> None:
        """Read for ever, as often as there is reason to."""
        while True:
            self._soon.clear()
            await self._look_apart()
            is_quick = self.reader.is_quick
            await asyncio.sleep(LEAST_PAUSE_S if is_quick else LEAST_PAUSE_BY_TOOL_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S if is_quick else LOOK_BY_TOOL_EVERY_S):
                    await self._soon.wait()

    async def _look_apart(self) -> None:
        """Read in a thread that nothing waits for at the end of the server."""
        began = time.monotonic()
        has_read = in_own_thread(self._read, "devices")
        done, _ = await asyncio.wait([has_read], timeout=STUCK_S)
        if not done:
            self._is_stuck = True
            log.warning("Devices have not answered for %g s; their last figures stand", STUCK_S)
        readings = await has_read
        if self._is_stuck:
            self._is_stuck = False
            log.info("Devices answer again, after %.0f s", time.monotonic() - began)
        self._take(began, readings)
        self._tell_trouble()

    def _read(self) -> list[DeviceReading]:
        try:
            return self.reader.read()
        except Exception:
            log.exception("Devices could not be read")
            return []

    def _take(self, began: float, readings: Sequence[DeviceReading]) -> None:
        if readings:
            self._readings = {reading.label: reading for reading in readings}
            self._read_at = began

    def _tell_trouble(self) -> None:
        """Log what has changed about devices that take no worker."""
        for device, accelerator in enumerate(self.devices):
            trouble = self.trouble_of(device)
            if trouble == self._told.get(device, ""):
                continue
            self._told[device] = trouble
            label = f"{device} ({accelerator.name}, {accelerator.uuid or accelerator.label})"
            if trouble:
                log.error("Device %s takes no worker: %s", label, trouble)
            else:
                log.warning("Device %s answers again and takes workers", label)
