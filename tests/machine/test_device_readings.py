"""What accelerators are doing: by NVIDIA's library where it answers, else by the vendors' tools."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from marserve.machine.accelerators import MIB, DeviceReading
from marserve.machine.device_readings import DeviceReader, Readings, describe_usage, read_cards, read_table
from marserve.machine.vendors.nvml import import_nvml
from marserve.machine.vendors.tools import ToolOutput
from support.fake_nvml import FakeGpu, FakeNvml, NVMLError, missing

TABLE = "0, 50, 300, 400, 20, 61\n1, [N/A], 200, 400, [N/A], 40\n"


def never(command: Sequence[str]) -> ToolOutput:
    """A tool that must not be started."""
    raise AssertionError(command)


def test_the_library_is_asked_and_no_process_started() -> None:
    """Memory that no process could have any more, time in use, temperature."""
    nvml = FakeNvml([FakeGpu(used=1024, busy=40, celsius=61), FakeGpu(used=0)])
    reader = DeviceReader("nvidia", never, lambda: nvml)

    assert reader.read() == Readings(
        [
            DeviceReading("0", 1024 * MIB, 81559 * MIB, 40.0, 20.0, 61.0, uuid="GPU-0"),
            DeviceReading("1", 0, 81559 * MIB, 0.0, 0.0, 40.0, uuid="GPU-1"),
        ],
        is_complete=True,
    )
    assert reader.is_quick
    reader.close()
    assert (nvml.opened, nvml.closed) == (1, 1)


def test_mig_instances_are_read_one_by_one() -> None:
    """Each has its memory; how busy it is nobody tells, and its temperature is its GPU's."""
    cut = FakeGpu(
        celsius=70, instances=[FakeGpu(used=10, total=40192, busy=None, celsius=None), None, FakeGpu(busy=None)]
    )
    reader = DeviceReader("nvidia", never, lambda: FakeNvml([FakeGpu(), cut]))

    readings = reader.read().devices

    assert [reading.label for reading in readings] == ["0", "1:0", "1:2"]
    assert readings[1] == DeviceReading("1:0", 10 * MIB, 40192 * MIB, celsius=70.0, uuid="MIG-1-0")
    assert readings[1].free_bytes == 40182 * MIB


def test_what_a_device_does_not_tell_is_none() -> None:
    """And what is not told cannot be free."""
    reader = DeviceReader("nvidia", never, lambda: FakeNvml([FakeGpu(used=None, busy=None, celsius=None)]))

    (reading,) = reader.read().devices

    assert reading == DeviceReading("0", None, None, uuid="GPU-0")
    assert reading.free_bytes is None


def test_without_the_package_the_tool_is_started() -> None:
    """Cells without a figure say so in words."""
    reader = DeviceReader("nvidia", lambda command: ToolOutput(TABLE), missing)

    assert reader.read() == Readings(
        [
            DeviceReading("0", 100 * MIB, 400 * MIB, 50.0, 20.0, 61.0),
            DeviceReading("1", 200 * MIB, 400 * MIB, None, None, 40.0),
        ],
        is_complete=True,
    )
    assert not reader.is_quick


def test_a_library_that_does_not_answer_gives_way_to_the_tool() -> None:
    """At the start (no driver), and later, until it answers again."""
    nvml = FakeNvml([FakeGpu()], error=NVMLError("Driver Not Loaded"))
    assert DeviceReader("nvidia", lambda command: ToolOutput(TABLE), lambda: nvml).read() == read_table(TABLE)

    nvml.error = None
    reader = DeviceReader("nvidia", lambda command: ToolOutput(TABLE), lambda: nvml)
    assert len(reader.read().devices) == 1
    nvml.error = NVMLError("Unknown Error")
    assert reader.read() == read_table(TABLE)
    nvml.error = None
    assert len(reader.read().devices) == 1


