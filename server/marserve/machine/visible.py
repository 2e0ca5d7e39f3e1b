"""Which of the installed devices the server's workers may see, by the variables of the vendor's runtime. Pure.

    NVIDIA   CUDA_VISIBLE_DEVICES: numbers, UUIDs of GPUs (`GPU-…`, or a beginning that no other has) and of MIG
             instances (`MIG-…`, also in the older form `MIG-GPU-…/1/0`)
    AMD      ROCR_VISIBLE_DEVICES first; among those HIP_VISIBLE_DEVICES, or, as HIP has it, CUDA_VISIBLE_DEVICES
    Intel    ZE_AFFINITY_MASK, which torch goes by: numbers, or tiles (`0.1`); among those XPU_VISIBLE_DEVICES,
             TorchServe's, which torch does not know: numbers

CUDA's list is of one kind, by torch's own parser, which was written to match the driver: all entries begin with
`GPU-`, or all with `MIG-`, or all are numbers. CUDA ends the list silently at the first entry of another kind, blanks
and letters of the wrong case included. Here that is an error.

A variable that is unset shows all devices, an empty one none. TorchServe takes only numbers, and reads them as CUDA
does: the first that is not a device ends the list, silently. In strict reading such an entry is an error, since the
operator has named it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile

from marserve.errors import BadSettings
from marserve.machine.accelerators import Accelerator, Vendor

# The variable in which a worker is shown its devices.
VISIBLE_DEVICES: Mapping[Vendor, str] = {
    "nvidia": "CUDA_VISIBLE_DEVICES",
    "amd": "HIP_VISIBLE_DEVICES",
    "intel": "ZE_AFFINITY_MASK",
}
XPU = "XPU_VISIBLE_DEVICES"
ROCR = "ROCR_VISIBLE_DEVICES"
# What Slurm writes for a job without devices; it cannot mean a device.
_NONE = ("nodevfiles", "none", "void")
_ORDER = "CUDA_DEVICE_ORDER"
_UUIDS = ("GPU-", "MIG-")


def choose_visible(
    installed: Sequence[Accelerator], vendor: Vendor | None, environment: Mapping[str, str], *, is_strict: bool
) -> tuple[Accelerator, ...]:
    """Those that are visible, in the order in which processes count them, each under the handle that shows it.

    `is_strict`: UUIDs are taken, and an entry that is not a device is refused. Raises BadSettings with the variable,
    its value and the next step.
    """
    read = _strictly if is_strict else _as_torchserve
    if vendor == "amd":
        seen = list(installed)
        if ROCR in environment:
            chosen = read(ROCR, environment[ROCR], seen)
            seen = [device._replace(handle=str(number)) for number, device in enumerate(chosen)]
        # HIP itself reads CUDA's name where its own is missing; TorchServe does not.
        names = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if is_strict else ("HIP_VISIBLE_DEVICES",)
        name = next((name for name in names if name in environment), None)
        return tuple(read(name, environment[name], seen) if name else seen)
    if vendor == "intel":
        seen = _by_affinity(environment.get(VISIBLE_DEVICES["intel"], ""), installed, is_strict=is_strict)
        return tuple(read(XPU, environment[XPU], seen) if XPU in environment else seen)
    name = VISIBLE_DEVICES.get(vendor) if vendor else None
    chosen = list(installed)
    if name is not None and name in environment:
        chosen = read(name, environment[name], chosen)
    if vendor == "nvidia" and not _is_order_known(installed, environment):
        chosen = [device if device.handle == device.uuid else _unknown(device) for device in chosen]
    return tuple(chosen)


def _is_entry(text: str) -> bool:
    """Whether this part of a list does not end it."""
    return text.strip() != "-1" and text.strip().lower() not in _NONE


def names_device(value: str) -> bool:
    """Whether a list of visible devices begins with one: not `-1` or `none`, and the list is not empty."""
    return bool(value.strip()) and _is_entry(value.partition(",")[0])


def _as_torchserve(name: str, value: str, devices: Sequence[Accelerator]) -> list[Accelerator]:
    if not value.strip():
        return []
    try:
        numbers = [int(part) for part in value.split(",")]
    except ValueError:
        raise BadSettings(
            "Invalid format: The env defining visible devices must be integers separated by commas: "
            f"{name} is {value.strip()!r}; name devices by their numbers, for example {name}=0,1",
            key=name,
        ) from None
    by_number = _by_number(devices)
    visible: list[Accelerator] = []
    seen: set[int] = set()
    for number in numbers:
        if str(number) not in by_number or number in seen:
            break
        seen.add(number)
        visible += by_number[str(number)]
    return visible


def _strictly(name: str, value: str, devices: Sequence[Accelerator]) -> list[Accelerator]:
    by_number = _by_number(devices)
    visible: list[Accelerator] = []
    written = list(takewhile(_is_entry, value.split(",") if value.strip() else ()))
    if name == VISIBLE_DEVICES["nvidia"]:
        for entry in written:
            _refuse_dropped(entry, value, devices)
    for entry in (each.strip() for each in written):
        if entry.isdecimal():
            chosen = by_number.get(str(int(entry)), [])
        elif entry.upper().startswith(_UUIDS):
            chosen = _by_uuid(entry, devices)
        else:
            raise BadSettings(
                f"{name} is {value!r}, and {entry!r} names no device: name devices by number or by UUID, for example "
                f"{name}=0,1 or {name}={_example(devices)}",
                key=name,
            )
        if not chosen:
            raise BadSettings(
                f"{name} is {value!r}, and there is no device {entry}: {_listed(devices)}. Name one of those, or unset "
                f"{name} to use all",
                key=name,
            )
        known = {device._replace(handle="") if device.label else device for device in visible}
        if any((device._replace(handle="") if device.label else device) in known for device in chosen):
            raise BadSettings(f"{name} is {value!r}, which names device {entry} twice: name each once", key=name)
        visible += chosen
    return visible


def _by_affinity(value: str, devices: Sequence[Accelerator], *, is_strict: bool) -> list[Accelerator]:
    """What Level Zero shows of the devices: all without a mask, each entry of it under that entry's own words."""
    if not value.strip():
        return list(devices)
    by_number = _by_number(devices)
    visible: list[Accelerator] = []
    for entry in (each.strip() for each in value.split(",")):
        number, dot, tile = entry.partition(".")
        chosen = by_number.get(number, []) if not dot or tile.isdecimal() else []
        if not chosen and is_strict:
            name = VISIBLE_DEVICES["intel"]
            raise BadSettings(
                f"{name} is {value!r}, and {entry!r} names no device: {_listed(devices)}. Name devices by number, or "
                f"tiles of them, for example {name}=0,1 or {name}=0.0,0.1, or unset {name} to use all",
                key=name,
            )
        visible += [device._replace(handle=entry) for device in chosen]
    return visible


