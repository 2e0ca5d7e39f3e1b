"""Decides which worker gets which device. Pure: counts and lists in, device numbers out.

A `gpu_id` is an index among the *visible* devices, as handlers expect it (`torch.device(f"cuda:{gpu_id}")`), beginning
at 0; None means no device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from marserve.machine.accelerators import Accelerator, Vendor
from marserve.machine.visible import VISIBLE_DEVICES, XPU

__all__ = ["Assigner", "Vendor", "View", "cap", "choose_group", "most_groups", "view_of"]


class View(NamedTuple):
    """A worker's view of its devices: additions to its environment, and its handler's `gpu_id`."""

    environment: Mapping[str, str]
    gpu_id: int | None


def cap(visible: int, number_of_gpu: int | None) -> int:
    """How many devices the server uses: all that are visible, or as many as `number_of_gpu` allows."""
    return visible if number_of_gpu is None else max(0, min(visible, number_of_gpu))


def view_of(
    gpu_id: int | None,
    group: Sequence[int],
    visible: Sequence[Accelerator],
    vendor: Vendor | None,
    *,
    is_one_lost: bool = False,
) -> View:
    """How a worker sees its device, or the `group` of them that it has. Numbers are indices into `visible`.

    A worker of several devices sees these and no others, numbered from 0; its `gpu_id` is the first of them, in a group
    each rank's its own (`RankGroup.load`). TorchServe gives the server's number, which fits none of them. Any other
    worker sees all devices and gets the number of its own. If a GPU is cut into MIG instances, each worker sees only
    its own, under the number 0, since CUDA gives a process one instance at most. Devices that are named by UUID are
    shown in full: a part of a UUID, which the operator may have written, is not known everywhere.
    Intel's that XPU_VISIBLE_DEVICES chose are shown by the variable that torch goes by.

    While `is_one_lost` of the machine's devices, CUDA of a new process may not count it, and ends a list at its UUID.
    Each worker then sees only its own, by UUID, under the number 0.
    """
    name = VISIBLE_DEVICES.get(vendor) if vendor else None
    if name is None:
        return View({}, gpu_id)
    if is_one_lost and vendor == "nvidia":
        visible = [device._replace(handle=device.uuid or device.handle) for device in visible]
        if not group and gpu_id is not None and gpu_id < len(visible) and visible[gpu_id].uuid:
            return View({name: visible[gpu_id].uuid}, 0)
    if group:
        shown = ",".join(_handle(device, visible) for device in group)
        return View(_shown(name, shown), None if gpu_id is None else 0)
    if gpu_id is not None and any(device.is_instance for device in visible):
        return View({name: _handle(gpu_id, visible)}, 0)
    if gpu_id is not None and any(device.uuid and device.handle == device.uuid for device in visible):
        return View({name: ",".join(device.handle for device in visible)}, gpu_id)
    if gpu_id is not None and vendor == "intel" and _is_chosen(visible):
        return View(_shown(name, ",".join(device.handle for device in visible)), gpu_id)
    return View({}, gpu_id)


def _shown(name: str, handles: str) -> dict[str, str]:
    """The vendor's variable; and, for handlers that read it, the one that TorchServe knows for Intel's."""
    return {name: handles} | ({XPU: handles} if name == VISIBLE_DEVICES["intel"] else {})


def _is_chosen(visible: Sequence[Accelerator]) -> bool:
    """Whether numbers among these differ from the machine's: torch does not know XPU_VISIBLE_DEVICES."""
    return any(device.handle != str(place) for place, device in enumerate(visible))


def _handle(device: int, visible: Sequence[Accelerator]) -> str:
    return visible[device].handle if device < len(visible) else str(device)


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

    def assign(
        self,
        model: str,
        version: str,
        gpu_ids: Sequence[int],
        has_room: Callable[[int], bool] = lambda device: True,
        is_sound: Callable[[int], bool] = lambda device: True,
    ) -> int | None:
        """The device of the next worker of this model version, out of `gpu_ids`, or None.

        Devices that have no room lose their turn; if none has room, the next in turn is given anyway. A device that
        is not sound is given only if none is.
        """
        if not gpu_ids:
            return None
        is_common = tuple(gpu_ids) == tuple(range(self._devices))
        turn = self._next if is_common else self._next_of_model.get((model, version), 0)
        places = [(turn + step) % len(gpu_ids) for step in range(len(gpu_ids))]
        places = [place for place in places if is_sound(gpu_ids[place])] or places
        place = next((place for place in places if has_room(gpu_ids[place])), places[0])
        if is_common:
            self._next = (place + 1) % len(gpu_ids)
        else:
            self._next_of_model[model, version] = (place + 1) % len(gpu_ids)
        return gpu_ids[place]

    def forget(self, model: str, version: str) -> None:
        """Forget an unregistered version's turn: if it comes back its turn begins anew."""
        self._next_of_model.pop((model, version), None)