def test_a_library_that_did_not_answer_at_the_start_is_opened_when_it_does() -> None:
    """Every 15 s; a package that is not installed is looked for once."""
    now, tries = [100.0], []
    nvml = FakeNvml([FakeGpu()], error=NVMLError("Driver Not Loaded"))
    reader = DeviceReader("nvidia", lambda command: ToolOutput(TABLE), lambda: nvml, clock=lambda: now[0])

    def absent() -> Any:
        tries.append(now[0])
        raise ImportError("No module named 'pynvml'")

    other = DeviceReader("nvidia", lambda command: ToolOutput(TABLE), absent, clock=lambda: now[0])
    reader.read()
    nvml.error = None
    seen = []
    for now[0] in (100.0, 114.0, 116.0):
        reader.read()
        other.read()
        seen.append(reader.is_quick)

    assert seen == [False, False, True]
    assert tries == [100.0]


def test_the_library_is_opened_anew_while_a_device_is_lost() -> None:
    """What it knows of a device may be that of before the reset: it is shut down and opened, at most every 15 s."""
    now = [0.0]
    nvml = FakeNvml([FakeGpu(lost=True)])
    reader = DeviceReader("nvidia", never, lambda: nvml, clock=lambda: now[0])
    opened = []

    for now[0] in (1.0, 2.0, 15.0, 16.0, 17.0, 32.0):
        reader.read()
        opened.append((nvml.opened, nvml.closed))

    assert opened == [(1, 0), (1, 0), (1, 0), (2, 1), (2, 1), (3, 2)]


def test_a_lost_device_leaves_the_others_to_the_library() -> None:
    """It is told as lost; no tool is started for it, and it is read again when it answers again."""
    nvml = FakeNvml([FakeGpu(used=1), FakeGpu(used=2, lost=True), FakeGpu(used=3)])
    reader = DeviceReader("nvidia", never, lambda: nvml)

    first, lost, third = reader.read().devices
    nvml.gpus[1].lost = False
    (_, again, _) = reader.read().devices

    assert (lost.label, lost.is_lost, lost.trouble, lost.free_bytes) == ("1", True, "GPU is lost", None)
    assert (first.used_bytes, third.used_bytes) == (MIB, 3 * MIB)
    assert (again.is_lost, again.used_bytes) == (False, 2 * MIB)


def test_a_sensor_that_stumbles_loses_no_device() -> None:
    """The library's `Unknown Error` is a loss only where it does not give the device itself."""
    reader = DeviceReader("nvidia", never, lambda: FakeNvml([FakeGpu(used=1, celsius=-1)]))

    (reading,) = reader.read().devices

    assert (reading.is_lost, reading.celsius, reading.used_bytes) == (False, None, MIB)


def test_what_the_tool_says_of_a_lost_device_is_told() -> None:
    """Its row has words in place of figures; prose is no row."""
    table = f"{TABLE.splitlines()[0]}\n1, [GPU is lost], [GPU is lost], [GPU is lost], x, y\nNo, 1\n"
    first, second = read_table(table).devices

    assert not first.is_lost
    assert (second.label, second.is_lost, second.used_bytes) == ("1", True, None)


def test_an_unknown_error_is_a_loss_only_where_no_figure_is_told() -> None:
    """A sensor that stumbles takes no device out of service."""
    first, second = read_table(
        "0, [Unknown Error], 300, 400, 20, [Unknown Error], GPU-a\n1, [Unknown Error], x, x, x, x, GPU-b\n"
    ).devices

    assert (first.is_lost, first.free_bytes, first.uuid) == (False, 300 * MIB, "GPU-a")
    assert (second.is_lost, second.trouble, second.uuid) == (True, "Unknown Error", "GPU-b")


@pytest.mark.parametrize("is_said_beside", [False, True])
def test_a_device_that_fell_off_its_bus_is_told_by_its_address(is_said_beside: bool) -> None:
    """`nvidia-smi` prints a sentence in place of its row, and may leave out other rows: the list is not complete."""
    sentences = (
        "Unable to determine the device handle for GPU 0000:3B:00.0: GPU is lost. Reboot the system to recover it\n"
        "Unable to determine the device handle for GPU1: 0000:52:00.0: Unknown Error\n"
    )
    row = TABLE.splitlines(keepends=True)[0]
    said = ToolOutput(row, 15, f"nvidia-smi ended with status 15: {' '.join(sentences.split())}")
    if not is_said_beside:
        said = ToolOutput(sentences + row, 15, "nvidia-smi ended with status 15")
    reader = DeviceReader("nvidia", lambda command: said, missing)

    readings = reader.read()

    assert [(each.label, each.bus_id, each.trouble, each.is_lost) for each in readings.devices] == [
        ("0", "", "", False),
        ("", "0000:3b:00.0", "GPU is lost. Reboot the system to recover it", True),
        ("", "0000:52:00.0", "Unknown Error", True),
    ]
    assert not readings.is_complete


