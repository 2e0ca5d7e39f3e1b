"""The latest readings of devices, for callers on the event loop."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from marserve.machine import device_watch
from marserve.machine.accelerators import MIB, Accelerator
from marserve.machine.device_readings import DeviceReader
from marserve.machine.device_watch import NOT_LISTED, DeviceWatch
from marserve.machine.finding import read_nvidia
from marserve.machine.vendors.tools import ToolOutput
from support.fake_nvml import FakeGpu, FakeNvml, missing

pytestmark = pytest.mark.anyio

# The server may use the third GPU and the first one, in this order.
VISIBLE = (Accelerator("H100", "2", "2"), Accelerator("H100", "0", "0"))


def watch_of(nvml: FakeNvml) -> DeviceWatch:
    """A watch that reads by the library."""
    return DeviceWatch(DeviceReader("nvidia", lambda command: ToolOutput(""), lambda: nvml), VISIBLE)


@contextmanager
def running(watch: DeviceWatch) -> Iterator[None]:
    """The watch at work."""
    task = asyncio.ensure_future(watch.run())
    try:
        yield
    finally:
        task.cancel()


async def until(holds: Callable[[], bool]) -> None:
    """Wait until it does, 10 s at most."""
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.001)


async def test_a_device_is_asked_by_its_place_among_the_visible_ones() -> None:
    """None for one that is not there."""
    watch = watch_of(FakeNvml([FakeGpu(used=10), FakeGpu(used=11), FakeGpu(used=12)]))
    watch.look()

    first, second, third = (watch.of(device) for device in range(3))

    assert first is not None
    assert second is not None
    assert (first.used_bytes, second.used_bytes, third) == (12 * MIB, 10 * MIB, None)


async def test_asking_reads_nothing() -> None:
    """The library hangs where a driver does, so it is never asked on the loop."""
    nvml = FakeNvml([FakeGpu(), FakeGpu(), FakeGpu()])
    watch = watch_of(nvml)
    watch.look()
    asked = nvml.asked

    for _ in range(20):
        watch.of(1)
        watch.trouble_of(0)

    assert nvml.asked == asked


async def test_a_change_is_read_soon_and_never_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """`look_soon` has it read again, not more often than once in a while."""
    monkeypatch.setattr(device_watch, "LEAST_PAUSE_BY_TOOL_S", 0.0)
    threads = []

    def run(command: object) -> ToolOutput:
        threads.append(threading.current_thread())
        return ToolOutput(f"0, 0, {400 - len(threads)}, 400, 0, 40\n")

    watch = DeviceWatch(DeviceReader("nvidia", run, missing), VISIBLE[1:])
    assert watch.of(0) is None
    with running(watch):
        for count in (1, 2):
            await until(lambda count=count: (seen := watch.of(0)) is not None and seen.used_bytes == count * MIB)  # type: ignore[misc]
            watch.look_soon()

    assert threading.main_thread() not in threads
    assert all(thread.daemon for thread in threads)


async def test_a_lost_device_is_in_trouble_until_it_answers_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By its own number; the log has each change once."""
    monkeypatch.setattr(device_watch, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(device_watch, "LEAST_PAUSE_S", 0.0)
    caplog.set_level(logging.WARNING)
    nvml = FakeNvml([FakeGpu(), FakeGpu(), FakeGpu()])
    watch = watch_of(nvml)

    with running(watch):
        await until(lambda: watch.of(0) is not None)
        assert (watch.trouble_of(0), watch.trouble_of(1)) == ("", "")
        nvml.gpus[2].lost = True
        await until(lambda: watch.trouble_of(0) == "GPU is lost")
        assert watch.trouble_of(1) == ""
        nvml.gpus[2].lost = False
        await until(lambda: watch.trouble_of(0) == "")

    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "Device 0 (H100, 2) takes no worker: GPU is lost",
        "Device 0 (H100, 2) answers again and takes workers",
    ]


async def test_a_device_that_is_not_listed_any_more_is_in_trouble() -> None:
    """Some losses take it out of the list."""
    nvml = FakeNvml([FakeGpu(), FakeGpu(), FakeGpu()])
    watch = watch_of(nvml)
    watch.look()
    del nvml.gpus[2]
    watch.look()

    assert watch.trouble_of(0) == NOT_LISTED
    assert watch.trouble_of(1) == ""


