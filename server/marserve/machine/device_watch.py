"""Keeps the latest readings of the devices that workers may see, for callers on the event loop.

The watch reads devices in a thread of its own, since a driver may hang. The event loop waits for no reading, and no
reading keeps the server from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

from marserve.machine.accelerators import Accelerator, DeviceReading
from marserve.machine.device_readings import DeviceReader, Readings
from marserve.machine.own_thread import in_own_thread

log = logging.getLogger("marserve.machine")

LOOK_EVERY_S = 1.0
# A vendor's tool is a process: it is not started more often than this.
LOOK_BY_TOOL_EVERY_S, LEAST_PAUSE_BY_TOOL_S = 15.0, 1.0
LEAST_PAUSE_S = 0.05
# A reading that takes longer is logged.
STUCK_S = 10.0
# How long the library may take to close at the end.
CLOSE_S = 1.0
NOT_LISTED = "it is not listed any more"


class DeviceWatch:
    """The readings of `devices`, by their index. All but `look` belongs to the event loop's thread."""

    def __init__(self, reader: DeviceReader, devices: Sequence[Accelerator]) -> None:
        self.reader = reader
        self.devices = tuple(devices)
        self.readings: Sequence[DeviceReading] = ()
        self._readings: Mapping[int, DeviceReading] = {}
        self._troubles: Mapping[int, str] = {}
        self._sound_since: dict[int, float] = {}
        self._read_at = -1.0
        self._soon = asyncio.Event()
        self._reading: asyncio.Future[Readings] | None = None
        self._began = 0.0
        self._is_stuck = False
        self._told: dict[int, str] = {}
        self._listeners: list[Callable[[], None]] = []

    @property
    def read_at(self) -> float:
        """When the reading began that `of` answers from, monotonic seconds."""
        return self._read_at

    def listen(self, listener: Callable[[], None]) -> None:
        """Call the listener after each reading, on the event loop."""
        self._listeners.append(listener)

    def look(self) -> None:
        """Read now. Blocks."""
        began = time.monotonic()
        self._take(began, self.reader.read())

    def of(self, device: int) -> DeviceReading | None:
        """The latest reading of a device: a second old at most, 15 s where a tool reads; None without a reading."""
        return self._readings.get(device)

    def trouble_of(self, device: int) -> str:
        """Why a device takes no worker, empty where it can: the vendor's words for what is wrong with it.

        A device that reports nothing about itself, and one that was never read, count as sound.
        """
        return self._troubles.get(device, "")

    def has_lost(self) -> bool:
        """Whether any device of the machine is lost, visible to workers or not."""
        return bool(self._troubles) or any(reading.is_lost for reading in self.readings)

    def sound_since(self, device: int) -> float:
        """Since when a device has been without trouble, monotonic seconds; -inf if it never had any."""
        return self._sound_since.get(device, -math.inf)

    def look_soon(self) -> None:
        """Read again soon: something has changed."""
        self._soon.set()

    async def begin(self, within_s: float) -> None:
        """Read for the first time; return when that is done, or after `within_s`: `run` goes on with it."""
        self._begin_reading()
        assert self._reading is not None
        done, _ = await asyncio.wait([self._reading], timeout=within_s)
        if done:
            self._end_reading()
        else:
            self._note_stuck(within_s)

    async def run(self) -> None:
        """Read for ever: now and then, and soon after `look_soon`."""
        while True:
            self._soon.clear()
            await self._look_apart()
            is_quick = self.reader.is_quick
            await asyncio.sleep(LEAST_PAUSE_S if is_quick else LEAST_PAUSE_BY_TOOL_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S if is_quick else LOOK_BY_TOOL_EVERY_S):
                    await self._soon.wait()

    async def close(self) -> None:
        """Close the library; do not wait for one that hangs."""
        await asyncio.wait([in_own_thread(self.reader.close, "devices")], timeout=CLOSE_S)

    async def _look_apart(self) -> None:
        """Read in a thread that nothing waits for at the end of the server."""
        if self._reading is None:
            self._begin_reading()
        assert self._reading is not None
        if not self._is_stuck:
            done, _ = await asyncio.wait([self._reading], timeout=STUCK_S)
            if not done:
                self._note_stuck(STUCK_S)
        await asyncio.wait([self._reading])
        self._end_reading()

    def _begin_reading(self) -> None:
        self._began = time.monotonic()
        self._reading = in_own_thread(self._read, "devices")

    def _end_reading(self) -> None:
        assert self._reading is not None
        readings, self._reading = self._reading.result(), None
        if self._is_stuck:
            self._is_stuck = False
            log.info("Devices answer again, after %.0f s", time.monotonic() - self._began)
        self._take(self._began, readings)
        self._tell_trouble()
        for tell in self._listeners:
            tell()

    def _note_stuck(self, waited_s: float) -> None:
        self._is_stuck = True
        log.warning("Devices have not answered for %g s; their last figures stand", waited_s)

    def _read(self) -> Readings:
        try:
            return self.reader.read()
        except Exception:
            log.exception("Devices could not be read")
            return Readings()

    def _take(self, began: float, readings: Readings) -> None:
        if not readings.devices and not readings.is_complete:
            return
        before, places = self._troubles, range(len(self.devices))
        found = {place: find_reading(self.devices[place], readings.devices) for place in places}
        self._readings = {place: reading for place, reading in found.items() if reading is not None}
        self._troubles = {
            place: trouble for place in places if (trouble := trouble_in(self.devices[place], found[place], readings))
        }
        for device in set(before) - set(self._troubles):
            self._sound_since[device] = began
        self.readings = readings.devices
        self._read_at = began

    def _tell_trouble(self) -> None:
        """Log changes of the devices that take no worker."""
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


def find_reading(device: Accelerator, readings: Sequence[DeviceReading]) -> DeviceReading | None:
    """The reading of a device: by its UUID where both have one, by its address, else by its label.

    A vendor's numbers may change after a device is gone.
    """
    same = [each for each in readings if device.uuid and each.uuid == device.uuid]
    same += [each for each in readings if each.bus_id and each.bus_id == device.bus_id and not device.is_instance]
    same += [each for each in readings if each.label == device.label and not (each.uuid and device.uuid)]
    return same[0] if same else None


def trouble_in(device: Accelerator, reading: DeviceReading | None, readings: Readings) -> str:
    """Why a device takes no worker, by its own reading, or by what else was read; empty where it can."""
    if reading is not None:
        return reading.trouble if reading.is_lost else ""
    # A GPU that is lost, or is read by the tool, is listed in place of its MIG instances.
    whole = device._replace(label=device.gpu, uuid="")
    if device.is_instance and (gpu := find_reading(whole, readings.devices)) is not None:
        return gpu.trouble if gpu.is_lost else ""
    return NOT_LISTED if readings.is_complete else ""
