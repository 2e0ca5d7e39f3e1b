"""Which accelerators are installed, by the vendors' tools: `rocm-smi`, `nvidia-smi`, `xpu-smi`, in that order.

The order is TorchServe's. Reading is pure: text in, plain data out. A row is recognised by its shape, whatever the
tool's exit status: `nvidia-smi` prints a complete table and ends with 14 if a GPU's infoROM is corrupted. A tool of an
old driver that knows fewer columns still counts devices; unknown values stay empty. If `nvidia-smi` reports nothing,
NVIDIA's library is asked; without `rocm-smi` the kernel's own files are read. A GPU that is cut into MIG
instances is not a device itself: its instances are.
"""

from __future__ import annotations

import platform
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from marserve.machine.accelerators import MIB, Accelerator, Vendor, sys_bus_id
from marserve.machine.vendors.nvml import Nvml, NvmlMissing, import_nvml
from marserve.machine.vendors.tables import Unreadable, read_integer, read_lines, read_rows
from marserve.machine.vendors.tools import Run

# One line a GPU. `mig.mode.current` is unknown to drivers before 450, and these then answer nothing at all.
_NVIDIA_FIELDS = "index,uuid,name,pci.bus_id,memory.total,mig.mode.current"
_GPU_LINE = re.compile(r"^GPU (\d+): (.+?)(?: \(UUID: (GPU-[^)\s]+)\))?\s*$")
_INSTANCE_LINE = re.compile(r"^\s+MIG (\S+)\s+Device\s+(\d+): \(UUID: (MIG-[^)\s]+)\)")
_PROFILE_GIB = re.compile(r"\.(\d+)gb")

_Find = Callable[[str, Run, list[str]], list[Accelerator]]


class Installed(NamedTuple):
    """The installed devices. `complaints` are sentences about tools that reported nothing, or not everything.

    `tool` is the path of the vendor's tool, empty without one.
    """

    vendor: Vendor | None
    devices: tuple[Accelerator, ...]
    complaints: tuple[str, ...] = ()
    tool: str = ""


def find_installed(
    environment: Mapping[str, str], run: Run, root: Path = Path("/"), load_nvml: Callable[[], Any] = import_nvml
) -> Installed:
    """The devices of the first tool that finds any; only installed tools are started.

    `root` stands for `/` in tests.
    """
    complaints: list[str] = []
    finders: tuple[tuple[Vendor, str, _Find], ...] = (
        ("amd", "rocm-smi", _find_amd),
        ("nvidia", "nvidia-smi", _find_nvidia),
        ("intel", "xpu-smi", _find_intel),
    )
    for vendor, tool, find in finders:
        path = find_tool(tool, environment, root)
        found = _ask(find, tool, path, run, complaints) if path else []
        if not found and vendor == "nvidia" and (path or has_nvidia_driver(root)):
            found = _ask_nvml(load_nvml, complaints)
        if not found and vendor == "amd":
            found = _find_kfd(root)
        if found:
            return Installed(vendor, tuple(found), tuple(complaints), path or "")
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return Installed("apple", (Accelerator("Apple GPU", "0", "0"),))
    return Installed(None, (), tuple(complaints))


def _ask(find: _Find, tool: str, path: str, run: Run, complaints: list[str]) -> list[Accelerator]:
    """The devices that a tool reports; if its output cannot be read, none and a complaint."""
    try:
        return find(path, run, complaints)
    except Unreadable as error:
        complaints.append(f"what {tool} printed cannot be read: {error}")
        return []


def find_tool(name: str, environment: Mapping[str, str], root: Path = Path("/")) -> str | None:
    """Where a vendor's tool lies: in PATH, else where Kubernetes engines mount NVIDIA's driver."""
    found = shutil.which(name, path=environment.get("PATH"))
    return found or shutil.which(name, path=str(root / "usr/local/nvidia/bin"))


def has_nvidia_driver(root: Path = Path("/")) -> bool:
    """Whether the kernel has NVIDIA's driver, and this process was given its control device."""
    return (root / "dev/nvidiactl").exists()


def _find_nvidia(tool: str, run: Run, complaints: list[str]) -> list[Accelerator]:
    rows = run([tool, f"--query-gpu={_NVIDIA_FIELDS}", "--format=csv,noheader,nounits"])
    found, cut = read_nvidia(rows.text)
    if found or cut:
        if rows.complaint:
            complaints.append(rows.complaint)
        return with_instances(found, cut, run([tool, "-L"]).text) if cut else found
    listing = run([tool, "-L"])
    complaint = rows.complaint or listing.complaint
    if complaint:
        complaints.append(complaint)
    return read_listing(listing.text)


