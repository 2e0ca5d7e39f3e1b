"""Which processors are near a device: those of the memory node that its PCI slot belongs to, by /sys."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

_ROOT = Path("/")


def parse_cpu_list(text: str) -> frozenset[int]:
    """The kernel's way to write processors: `0-3,8` is 0, 1, 2, 3 and 8. Empty for any other text."""
    cpus: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            return frozenset()
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def cpus_near(bus_ids: Iterable[str], allowed: Iterable[int], root: Path = _ROOT) -> tuple[int, ...]:
    """The processors, of those `allowed`, that are near any of the devices with these PCI addresses, in order.

    Empty if the machine has only one node or does not report nodes, or if none of the near processors may be used: the
    worker then stays where it is. `root` stands for `/` in tests.
    """
    near: set[int] = set()
    for bus_id in bus_ids:
        if not bus_id:
            return ()
        try:
            node = int((root / "sys/bus/pci/devices" / bus_id / "numa_node").read_text())
            cpus = (root / f"sys/devices/system/node/node{node}/cpulist").read_text() if node >= 0 else ""
        except (OSError, ValueError):
            return ()
        if not cpus.strip():
            return ()
        near |= parse_cpu_list(cpus)
    usable = frozenset(allowed)
    chosen = near & usable
    return tuple(sorted(chosen)) if chosen and chosen != usable else ()