def test_a_list_without_devices_is_complete_only_where_the_tool_says_so() -> None:
    """A tool that fails tells nothing of any device."""
    assert read_table("No devices were found\n") == Readings([], is_complete=True)
    assert not read_table("Failed to initialize NVML: Driver/library version mismatch\n").is_complete


def test_memory_that_the_driver_keeps_is_not_free() -> None:
    """The tool's `memory.free` counts; total minus used would promise what nobody can have."""
    (reading,) = read_table("0, 1, 79000, 81559, 1, 40\n").devices

    assert reading.free_bytes == 79000 * MIB


def test_a_complaint_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Each time it begins or changes, not at each reading."""
    reader = DeviceReader("nvidia", lambda command: ToolOutput(TABLE, 14, "status 14"), missing)

    for _ in range(5):
        reader.read()

    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == ["Devices: status 14"]


@pytest.mark.parametrize("cell", ["inf", "nan", "1e300", "5" * 200_000])
def test_figures_that_cannot_be_read_are_one_warning(caplog: pytest.LogCaptureFixture, cell: str) -> None:
    """No traceback, and no line for each reading; no device counts as gone."""
    row = f"0, 5, 15000, {cell}, 3, 40, GPU-1\n"
    reader = DeviceReader("nvidia", lambda command: ToolOutput(row), missing, tool="/usr/bin/nvidia-smi")

    readings = [reader.read() for _ in range(5)]

    assert readings == [Readings()] * 5
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith("Devices: what nvidia-smi printed cannot be read: ")
    assert len(line) < 200


def test_the_real_library_without_a_driver_gives_way_too() -> None:
    """The package alone brings no driver."""
    nvml = pytest.importorskip("pynvml", reason="needs the extra `gpu`")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        assert DeviceReader("nvidia", lambda command: ToolOutput(TABLE), import_nvml).read() == read_table(TABLE)
    else:
        nvml.nvmlShutdown()
        pytest.skip("here is a driver; tests/gpu asks it")


def test_rocms_cards_are_read_by_its_tool() -> None:
    """Its table has lines without a card."""
    table = (
        "device,Temperature (Sensor edge) (C),GPU use (%),VRAM Total Memory (B),VRAM Total Used Memory (B)\n"
        "card0,38.0,12,4194304,1048576\nsystem,,,,\n"
    )
    reader = DeviceReader("amd", lambda command: ToolOutput(table))

    assert reader.read() == read_cards(table)
    assert read_cards(table) == Readings([DeviceReading("0", MIB, 4 * MIB, 12.0, celsius=38.0)], is_complete=True)


@pytest.mark.parametrize("vendor", ["intel", "apple", None])
def test_other_vendors_devices_are_not_read(vendor: str | None) -> None:
    """No tool is started for them."""
    reader = DeviceReader(vendor, never)  # type: ignore[arg-type]

    assert not reader.reads_something
    assert reader.read() == Readings()


def test_describe_has_torchserves_words() -> None:
    """Names, two colons, figures with their units."""
    reading = DeviceReading("3", 678 * MIB, 81559 * MIB, 12.0, 3.0)

    assert describe_usage(3, reading) == ("gpuId::3 utilization.gpu::12 % utilization.memory::3 % memory.used::678 MiB")
    assert describe_usage(3, reading._replace(busy_percent=None)).startswith("gpuId::3 utilization.gpu::N/A % ")
    assert describe_usage(3, None) == "failed to obtained gpu usage"


def test_the_library_is_imported_only_where_it_is_used() -> None:
    """A server without devices does not pay for it."""
    program = "import sys, marserve.app.server, marserve.machine.device_readings; sys.exit('pynvml' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