def _refuse_dropped(entry: str, value: str, devices: Sequence[Accelerator]) -> None:
    """Raise BadSettings for an entry at which CUDA would stop reading the list."""
    kind = next((prefix for prefix in _UUIDS if value.startswith(prefix)), "")
    if entry.startswith(kind) if kind else not entry.strip().upper().startswith(_UUIDS):
        return
    if entry.strip().upper().startswith(kind or _UUIDS):
        how = "write GPU- and MIG- in capitals, without blanks"
    else:
        how = "name all devices by number, all by UUIDs of GPUs, or all by UUIDs of MIG instances"
    raise BadSettings(
        f"CUDA_VISIBLE_DEVICES is {value!r}, and CUDA stops reading it at {entry!r}, so it uses none from there on: "
        f"{how}, for example CUDA_VISIBLE_DEVICES={_example(devices)}",
        key="CUDA_VISIBLE_DEVICES",
    )


def _by_number(devices: Sequence[Accelerator]) -> dict[str, list[Accelerator]]:
    """The devices by their GPU's place among all: one each, or the instances of one that is cut."""
    found: dict[str, list[Accelerator]] = {}
    for device in devices:
        found.setdefault(device.gpu, []).append(device)
    if any(device.is_instance for device in devices):
        return found
    return {str(number): own for number, own in enumerate(found.values())}


def _by_uuid(entry: str, devices: Sequence[Accelerator]) -> list[Accelerator]:
    """The device that is meant by a UUID, or by so much of it that no other begins alike."""
    if not any(device.uuid for device in devices):  # the tool reported none: the runtime will know
        number = len(devices)
        return [Accelerator(devices[0].name, "", entry, entry)] if number else []
    wanted = entry.lower()
    fits: Callable[[str], bool] = wanted.__eq__ if wanted.startswith("mig-") else lambda uuid: uuid.startswith(wanted)
    found = [device for device in devices if device.uuid and fits(device.uuid.lower())]
    return [found[0]._replace(handle=found[0].uuid)] if len(found) == 1 else []


def _is_order_known(installed: Sequence[Accelerator], environment: Mapping[str, str]) -> bool:
    """Whether CUDA counts as the tool does: workers are set so, unless the operator has set another order."""
    order = environment.get(_ORDER, "PCI_BUS_ID")
    return order == "PCI_BUS_ID" or len({device.name for device in installed}) <= 1


def _unknown(device: Accelerator) -> Accelerator:
    """A device of that number; which of the installed ones it is, is not known."""
    return Accelerator("GPU", "", device.handle)


def order_of_devices(vendor: Vendor | None, environment: Mapping[str, str]) -> dict[str, str]:
    """What has CUDA count devices as `nvidia-smi` does, so that a number means one device everywhere."""
    return {_ORDER: "PCI_BUS_ID"} if vendor == "nvidia" and _ORDER not in environment else {}


def _listed(devices: Sequence[Accelerator]) -> str:
    if not devices:
        return "there are none"
    shown = [f"{device.label} ({device.uuid})" if device.uuid else device.label for device in devices[:8]]
    more = len(devices) - len(shown)
    return f"there are {', '.join(shown)}{f' and {more} more' if more else ''}"


def _example(devices: Sequence[Accelerator]) -> str:
    return next((device.uuid for device in devices if device.uuid), "GPU-8932f937")
