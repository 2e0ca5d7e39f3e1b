"""Which accelerators are installed: what the vendors' tools print, read into plain data."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from marserve.machine.accelerators import MIB, Accelerator, Vendor, sys_bus_id
from marserve.machine.finding import find_installed, read_nvidia, with_instances
from marserve.machine.vendors.tools import Run, ToolOutput
from support.fake_nvml import FakeGpu, FakeNvml, missing
from support.machines import EIGHT_H100, MIG_LIST, MIG_TABLE

Devices = tuple[Accelerator, ...]


def put_tool(folder: Path, name: str) -> dict[str, str]:
    """An executable of that name, and the environment that finds it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("#!/bin/sh\n")
    (folder / name).chmod(stat.S_IRWXU)
    return {"PATH": str(folder)}


def answering(answers: dict[str, str], status: int = 0) -> Run:
    """A tool that prints what stands beside the beginning of its first argument, and nothing to other questions."""

    def run(command: Sequence[str]) -> ToolOutput:
        text = next((text for word, text in answers.items() if command[1].startswith(word)), "")
        return ToolOutput(text, status, f"status {status}" if status else "")

    return run


def find(environment: dict[str, str], run: Run, root: Path = Path("/nowhere")) -> tuple[Vendor | None, Devices]:
    """What is found without NVIDIA's library."""
    found = find_installed(environment, run, root, missing)
    return found.vendor, found.devices


def test_a_machine_of_eight_gpus_is_described(tmp_path: Path) -> None:
    """Number, UUID, memory and PCI address of each."""
    vendor, devices = find(put_tool(tmp_path, "nvidia-smi"), answering({"--query-gpu=index": EIGHT_H100}))

    assert vendor == "nvidia"
    assert [device.label for device in devices] == [str(number) for number in range(8)]
    assert devices[5] == Accelerator(
        "NVIDIA H100 80GB HBM3", "5", "5", "GPU-55555555-0000-0000-0000-000000000005", 81559 * MIB, "0000:a8:00.0"
    )
    assert not any(device.is_instance for device in devices)


def test_a_gpu_that_is_cut_counts_as_its_instances(tmp_path: Path) -> None:
    """The second of three GPUs is in MIG mode with two instances; they stand in its place."""
    run = answering({"--query-gpu=index": MIG_TABLE, "-L": MIG_LIST})

    _, devices = find(put_tool(tmp_path, "nvidia-smi"), run)

    assert [(device.label, device.handle) for device in devices] == [
        ("0", "0"),
        ("1:0", "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"),
        ("1:1", "MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb"),
        ("2", "2"),
    ]
    assert devices[1].memory_bytes == 40 * 1024 * MIB
    assert devices[2].bus_id == "0000:3b:00.0"
    assert devices[2].is_instance


def test_a_gpu_in_mig_mode_without_instances_is_no_device() -> None:
    """Nothing can compute on it."""
    whole, cut = read_nvidia(MIG_TABLE)

    assert [device.label for device in with_instances(whole, cut, "GPU 1: NVIDIA H100 (UUID: GPU-1)\n")] == ["0", "2"]


def test_a_tool_that_does_not_know_the_table_still_counts(tmp_path: Path) -> None:
    """An old driver answers nothing when it is asked for one thing it does not know; every driver has the list."""
    listing = "GPU 0: Tesla K80 (UUID: GPU-0a)\nGPU 1: Tesla K80\n"

    assert find(put_tool(tmp_path, "nvidia-smi"), answering({"-L": listing})) == (
        "nvidia",
        (Accelerator("Tesla K80", "0", "0", "GPU-0a"), Accelerator("Tesla K80", "1", "1")),
    )


@pytest.mark.parametrize("status", [0, 14, 255])
def test_rows_count_whatever_the_status_is(tmp_path: Path, status: int) -> None:
    """Status 14 is a corrupted infoROM, behind a complete table; what the tool said of it is kept."""
    run = answering({"--query-gpu=index": EIGHT_H100}, status)

    found = find_installed(put_tool(tmp_path, "nvidia-smi"), run, tmp_path, missing)

    assert len(found.devices) == 8
    assert found.complaints == ((f"status {status}",) if status else ())


PROSE = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\nMake sure it is running.\n"


@pytest.mark.parametrize("status", [0, 9])
def test_prose_is_no_device(tmp_path: Path, status: int) -> None:
    """Whatever the tool is asked, and also with status 0."""
    run = answering({"--query-gpu": PROSE, "-L": PROSE}, status)

    assert find(put_tool(tmp_path, "nvidia-smi"), run, tmp_path) == (None, ())


def test_the_library_is_asked_where_the_tool_tells_nothing(tmp_path: Path) -> None:
    """A tool that fails, and none at all beside a driver; one broken GPU does not hide the others."""
    gpus = [FakeGpu(), FakeGpu(lost=True), FakeGpu(instances=[FakeGpu(total=40192), None, FakeGpu(total=20096)])]
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()

    by_failing_tool = find_installed(
        put_tool(tmp_path / "bin", "nvidia-smi"), answering({}, 15), tmp_path, lambda: FakeNvml(gpus)
    )
    without_tool = find_installed({"PATH": ""}, answering({}), tmp_path, lambda: FakeNvml(gpus))

    assert [device.label for device in by_failing_tool.devices] == ["0", "2:0", "2:2"]
    assert by_failing_tool.devices == without_tool.devices
    assert by_failing_tool.devices[0] == Accelerator("H100", "0", "0", "GPU-0", 81559 * MIB, "0000:1b:00.0")
    assert by_failing_tool.devices[1].handle == by_failing_tool.devices[1].uuid == "MIG-2-0"
    assert by_failing_tool.complaints[0] == "status 15"
    assert any("does not tell device 1" in complaint for complaint in by_failing_tool.complaints)


