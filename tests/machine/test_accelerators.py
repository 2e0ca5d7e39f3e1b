"""Which accelerators are installed: what the vendors' tools print, read into plain data."""

from __future__ import annotations

import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from marserve.machine.accelerators import MIB, Accelerator, find_installed, read_nvidia, sys_bus_id, with_instances
from support.machines import EIGHT_H100, MIG_LIST, MIG_TABLE


def put_tool(folder: Path, name: str) -> dict[str, str]:
    """An executable of that name, and the environment that finds it."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("#!/bin/sh\n")
    (folder / name).chmod(stat.S_IRWXU)
    return {"PATH": str(folder)}


def answering(answers: dict[str, str]) -> Callable[[Sequence[str]], str]:
    """A tool that prints what stands beside the beginning of its first argument, and nothing to other questions."""

    def run(command: Sequence[str]) -> str:
        return next((text for word, text in answers.items() if command[1].startswith(word)), "")

    return run


def test_a_machine_of_eight_gpus_is_described(tmp_path: Path) -> None:
    """Number, UUID, memory and PCI address of each."""
    vendor, devices = find_installed(put_tool(tmp_path, "nvidia-smi"), answering({"--query-gpu=index": EIGHT_H100}))

    assert vendor == "nvidia"
    assert [device.label for device in devices] == [str(number) for number in range(8)]
    assert devices[5] == Accelerator(
        "NVIDIA H100 80GB HBM3", "5", "5", "GPU-55555555-0000-0000-0000-000000000005", 81559 * MIB, "0000:a8:00.0"
    )
    assert not any(device.is_instance for device in devices)


def test_a_gpu_that_is_cut_counts_as_its_instances(tmp_path: Path) -> None:
    """The second of three GPUs is in MIG mode with two instances; they stand in its place."""
    run = answering({"--query-gpu=index": MIG_TABLE, "-L": MIG_LIST})

    _, devices = find_installed(put_tool(tmp_path, "nvidia-smi"), run)

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


def test_a_tool_that_knows_names_only_still_counts(tmp_path: Path) -> None:
    """An old driver answers nothing when it is asked for one thing it does not know."""
    run = answering({"--query-gpu=name": "Tesla K80\nTesla K80\n"})

    assert find_installed(put_tool(tmp_path, "nvidia-smi"), run) == (
        "nvidia",
        (Accelerator("Tesla K80", "0", "0"), Accelerator("Tesla K80", "1", "1")),
    )


def test_rocm_devices_are_described(tmp_path: Path) -> None:
    """Its tool prints tables with a line for each card and some without."""
    run = answering(
        {
            "--showproductname": "device,Card Series\ncard0,MI300X\ncard1,MI300X\n\n",
            "--showbus": "device,PCI Bus,VRAM Total Memory (B)\ncard0,0000:0C:00.0,206141652992\nsystem,,\n",
        }
    )

    vendor, devices = find_installed(put_tool(tmp_path, "rocm-smi"), run)

    assert vendor == "amd"
    assert devices == (
        Accelerator("MI300X", "0", "0", "", 206141652992, "0000:0c:00.0"),
        Accelerator("MI300X", "1", "1"),
    )


def test_intels_devices_are_found_by_its_discovery(tmp_path: Path) -> None:
    """By the lines that name a device."""
    run = answering({"discovery": "| 0 | Device Name: Intel Max 1100 |\n| | Vendor Name: Intel |\n"})

    assert find_installed(put_tool(tmp_path, "xpu-smi"), run) == ("intel", (Accelerator("Intel Max 1100", "0", "0"),))


def test_the_first_tool_that_finds_something_counts(tmp_path: Path) -> None:
    """An image may carry the tools of machines that it does not run on."""
    environment = put_tool(tmp_path, "rocm-smi") | put_tool(tmp_path, "nvidia-smi")

    found = find_installed(environment, answering({"--query-gpu=index": EIGHT_H100}))

    assert (found[0], len(found[1])) == ("nvidia", 8)
    assert find_installed(environment, lambda command: "") == (None, ())


def test_an_apple_machine_has_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no tool: the kind of machine says it."""
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")

    assert find_installed({"PATH": ""}, lambda command: "") == ("apple", (Accelerator("Apple GPU", "0", "0"),))


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
