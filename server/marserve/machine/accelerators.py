"""Which accelerators are installed, as the vendors' tools tell it: `rocm-smi`, `nvidia-smi`, `xpu-smi`, in that order.

The order is TorchServe's. Reading is pure: text in, plain data out. A tool that knows less than is asked (of an old
driver) still counts devices; what it does not tell stays empty. A GPU that is cut into MIG instances is no device
itself: its instances are.
"""

from __future__ import annotations

import csv
import platform
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

Run = Callable[[Sequence[str]], str]
Vendor = Literal["nvidia", "amd", "intel", "apple"]

MIB = 1024 * 1024

# One line a GPU. `mig.mode.current` is not known to drivers before 450, which then answer nothing to all of it.
_NVIDIA_FIELDS = "index,uuid,name,pci.bus_id,memory.total,mig.mode.current"
_GPU_LINE = re.compile(r"^GPU (\d+):")
_INSTANCE_LINE = re.compile(r"^\s+MIG (\S+)\s+Device\s+(\d+): \(UUID: (MIG-[^)\s]+)\)")
_PROFILE_GIB = re.compile(r"\.(\d+)gb")


class Accelerator(NamedTuple):
    """One device that a process can be given. Empty, or 0, is what nobody told.

    `label` is its number as the vendor's tool counts, `GPU:INSTANCE` for a MIG instance; `handle` is what stands for it
    in the variable that says which devices a process sees. `bus_id` is the PCI address as /sys writes it.
    """

    name: str
    label: str
    handle: str
    uuid: str = ""
    memory_bytes: int = 0
    bus_id: str = ""

    @property
    def is_instance(self) -> bool:
        """Whether it is a part of a GPU (MIG)."""
        return ":" in self.label

    @property
    def gpu(self) -> str:
        """The number of the GPU that it is, or is a part of."""
        return self.label.partition(":")[0]


def find_installed(environment: Mapping[str, str], run: Run) -> tuple[Vendor | None, tuple[Accelerator, ...]]:
    """What the first tool finds that finds anything; a tool is only started where it is installed."""
    search = environment.get("PATH")
    tools: tuple[tuple[Vendor, str, Callable[[str, Run], list[Accelerator]]], ...] = (
        ("amd", "rocm-smi", _find_amd),
        ("nvidia", "nvidia-smi", _find_nvidia),
        ("intel", "xpu-smi", _find_intel),
    )
    for vendor, tool, find in tools:
        path = shutil.which(tool, path=search)
        found = find(path, run) if path else []
        if found:
            return vendor, tuple(found)
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return "apple", (Accelerator("Apple GPU", "0", "0"),)
    return None, ()


def _find_nvidia(tool: str, run: Run) -> list[Accelerator]:
    rows = run([tool, f"--query-gpu={_NVIDIA_FIELDS}", "--format=csv,noheader,nounits"])
    found, cut = read_nvidia(rows)
    if found or cut:
        return with_instances(found, cut, run([tool, "-L"])) if cut else found
    names = run([tool, "--query-gpu=name", "--format=csv,noheader"]).splitlines()
    return _numbered(name.strip() for name in names if name.strip())


def read_nvidia(text: str) -> tuple[list[Accelerator], list[Accelerator]]:
    """The GPUs of the tool's table: those that are whole, and those that are cut into MIG instances."""
    whole: list[Accelerator] = []
    cut: list[Accelerator] = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) != 6 or not row[0].strip().isdecimal():
            continue
        index, uuid, name, bus_id, mib, mig = (cell.strip() for cell in row)
        memory = int(mib) * MIB if mib.isdecimal() else 0
        gpu = Accelerator(name, index, index, uuid, memory, sys_bus_id(bus_id))
        (cut if mig == "Enabled" else whole).append(gpu)
    return whole, cut


def with_instances(whole: Sequence[Accelerator], cut: Sequence[Accelerator], listing: str) -> list[Accelerator]:
    """All devices in the order of their GPUs; for those that are `cut` their instances in `nvidia-smi -L`."""
    parents = {gpu.label: gpu for gpu in cut}
    found = {gpu.label: [gpu] for gpu in whole} | {label: [] for label in parents}
    parent: Accelerator | None = None
    for line in listing.splitlines():
        if gpu_line := _GPU_LINE.match(line):
            parent = parents.get(gpu_line[1])
        elif parent is not None and (instance := _INSTANCE_LINE.match(line)):
            profile, number, uuid = instance.groups()
            gib = _PROFILE_GIB.search(profile)
            found[parent.label].append(
                Accelerator(
                    f"{parent.name} MIG {profile}",
                    f"{parent.label}:{number}",
                    uuid,
                    uuid,
                    int(gib[1]) * 1024 * MIB if gib else 0,
                    parent.bus_id,
                )
            )
    return [device for label in sorted(found, key=int) for device in found[label]]


def sys_bus_id(bus_id: str) -> str:
    """A PCI address as /sys writes it: `00000000:3B:00.0` is `0000:3b:00.0`; empty for what is none."""
    match = re.fullmatch(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2}\.[0-7])", bus_id)
    return f"{match[1][-4:]}:{match[2]}:{match[3]}".lower() if match else ""


def _find_amd(tool: str, run: Run) -> list[Accelerator]:
    known = card_rows(run([tool, "--showproductname", "--csv"]))
    if not known:
        return []
    more = {row["device"]: row for row in card_rows(run([tool, "--showbus", "--showmeminfo", "vram", "--csv"]))}
    found = []
    for number, row in enumerate(known):
        also = more.get(row["device"], {})
        memory = also.get("VRAM Total Memory (B)") or ""
        found.append(
            Accelerator(
                row.get("Card Series") or row.get("Card series") or "AMD GPU",
                str(number),
                str(number),
                memory_bytes=int(memory) if memory.isdecimal() else 0,
                bus_id=sys_bus_id(also.get("PCI Bus") or ""),
            )
        )
    return found


def card_rows(text: str) -> list[dict[str, str]]:
    """The rows of a table of `rocm-smi` that are about cards."""
    return [row for row in csv.DictReader(text.strip().splitlines()) if (row.get("device") or "").startswith("card")]


def _find_intel(tool: str, run: Run) -> list[Accelerator]:
    return _numbered(re.findall(r"Device Name:\s*(.+?)\s*\|?\s*$", run([tool, "discovery"]), re.MULTILINE))


def _numbered(names: Iterable[str]) -> list[Accelerator]:
    return [Accelerator(name, str(number), str(number)) for number, name in enumerate(names)]
