"""What the machine has: read from files of /proc and /sys, and from a vendor's tool where there is one."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest

from marserve.errors import BadSettings
from marserve.machine.accelerators import MIB, DeviceReading
from marserve.machine.describe import Meter, count_cores, describe_machine, figures_of
from marserve.machine.vendors.tools import ToolOutput
from support.fake_nvml import missing


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 8 GiB of memory, 6 of them free, and no container's limits."""
    write(tmp_path / "proc/meminfo", "MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable: 6291456 kB\n")
    write(tmp_path / "proc/stat", "cpu 100 0 100 700 100 0 0 0 0 0\ncpu0 1 2 3\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    """A file and its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def put_tool(folder: Path, name: str) -> dict[str, str]:
    """An executable of that name, and the environment that finds it."""
    write(folder / "bin" / name, "#!/bin/sh\n")
    (folder / "bin" / name).chmod(stat.S_IRWXU)
    return {"PATH": str(folder / "bin")}


def never(command: Sequence[str]) -> ToolOutput:
    """A tool that must not be started."""
    raise AssertionError(command)


def test_without_a_vendors_tool_no_process_is_started(root: Path) -> None:
    """Looking is cheap: this runs at each start."""
    machine = describe_machine({"PATH": str(root / "nothing")}, root, never)

    assert (machine.vendor, machine.accelerators, machine.devices) == (None, 0, ())
    assert machine.memory_bytes == 8 << 30
    assert machine.cores >= 1
    assert machine.disk_bytes > 0
    assert machine.hostname


@pytest.mark.parametrize(
    ("cpu_max", "cores"), [("max 100000", None), ("150000 100000", 1), ("50000 100000", 1), ("9900000 100000", None)]
)
def test_a_containers_quota_bounds_the_cores(root: Path, cpu_max: str, cores: int | None) -> None:
    """Half a core is one worker; a quota over what is there changes nothing."""
    everything = len(os.sched_getaffinity(0))
    write(root / "sys/fs/cgroup/cpu.max", cpu_max)

    assert count_cores(root) == min(everything, cores or everything)


def test_an_older_containers_quota_counts_too(root: Path) -> None:
    """Version 1 of control groups says -1 for no limit."""
    everything = count_cores(root)
    write(root / "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")

    write(root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    assert count_cores(root) == everything
    write(root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "100000\n")
    assert count_cores(root) == 1


def test_a_containers_memory_counts_and_not_the_hosts(root: Path) -> None:
    """A server in 2 GiB of 8 has 2."""
    write(root / "sys/fs/cgroup/memory.max", "2147483648\n")
    write(root / "sys/fs/cgroup/memory.current", "536870912\n")

    machine = describe_machine({"PATH": ""}, root, never)

    assert machine.memory_bytes == 2 << 30
    assert figures(Meter(root=root))["MemoryUtilization"] == 25.0


def figures(meter: Meter) -> dict[str, float]:
    """One reading of the machine's own figures."""
    return {reading.name: reading.value for reading in meter.read() if reading.device is None}


def test_the_meter_reads_torchserves_figures(root: Path) -> None:
    """Memory in MiB, disk in GiB, the processor since the reading before."""
    meter = Meter(root=root)
    write(root / "proc/stat", "cpu 150 0 125 800 125 0 0 0 0 0\n")

    seen = figures(meter)

    assert seen["CPUUtilization"] == 37.5
    assert (seen["MemoryUsed"], seen["MemoryAvailable"], seen["MemoryUtilization"]) == (2048, 6144, 25)
    assert seen["DiskUsage"] > 0
    assert 0 <= seen["DiskUtilization"] <= 100
    assert set(seen) == {
        "CPUUtilization",
        "MemoryUsed",
        "MemoryAvailable",
        "MemoryUtilization",
        "DiskUsage",
        "DiskAvailable",
        "DiskUtilization",
    }
    assert figures(meter)["CPUUtilization"] == 0.0


def test_a_machine_without_proc_has_fewer_figures(tmp_path: Path) -> None:
    """Nothing is invented, and nothing raises."""
    seen = figures(Meter(root=tmp_path))

    assert seen["CPUUtilization"] == 0.0
    assert "DiskUsage" in seen


def test_the_machines_devices_are_those_that_workers_may_see(root: Path) -> None:
    """Two are installed, one is visible."""
    environment = put_tool(root, "nvidia-smi") | {"CUDA_VISIBLE_DEVICES": "1"}
    rows = "0, GPU-a, H200, 00000000:1B:00.0, 143771, Disabled\n1, GPU-b, H200, 00000000:CB:00.0, 143771, Disabled\n"

    machine = describe_machine(environment, root, lambda command: ToolOutput(rows))

    assert (machine.vendor, machine.accelerators) == ("nvidia", 1)
    assert [device.uuid for device in machine.devices] == ["GPU-b"]


def test_figures_of_devices_have_torchserves_names_and_units() -> None:
    """What a device does not tell is left out."""
    readings = figures_of(
        [
            DeviceReading("0", 100 * MIB, 400 * MIB, 50.0),
            DeviceReading("1", 200 * MIB, 400 * MIB),
            DeviceReading("2", None, None, 7.0),
        ]
    )

    assert readings == [
        ("GPUMemoryUtilization", 25.0, "0"),
        ("GPUMemoryUsed", 100.0, "0"),
        ("GPUUtilization", 50.0, "0"),
        ("GPUMemoryUtilization", 50.0, "1"),
        ("GPUMemoryUsed", 200.0, "1"),
        ("GPUUtilization", 7.0, "2"),
    ]


def failing(command: Sequence[str]) -> ToolOutput:
    """A tool that finds no driver."""
    return ToolOutput("", 15, "nvidia-smi ended with status 15: GPU is lost")


def with_driver(root: Path) -> Path:
    """The root of a machine with NVIDIA's driver."""
    write(root / "dev" / "nvidiactl", "")
    return root


@pytest.mark.parametrize("value", [None, "0", "GPU-0a,GPU-1b"])
def test_devices_that_cannot_be_read_stop_a_strict_start(root: Path, value: str | None) -> None:
    """With the tool's own words, and the setting to go on without."""
    environment = put_tool(root, "nvidia-smi") | ({} if value is None else {"CUDA_VISIBLE_DEVICES": value})

    with pytest.raises(BadSettings) as caught:
        describe_machine(environment, with_driver(root), failing, is_strict=True, load_nvml=missing)

    assert "nvidia-smi ended with status 15: GPU is lost" in caught.value.message
    assert "number_of_gpu=0" in caught.value.message


@pytest.mark.parametrize("value", ["", "-1", "none", "NoDevFiles"])
def test_devices_that_are_hidden_are_not_missed(root: Path, value: str) -> None:
    """Whoever hides them wants none."""
    environment = put_tool(root, "nvidia-smi") | {"CUDA_VISIBLE_DEVICES": value}

    assert not describe_machine(environment, with_driver(root), failing, is_strict=True, load_nvml=missing).devices


def test_a_start_as_torchserves_goes_on_with_a_remark(root: Path) -> None:
    """It serves on the processors, and says why."""
    machine = describe_machine({"PATH": "", "CUDA_VISIBLE_DEVICES": "0"}, root, failing, load_nvml=missing)

    assert machine.devices == ()
    assert "CUDA_VISIBLE_DEVICES is '0', and no device can be read: nvidia-smi is not installed" in machine.remarks[0]


def test_without_devices_wanted_nothing_is_asked(root: Path) -> None:
    """The way to go on without the driver."""
    environment = put_tool(root, "nvidia-smi") | {"CUDA_VISIBLE_DEVICES": "0"}

    machine = describe_machine(environment, with_driver(root), never, is_strict=True, uses_devices=False)

    assert (machine.devices, machine.remarks) == ((), ())


def test_a_tool_that_stumbles_is_remarked_though_devices_are_found(root: Path) -> None:
    """They are used, and the operator learns of it."""
    rows = "0, GPU-a, H200, 00000000:1B:00.0, 143771, Disabled\n"

    machine = describe_machine(
        put_tool(root, "nvidia-smi"), root, lambda command: ToolOutput(rows, 14, "nvidia-smi ended with status 14")
    )

    assert machine.accelerators == 1
    assert machine.remarks == ("Accelerators: nvidia-smi ended with status 14",)
