"""Which processors are near a device: /sys of a machine with two sockets."""

from __future__ import annotations

from pathlib import Path

import pytest

from marserve.machine.numa import cpus_near, parse_cpu_list

FIRST, SECOND, NOWHERE = "0000:1b:00.0", "0000:c3:00.0", "0000:ff:00.0"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Eight processors on two nodes, a device on each, and one that belongs to none."""
    for bus_id, node in ((FIRST, 0), (SECOND, 1), (NOWHERE, -1)):
        folder = tmp_path / "sys/bus/pci/devices" / bus_id
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    for node, cpus in ((0, "0-1,4-5"), (1, "2-3,6-7")):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("", set()), ("0-", {0}), ("x", set()), ("1,y-2", set())],
)
def test_the_kernels_lists_are_read(text: str, cpus: set[int]) -> None:
    """What is none is empty."""
    assert parse_cpu_list(text) == cpus


@pytest.mark.parametrize(
    ("devices", "cpus"),
    [([FIRST], (0, 1, 4, 5)), ([SECOND], (2, 3, 6, 7)), ([FIRST, SECOND], ()), ([NOWHERE], ()), ([""], ()), ([], ())],
)
def test_a_device_has_the_processors_of_its_node(root: Path, devices: list[str], cpus: tuple[int, ...]) -> None:
    """None where that would be all of them, or where nobody says."""
    assert cpus_near(devices, range(8), root) == cpus


def test_only_processors_that_may_be_used_count(root: Path) -> None:
    """A container may have half of a node, or none of it: then the worker stays where it is."""
    assert cpus_near([SECOND], [0, 2, 6], root) == (2, 6)
    assert cpus_near([SECOND], [0, 1], root) == ()
    assert cpus_near([SECOND], [2, 3], root) == ()


def test_a_machine_that_does_not_say_pins_nothing(tmp_path: Path) -> None:
    """Another system, or a device that /sys does not know."""
    assert cpus_near([FIRST], range(8), tmp_path) == ()
