"""The latest readings of devices, for whoever asks from the event loop."""

from __future__ import annotations

import asyncio

import pytest

from marserve.machine import device_watch
from marserve.machine.accelerators import MIB, Accelerator
from marserve.machine.device_readings import DeviceReader
from marserve.machine.device_watch import DeviceWatch
from support.fake_nvml import FakeGpu, FakeNvml, missing

pytestmark = pytest.mark.anyio

# The server may use the third GPU and the first one, in this order.
VISIBLE = (Accelerator("H100", "2", "2"), Accelerator("H100", "0", "0"))


async def test_a_device_is_asked_by_its_place_among_the_visible_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what the library says is what holds now."""
    monkeypatch.setattr(device_watch, "FRESH_S", 0.0)
    nvml = FakeNvml([FakeGpu(used=10), FakeGpu(used=11), FakeGpu(used=12)])
    watch = DeviceWatch(DeviceReader("nvidia", lambda command: "", lambda: nvml), VISIBLE)

    first, second, third = (watch.of(device) for device in range(3))
    assert first is not None
    assert second is not None
    assert (first.used_bytes, second.used_bytes, third) == (12 * MIB, 10 * MIB, None)
    nvml.gpus[2].used = 500
    again = watch.of(0)
    assert again is not None
    assert again.used_bytes == 500 * MIB


async def test_many_questions_at_once_are_answered_from_one_reading() -> None:
    """A scrape asks for each device and figure."""
    nvml = FakeNvml([FakeGpu(), FakeGpu(), FakeGpu()])
    watch = DeviceWatch(DeviceReader("nvidia", lambda command: "", lambda: nvml), VISIBLE)
    watch.of(0)
    asked = nvml.asked

    for _ in range(20):
        watch.of(1)

    assert nvml.asked == asked


async def test_a_tool_is_never_started_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks gets what was read last; `look_soon` has it read again, not more often than once in a while."""
    monkeypatch.setattr(device_watch, "LEAST_PAUSE_S", 0.0)
    loop, began = asyncio.get_running_loop(), []
    has_read = asyncio.Event()

    def run(command: object) -> str:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()  # in a thread there is none
        began.append(command)
        loop.call_soon_threadsafe(has_read.set)
        return f"0, 0, {len(began)}, 400, 0, 40\n"

    watch = DeviceWatch(DeviceReader("nvidia", run, missing), VISIBLE[1:])
    assert watch.of(0) is None
    running = asyncio.create_task(watch.run())
    for count in (1, 2):
        async with asyncio.timeout(5):
            await has_read.wait()
            has_read.clear()
            while (reading := watch.of(0)) is None or reading.used_bytes != count * MIB:
                await asyncio.sleep(0)
        watch.look_soon()
    running.cancel()
    await asyncio.wait([running])
