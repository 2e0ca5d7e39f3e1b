"""Decides which worker gets which device. Pure: counts and lists in, device numbers out.

A `gpu_id` is an index among the *visible* devices, as handlers expect it (`torch.device(f"cuda:{gpu_id}")`), beginning
at 0; None means no device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from marserve.errors import BadSettings

Vendor = Literal["nvidia", "amd", "intel", "apple"]

VISIBLE_DEVICES: Mapping[Vendor, str] = {
    "nvidia": "CUDA_VISIBLE_DEVICES",
    "amd": "HIP_VISIBLE_DEVICES",
    "intel": "XPU_VISIBLE_DEVICES",
}


def count_visible(installed: int, vendor: Vendor | None, environment: Mapping[str, str]) -> int:
    """How many of the `installed` devices workers may see, after the vendor's variable.

    An unset variable shows all of them, an empty one none; a number past the installed ones, or -1, ends the list, as
    CUDA has it. Raises BadSettings for anything but integers separated by commas, UUIDs included.
    """
    name = VISIBLE_DEVICES.get(vendor) if vendor else None
    if name is None or name not in environment:
        return installed
    value = environment[name].strip()
    if not value:
        return 0
    try:
        numbers = [int(part) for part in value.split(",")]
    except ValueError:
        raise BadSettings(
            "Invalid format: The env defining visible devices must be integers separated by commas: "
            f"{name} is {value!r}; name devices by their numbers, for example {name}=0,1",
            key=name,
        ) from None
    visible: list[int] = []
    for number in numbers:
        if not 0 <= number < installed or number in visible:
            break
        visible.append(number)
    return len(visible)


def cap(visible: int, number_of_gpu: int | None) -> int:
    """How many devices the server uses: all that are visible, or as many as `number_of_gpu` allows."""
    return visible if number_of_gpu is None else max(0, min(visible, number_of_gpu))


def usable_ids(device_type: str | None, device_ids: Sequence[int], devices: int) -> tuple[int, ...]:
    """The devices that a model's workers may get; empty for the CPU.

    `device_type` is the model's `deviceType` (`cpu`, `gpu` or None for the machine's best), `device_ids` its
    `deviceIds`, `devices` how many the server uses. As in TorchServe, one id that is not there makes the whole list
    count as not given.
    """
    if device_type == "cpu" or devices == 0:
        return ()
    if device_ids and all(0 <= device < devices for device in device_ids):
        return tuple(device_ids)
    return tuple(range(devices))


def show_only(devices: Sequence[int], vendor: Vendor | None, environment: Mapping[str, str]) -> dict[str, str]:
    """The variable that shows a process these devices and no others; nothing where there is none for the vendor.

    `devices` are indices among those that are visible already; what a list in `environment` calls them is kept.
    """
    name = VISIBLE_DEVICES.get(vendor) if vendor else None
    if name is None or not devices:
        return {}
    names = [part.strip() for part in environment.get(name, "").split(",") if part.strip()]
    return {name: ",".join(names[device] if device < len(names) else str(device) for device in devices)}


def most_groups(device_ids: Sequence[int], level: int) -> int:
    """How many workers of `level` devices each there can be."""
    return len(device_ids) // level


def choose_group(
    device_ids: Sequence[int], level: int, living: Sequence[Sequence[int]], leaving: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    """The `level` devices of the next worker, consecutive in `device_ids`, out of groups that do not overlap.

    The first that the fewest of the `living` workers have, and of those the one that the fewest `leaving` ones have.
    None of `most_groups` is given twice while one is free.
    """
    groups = [tuple(device_ids[level * place : level * (place + 1)]) for place in range(len(device_ids) // level)]
    held, lately = Counter(map(tuple, living)), Counter(map(tuple, leaving))
    return min(groups, key=lambda group: (held[group], lately[group]))


class Assigner:
    """Hands devices out in turn: one turn for all models that take any device, one for each model with its own list.

    TorchServe begins at device 1; here the first worker gets device 0.
    """

    def __init__(self, devices: int) -> None:
        self._devices = devices
        self._next = 0
        self._next_of_model: dict[tuple[str, str], int] = {}

    def assign(self, model: str, version: str, gpu_ids: Sequence[int]) -> int | None:
        """The device of the next worker of this model version, out of `gpu_ids` (see `usable_ids`), or None."""
        if not gpu_ids:
            return None
        if tuple(gpu_ids) == tuple(range(self._devices)):
            device = self._next
            self._next = (device + 1) % self._devices
            return device
        turn = self._next_of_model.get((model, version), 0)
        self._next_of_model[model, version] = turn + 1
        return gpu_ids[turn % len(gpu_ids)]

    def forget(self, model: str, version: str) -> None:
        """The version was unregistered: if it comes back its turn begins anew."""
        self._next_of_model.pop((model, version), None)