async def test_a_device_is_found_by_its_uuid_whatever_its_number_is_now() -> None:
    """Once the first GPU is off its bus the second may be number 0: it is not blamed, and its memory is its own."""
    answers = ["0, 0, 300, 400, 0, 40, GPU-a\n1, 0, 100, 400, 0, 40, GPU-b\n", "0, 0, 50, 400, 0, 40, GPU-b\n"]
    reader = DeviceReader("nvidia", lambda command: ToolOutput(answers.pop(0)), missing)
    watch = DeviceWatch(reader, [Accelerator("H100", "0", "0", "GPU-a"), Accelerator("H100", "1", "1", "GPU-b")])
    watch.look()
    watch.look()

    second = watch.of(1)
    assert (watch.trouble_of(0), watch.trouble_of(1), watch.of(0)) == (NOT_LISTED, "", None)
    assert second is not None
    assert second.free_bytes == 50 * MIB


async def test_a_device_is_found_by_its_address_where_it_has_no_row() -> None:
    """The others are sound, though their rows are missing with it."""
    said = "Unable to determine the device handle for GPU 0000:3B:00.0: Unknown Error\n"
    watch = DeviceWatch(
        DeviceReader("nvidia", lambda command: ToolOutput(said, 9, "status 9"), missing),
        [
            Accelerator("H100", "0", "0", "GPU-a", bus_id="0000:1b:00.0"),
            Accelerator("H100", "1", "1", bus_id="0000:3b:00.0"),
        ],
    )
    watch.look()

    assert (watch.trouble_of(0), watch.trouble_of(1)) == ("", "Unknown Error")


@pytest.mark.parametrize(
    ("rows", "troubles"),
    [
        ("0, 0, 300, 400, 0, 40, GPU-a\n", ["", ""]),
        ("0, x, x, [GPU is lost], x, x, x\n", ["GPU is lost", "GPU is lost"]),
        ("1, 0, 300, 400, 0, 40, GPU-b\n", [NOT_LISTED, NOT_LISTED]),
    ],
)
async def test_an_instance_read_by_the_tool_is_as_sound_as_its_gpu(rows: str, troubles: list[str]) -> None:
    """The tool's table has no instances; their memory stays unknown."""
    watch = DeviceWatch(
        DeviceReader("nvidia", lambda command: ToolOutput(rows), missing),
        [Accelerator("H100 MIG", f"0:{place}", f"MIG-{place}", f"MIG-{place}") for place in range(2)],
    )
    watch.look()

    assert [watch.trouble_of(device) for device in range(2)] == troubles
    assert watch.of(0) is None


async def test_a_lost_gpu_takes_its_instances_along() -> None:
    """The library lists the GPU itself then."""
    nvml = FakeNvml([FakeGpu(), FakeGpu(instances=[FakeGpu(), FakeGpu()])])
    places = [Accelerator("H100 MIG", f"1:{place}", f"MIG-1-{place}", f"MIG-1-{place}") for place in range(2)]
    watch = DeviceWatch(DeviceReader("nvidia", lambda command: ToolOutput(""), lambda: nvml), places)
    watch.look()
    assert [watch.trouble_of(device) for device in range(2)] == ["", ""]
    nvml.gpus[1].lost = True
    watch.look()

    assert [watch.trouble_of(device) for device in range(2)] == ["GPU is lost"] * 2


async def test_a_device_that_was_lost_at_the_start_is_found_when_it_answers() -> None:
    """The table had words in place of its UUID."""
    (device,), _ = read_nvidia(f"0, {', '.join(['[GPU is lost]'] * 5)}\n")
    answers = [f"0, {', '.join(['[GPU is lost]'] * 6)}\n", "0, 0, 300, 400, 0, 40, GPU-a\n"]
    reader = DeviceReader("nvidia", lambda command: ToolOutput(answers.pop(0)), missing)
    watch = DeviceWatch(reader, [device])
    watch.look()
    assert (device.uuid, watch.trouble_of(0)) == ("", "GPU is lost")
    watch.look()

    assert watch.trouble_of(0) == ""