def read_listing(text: str) -> list[Accelerator]:
    """The GPUs of `nvidia-smi -L`, which every driver knows: number, name and UUID. Raises Unreadable."""
    found = [_GPU_LINE.match(line) for line in read_lines(text)]
    return [Accelerator(each[2], each[1], each[1], each[3] or "") for each in found if each]


def _ask_nvml(load_nvml: Callable[[], Any], complaints: list[str]) -> list[Accelerator]:
    """The GPUs that NVIDIA's library reports."""
    try:
        with Nvml(load_nvml) as nvml:
            found, cannot = nvml.list_devices()
    except NvmlMissing as error:
        complaints.append(str(error))
        return []
    complaints += cannot
    return found


def read_nvidia(text: str) -> tuple[list[Accelerator], list[Accelerator]]:
    """The GPUs of the tool's table: those that are whole, and those that are cut into MIG instances.

    Raises Unreadable.
    """
    whole: list[Accelerator] = []
    cut: list[Accelerator] = []
    for row in read_rows(text):
        if len(row) != 6 or read_integer(row[0]) is None:
            continue
        index, uuid, name, bus_id, mib, mig = row
        memory = (read_integer(mib) or 0) * MIB
        known = uuid if uuid.startswith("GPU-") else ""  # a device that is lost has words in its cells
        gpu = Accelerator(name, index, index, known, memory, sys_bus_id(bus_id))
        (cut if mig == "Enabled" else whole).append(gpu)
    return whole, cut


def with_instances(whole: Sequence[Accelerator], cut: Sequence[Accelerator], listing: str) -> list[Accelerator]:
    """All devices in the order of their GPUs; for those that are `cut` their instances in `nvidia-smi -L`.

    Raises Unreadable.
    """
    parents = {gpu.label: gpu for gpu in cut}
    found = {gpu.label: [gpu] for gpu in whole} | {label: [] for label in parents}
    parent: Accelerator | None = None
    for line in read_lines(listing):
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


def _find_amd(tool: str, run: Run, complaints: list[str]) -> list[Accelerator]:
    names = run([tool, "--showproductname", "--csv"])
    known = card_rows(names.text)
    if names.complaint:
        complaints.append(names.complaint)
    if not known:
        return []
    more = {row["device"]: row for row in card_rows(run([tool, "--showbus", "--showmeminfo", "vram", "--csv"]).text)}
    found = []
    for number, row in enumerate(known):
        also = more.get(row["device"], {})
        memory = also.get("VRAM Total Memory (B)") or ""
        found.append(
            Accelerator(
                row.get("Card Series") or row.get("Card series") or "AMD GPU",
                str(number),
                str(number),
                memory_bytes=read_integer(memory) or 0,
                bus_id=sys_bus_id(also.get("PCI Bus") or ""),
            )
        )
    return found


def _find_kfd(root: Path) -> list[Accelerator]:
    """AMD's devices as the kernel's compute driver lists them, in the order in which ROCm counts them."""
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    found: list[Accelerator] = []
    for node in sorted(nodes.glob("[0-9]*"), key=lambda path: int(path.name)):
        values = _properties(node / "properties")
        if not values.get("simd_count"):  # a processor
            continue
        location, domain = values.get("location_id", 0), values.get("domain", 0)
        bus_id = f"{domain:04x}:{location >> 8:02x}:{(location & 0xFF) >> 3:02x}.{location & 7}"
        banks = [_properties(bank / "properties") for bank in (node / "mem_banks").glob("[0-9]*")]
        # Heaps 1 and 2 are the device's own memory, that which the host can reach and that which it cannot.
        memory = sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in (1, 2))
        number = str(len(found))
        version = values.get("gfx_target_version", 0)
        name = f"AMD gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}" if version else "AMD GPU"
        found.append(Accelerator(name, number, number, memory_bytes=memory, bus_id=bus_id))
    return found


def _properties(file: Path) -> dict[str, int]:
    """The numbers of a file with a name and a number in each line; empty where it cannot be read."""
    try:
        lines = [line.split() for line in file.read_text(errors="replace").splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdecimal()}


def card_rows(text: str) -> list[dict[str, str]]:
    """The rows of a table of `rocm-smi` that are about cards. Raises Unreadable."""
    header, *rows = [row for row in read_rows(text) if row] or [[]]
    named = [dict(zip(header, row, strict=False)) for row in rows]
    return [row for row in named if row.get("device", "").startswith("card")]


def _find_intel(tool: str, run: Run, complaints: list[str]) -> list[Accelerator]:
    output = run([tool, "discovery"])
    if output.complaint:
        complaints.append(output.complaint)
    return _numbered(re.findall(r"Device Name:\s*(.+?)\s*\|?\s*$", "\n".join(read_lines(output.text)), re.MULTILINE))


def _numbered(names: Iterable[str]) -> list[Accelerator]:
    return [Accelerator(name, str(number), str(number)) for number, name in enumerate(names)]
