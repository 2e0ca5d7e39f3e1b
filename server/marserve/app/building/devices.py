"""The accelerators: reads them, builds the ledger of their memory, and declares their metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping

from marserve.answers.management import DeviceActivity
from marserve.app.building.desired_state import state_folder
from marserve.app.building.metrics import declare_families
from marserve.app.building.tasks import keep
from marserve.machine.accelerators import DeviceReading
from marserve.machine.describe import Machine
from marserve.machine.device_readings import DeviceReader
from marserve.machine.device_watch import DeviceWatch
from marserve.machine.devices import Assigner, cap
from marserve.machine.vendors.tools import each_within
from marserve.memory.device_memory import DeviceMemory
from marserve.memory.learned_memory import LearnedMemory
from marserve.memory.waiting_line import WaitingLine
from marserve.settings import Settings
from marserve.telemetry.metrics.server_metrics import Metrics

log = logging.getLogger("marserve.app")

# How long a vendor's tool may take to read the devices.
READ_S = 10.0


def usable_devices(settings: Settings, machine: Machine) -> int:
    """How many accelerators the server uses. Warns if the settings want more than there are: a container may not have
    been given them.
    """
    wanted = settings.number_of_gpu
    if wanted is not None and wanted > machine.accelerators:
        log.warning(
            "number_of_gpu is %d, and there are %d accelerators that workers may see: these are used",
            wanted,
            machine.accelerators,
        )
    return cap(machine.accelerators, wanted)


async def watch_devices(
    machine: Machine, devices: int, metrics: Metrics, stack: contextlib.AsyncExitStack
) -> DeviceWatch | None:
    """Read the first `devices` accelerators from now on; None if there are none, or nothing can read them."""
    if not devices:
        return None
    reader = DeviceReader(machine.vendor, each_within(READ_S), tool=machine.tool or "nvidia-smi")
    if not reader.reads_something:
        return None
    watch = DeviceWatch(reader, machine.devices[:devices])
    stack.push_async_callback(watch.close)
    await watch.begin(READ_S)
    keep(stack, watch.run())
    declare_families(metrics, FAMILIES, watch)
    return watch


async def build_device_memory(
    settings: Settings,
    line: WaitingLine,
    watch: DeviceWatch | None,
    assigner: Assigner,
    metrics: Metrics,
    stack: contextlib.AsyncExitStack,
) -> DeviceMemory | None:
    """Lets workers start only on devices that have memory for them; None if the settings do not want that."""
    if watch is None:
        return None
    folder = state_folder(settings)
    learned = LearnedMemory(folder / "device-memory.json" if folder is not None else None)
    await asyncio.to_thread(learned.read)
    stack.push_async_callback(asyncio.to_thread, learned.write)
    memory = DeviceMemory(line, watch, assigner, learned)
    declare_families(metrics, REFUSAL_FAMILIES, memory)
    return memory


def _each(read: Callable[[DeviceReading], float | None]) -> Callable[[DeviceWatch], Mapping[str, float]]:
    """A figure of each device by its number (`gpu_id` of handlers); devices that do not report it are left out."""

    def figures(watch: DeviceWatch) -> Mapping[str, float]:
        readings = [(device, watch.of(device)) for device in range(len(watch.devices))]
        values = [(device, read(reading)) for device, reading in readings if reading is not None]
        return {str(device): value for device, value in values if value is not None}

    return figures


def device_activities(watch: DeviceWatch) -> list[DeviceActivity]:
    """What `/stats` says of each device."""
    found = []
    for device in range(len(watch.devices)):
        reading = watch.of(device)
        found.append(
            DeviceActivity(
                gpuId=device,
                busyPercent=None if reading is None else reading.busy_percent,
                usedBytes=None if reading is None else reading.used_bytes,
                totalBytes=None if reading is None else reading.total_bytes,
                celsius=None if reading is None else reading.celsius,
                trouble=watch.trouble_of(device) or None,
            )
        )
    return found


def _health(watch: DeviceWatch) -> Mapping[str, float]:
    return {str(device): float(not watch.trouble_of(device)) for device in range(len(watch.devices))}


REFUSAL_FAMILIES: tuple[tuple[str, Callable[[DeviceMemory], Mapping[str, float]]], ...] = (
    ("marserve_device_loads_refused_total", lambda memory: {"": memory.refused}),
)

FAMILIES: tuple[tuple[str, Callable[[DeviceWatch], Mapping[str, float]]], ...] = (
    ("marserve_device_healthy", _health),
    ("marserve_device_memory_bytes", _each(lambda reading: reading.total_bytes)),
    ("marserve_device_memory_used_bytes", _each(lambda reading: reading.used_bytes)),
    (
        "marserve_device_busy_ratio",
        _each(lambda reading: None if reading.busy_percent is None else reading.busy_percent / 100),
    ),
    ("marserve_device_temperature_celsius", _each(lambda reading: reading.celsius)),
)