@pytest.mark.parametrize(
    "row",
    [
        f"0, GPU-1, {'F' * 200_000}, 00000000:01:00.0, 16000, Disabled",
        f"0, GPU-1, Fake, 00000000:01:00.0, {'9' * 5000}, Disabled",
        f"{'9' * 5000}, GPU-1, Fake, 00000000:01:00.0, 16000, Disabled",
    ],
)
def test_a_table_that_cannot_be_read_is_a_complaint(tmp_path: Path, row: str) -> None:
    """It was an error of Python's that ended the start. The next source is asked."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()

    installed = find_installed(
        put_tool(tmp_path / "bin", "nvidia-smi"),
        lambda command: ToolOutput(row + "\n"),
        tmp_path,
        lambda: FakeNvml([FakeGpu()]),
    )

    assert [device.label for device in installed.devices] == ["0"]
    assert installed.complaints[0].startswith("what nvidia-smi printed cannot be read: ")
    assert len(installed.complaints[0]) < 200


def test_without_tool_and_driver_the_library_is_not_asked(tmp_path: Path) -> None:
    """A machine without devices does not pay for it."""

    def never() -> Any:
        raise AssertionError

    assert find_installed({"PATH": ""}, answering({}), tmp_path, never).devices == ()


def test_the_tool_is_found_where_kubernetes_engines_mount_it(tmp_path: Path) -> None:
    """There it is in no PATH."""
    put_tool(tmp_path / "usr", "ignored")
    put_tool(tmp_path / "usr" / "local", "ignored")
    put_tool(tmp_path / "usr" / "local" / "nvidia", "ignored")
    put_tool(tmp_path / "usr" / "local" / "nvidia" / "bin", "nvidia-smi")

    found = find_installed({"PATH": "/nowhere"}, answering({"--query-gpu=index": EIGHT_H100}), tmp_path, missing)

    assert len(found.devices) == 8
    assert found.tool == str(tmp_path / "usr/local/nvidia/bin/nvidia-smi")


def test_amds_devices_are_found_without_its_tool(tmp_path: Path) -> None:
    """In the order of the kernel's compute driver, by number and not by name; processors are none."""
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for node, simds, location in ((0, 0, 0), (2, 304, 0x0C00), (10, 304, 0x2201)):
        (nodes / str(node) / "mem_banks" / "0").mkdir(parents=True)
        text = f"simd_count {simds}\ngfx_target_version 90402\nlocation_id {location}\ndomain 1\nname_of\n"
        (nodes / str(node) / "properties").write_text(text)
        (nodes / str(node) / "mem_banks" / "0" / "properties").write_text("heap_type 1\nsize_in_bytes 206141652992\n")

    vendor, devices = find({"PATH": ""}, answering({}), tmp_path)

    assert vendor == "amd"
    assert devices == (
        Accelerator("AMD gfx942", "0", "0", "", 206141652992, "0001:0c:00.0"),
        Accelerator("AMD gfx942", "1", "1", "", 206141652992, "0001:22:00.1"),
    )


def test_rocm_devices_are_described(tmp_path: Path) -> None:
    """Its tool prints tables with a line for each card and some without."""
    run = answering(
        {
            "--showproductname": "device,Card Series\ncard0,MI300X\ncard1,MI300X\n\n",
            "--showbus": "device,PCI Bus,VRAM Total Memory (B)\ncard0,0000:0C:00.0,206141652992\nsystem,,\n",
        }
    )

    vendor, devices = find(put_tool(tmp_path, "rocm-smi"), run)

    assert vendor == "amd"
    assert devices == (
        Accelerator("MI300X", "0", "0", "", 206141652992, "0000:0c:00.0"),
        Accelerator("MI300X", "1", "1"),
    )


def test_intels_devices_are_found_by_its_discovery(tmp_path: Path) -> None:
    """By the lines that name a device."""
    run = answering({"discovery": "| 0 | Device Name: Intel Max 1100 |\n| | Vendor Name: Intel |\n"})

    assert find(put_tool(tmp_path, "xpu-smi"), run) == ("intel", (Accelerator("Intel Max 1100", "0", "0"),))


def test_the_first_tool_that_finds_something_counts(tmp_path: Path) -> None:
    """An image may carry the tools of machines that it does not run on."""
    environment = put_tool(tmp_path, "rocm-smi") | put_tool(tmp_path, "nvidia-smi")

    vendor, devices = find(environment, answering({"--query-gpu=index": EIGHT_H100}))

    assert (vendor, len(devices)) == ("nvidia", 8)
    assert find(environment, answering({})) == (None, ())


def test_an_apple_machine_has_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no tool: the kind of machine says it."""
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")

    assert find({"PATH": ""}, answering({})) == ("apple", (Accelerator("Apple GPU", "0", "0"),))


@pytest.mark.parametrize(
    ("told", "wanted"),
    [("00000000:3B:00.0", "0000:3b:00.0"), ("0000:0C:00.0", "0000:0c:00.0"), ("[N/A]", ""), ("", "")],
)
def test_pci_addresses_are_written_as_sys_has_them(told: str, wanted: str) -> None:
    """Tools write more digits, and capitals."""
    assert sys_bus_id(told) == wanted


@pytest.mark.parametrize("text", ["", "no\n", "Failed to initialize NVML: Driver/library version mismatch\n", "0, a\n"])
def test_what_is_no_table_has_no_devices(text: str) -> None:
    """Nothing is guessed."""
    assert read_nvidia(text) == ([], [])
