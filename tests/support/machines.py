"""What the tools of accelerators print on machines that are not here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_BUSES = ("1B", "43", "52", "61", "9D", "A8", "C3", "D1")

# nvidia-smi --query-gpu=index,uuid,name,pci.bus_id,memory.total,mig.mode.current
EIGHT_H100 = "".join(
    f"{number}, GPU-{str(number) * 8}-0000-0000-0000-{number:012d}, NVIDIA H100 80GB HBM3, 00000000:{bus}:00.0, 81559, "
    "Disabled\n"
    for number, bus in enumerate(_BUSES)
)
MIG_TABLE = """\
0, GPU-0a, NVIDIA H100 80GB HBM3, 00000000:1B:00.0, 81559, Disabled
1, GPU-1b, NVIDIA H100 80GB HBM3, 00000000:3B:00.0, 81559, Enabled
2, GPU-2c, NVIDIA H100 80GB HBM3, 00000000:52:00.0, 81559, Disabled
"""
MIG_LIST = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0a)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-1b)
  MIG 3g.40gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
  MIG 3g.40gb     Device  1: (UUID: MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb)
GPU 2: NVIDIA H100 80GB HBM3 (UUID: GPU-2c)
"""


def put_nvidia_smi(folder: Path) -> FakeNvidiaSmi:
    """An `nvidia-smi` that prints what its files say; its `environment` finds it, and nothing of a real device."""
    folder.mkdir(parents=True, exist_ok=True)
    tool = folder / "nvidia-smi"
    tool.write_text(_TOOL.format(folder=folder))
    tool.chmod(0o755)
    return FakeNvidiaSmi(folder)


@dataclass(frozen=True)
class FakeNvidiaSmi:
    """The stand-in: what it prints can be changed while a server runs."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """What has it found before any other."""
        return {"PATH": f"{self.folder}{os.pathsep}{os.environ['PATH']}"}

    def install(self, table: str, listing: str = "") -> None:
        """Have these devices: the table of what they are, and the list with MIG instances."""
        (self.folder / "devices").write_text(table)
        (self.folder / "list").write_text(listing)

    def use(self, *used_mib: int, total_mib: int = 81559) -> None:
        """Have so much of each device's memory in use; they are busy by the tens of their numbers, in percent."""
        rows = [
            f"{number}, {10 * number}, {total_mib - used}, {total_mib}, 3, 40\n" for number, used in enumerate(used_mib)
        ]
        self._write_use(rows)

    def lose(self, device: int, used_mib: int = 0, devices: int = 2) -> None:
        """Have one device answer as one that is lost does."""
        total = 81559
        rows = [f"{number}, 0, {total - used_mib}, {total}, 3, 40\n" for number in range(devices)]
        rows[device] = f"{device}, {', '.join(['[GPU is lost]'] * 5)}\n"
        self._write_use(rows)

    def _write_use(self, rows: list[str]) -> None:
        beside = self.folder / "use.new"
        beside.write_text("".join(rows))
        beside.replace(self.folder / "use")

    def count_processes(self) -> Path:
        """Have that memory in use from now on which living processes hold.

        Each writes `DEVICE MIB` into a file that is called by its id, in the folder that this returns.
        """
        held = self.folder / "held"
        held.mkdir()
        return held


_TOOL = """#!/bin/sh
count() {{
  number=0
  while read -r line; do
    used=0
    for file in {folder}/held/*; do
      kill -0 "${{file##*/}}" 2>/dev/null && read -r device mib <"$file" && [ "$device" = "$number" ] &&
        used=$((used + mib))
    done
    echo "$number, 0, $((81559 - used)), 81559, 3, 40"
    number=$((number + 1))
  done <{folder}/devices
}}
case "$1" in
  --query-gpu=index,uuid*) cat {folder}/devices ;;
  --query-gpu=index,utilization*) if [ -d {folder}/held ]; then count; else cat {folder}/use 2>/dev/null; fi ;;
  -L) cat {folder}/list ;;
esac
"""