async def test_a_lost_device_that_is_not_ours_is_known_too() -> None:
    """It changes how CUDA counts; no worker of ours is on it."""
    nvml = FakeNvml([FakeGpu(), FakeGpu(lost=True), FakeGpu()])
    watch = watch_of(nvml)
    watch.look()

    assert [watch.trouble_of(device) for device in range(2)] == ["", ""]
    assert watch.has_lost()
    nvml.gpus[1].lost = False
    watch.look()
    assert not watch.has_lost()


async def test_it_is_known_since_when_a_device_is_sound_again() -> None:
    """By the reading that said so; one that was never in trouble has been so for ever."""
    nvml = FakeNvml([FakeGpu(), FakeGpu(), FakeGpu(lost=True)])
    watch = watch_of(nvml)
    watch.look()
    assert (watch.sound_since(0), watch.sound_since(1)) == (-math.inf, -math.inf)
    nvml.gpus[2].lost = False
    watch.look()

    assert (watch.sound_since(0), watch.sound_since(1)) == (watch.read_at, -math.inf)


async def test_listeners_hear_of_each_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the event loop, when the reading is known."""
    monkeypatch.setattr(device_watch, "LEAST_PAUSE_S", 0.0)
    monkeypatch.setattr(device_watch, "LOOK_EVERY_S", 0.0)
    watch = watch_of(FakeNvml([FakeGpu(), FakeGpu(), FakeGpu(used=7)]))
    heard: list[object] = []
    watch.listen(lambda: heard.append((threading.current_thread(), watch.of(0) is not None)))

    with running(watch):
        await until(lambda: len(heard) >= 2)

    assert set(heard) == {(threading.main_thread(), True)}


async def test_a_start_does_not_wait_for_devices_that_hang(caplog: pytest.LogCaptureFixture) -> None:
    """The reading goes on in its thread, no second one is begun beside it, and the end does not wait for it either."""
    go_on, began = threading.Event(), []

    def run(command: object) -> ToolOutput:
        began.append(1)
        go_on.wait(30)
        return ToolOutput("0, 0, 300, 400, 0, 40\n")

    watch = DeviceWatch(DeviceReader("nvidia", run, missing), VISIBLE[1:])
    await watch.begin(0.01)
    assert "have not answered for 0.01 s" in caplog.text
    with running(watch):
        await asyncio.sleep(0)
        assert (len(began), watch.of(0)) == (1, None)
        go_on.set()
        await until(lambda: watch.of(0) is not None)
    await watch.close()


async def test_a_tool_that_finds_no_device_any_more_tells_so_of_each() -> None:
    """It says so in words; one that fails says nothing of any device."""
    answers = ["0, 0, 300, 400, 0, 40\n", "No devices were found\n"]
    watch = DeviceWatch(DeviceReader("nvidia", lambda command: ToolOutput(answers.pop(0)), missing), VISIBLE[1:])
    watch.look()
    watch.look()

    assert watch.trouble_of(0) == NOT_LISTED


async def test_readings_that_fail_as_a_whole_blame_no_device() -> None:
    """The last figures stand."""
    answers = ["0, 0, 300, 400, 0, 40\n", ""]
    watch = DeviceWatch(DeviceReader("nvidia", lambda command: ToolOutput(answers.pop(0)), missing), VISIBLE[1:])
    watch.look()
    watch.look()

    reading = watch.of(0)
    assert watch.trouble_of(0) == ""
    assert reading is not None
    assert reading.used_bytes == 100 * MIB


async def test_a_reading_that_hangs_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told once, no second thread is started, and the figures come when it answers."""
    monkeypatch.setattr(device_watch, "STUCK_S", 0.01)
    caplog.set_level(logging.INFO)
    go_on, began = threading.Event(), []

    def run(command: object) -> ToolOutput:
        began.append(1)
        go_on.wait(30)
        return ToolOutput("0, 0, 300, 400, 0, 40\n")

    watch = DeviceWatch(DeviceReader("nvidia", run, missing), VISIBLE[1:])
    with running(watch):
        await until(lambda: "have not answered" in caplog.text)
        watch.look_soon()
        await asyncio.sleep(0)
        assert len(began) == 1
        go_on.set()
        await until(lambda: watch.of(0) is not None)

    assert "Devices answer again" in caplog.text
