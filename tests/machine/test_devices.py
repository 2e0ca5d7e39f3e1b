"""Which worker gets which device, and what it is told of it."""

from __future__ import annotations

import pytest

from marserve.machine.accelerators import Accelerator, Vendor
from marserve.machine.devices import Assigner, View, cap, choose_group, most_groups, view_of


def test_number_of_gpu_is_an_upper_bound() -> None:
    """It can take devices away, not add them."""
    assert [cap(4, None), cap(4, 2), cap(4, 9), cap(4, 0)] == [4, 2, 4, 0]


def test_workers_of_all_models_take_turns_from_device_0() -> None:
    """One round over all models, so that two models of one worker each do not share a device."""
    assigner = Assigner(3)

    turns = [assigner.assign(model, "1", (0, 1, 2)) for model in ("a", "a", "b", "c", "a")]

    assert turns == [0, 1, 2, 0, 1]


def test_a_model_with_its_own_list_goes_round_that() -> None:
    """And does not use up the others' turns."""
    assigner = Assigner(4)

    turns = [
        assigner.assign("a", "1", (2, 3)),
        assigner.assign("b", "1", (0, 1, 2, 3)),
        assigner.assign("a", "1", (2, 3)),
    ]

    assert turns == [2, 0, 3]
    assert assigner.assign("a", "1", (2, 3)) == 2
    assert assigner.assign("a", "2", (2, 3)) == 2
    assigner.assign("a", "1", (2, 3))
    assigner.forget("a", "1")
    assert assigner.assign("a", "1", (2, 3)) == 2


def test_without_devices_there_is_no_gpu_id() -> None:
    """Handlers then see None."""
    assert Assigner(0).assign("a", "1", ()) is None


def test_a_device_without_room_loses_its_turn() -> None:
    """The next one with room gets the worker, and turns go on behind it; where none has any, whose turn it is."""
    assigner = Assigner(3)

    turns = [assigner.assign("a", "1", (0, 1, 2), lambda device: device != 1) for _ in range(4)]

    assert turns == [0, 2, 0, 2]
    assert assigner.assign("a", "1", (0, 1, 2), lambda device: False) == 0
    assert [assigner.assign("b", "1", (2, 1), lambda device: device == 1) for _ in range(2)] == [1, 1]


def gpus(count: int) -> tuple[Accelerator, ...]:
    """Whole devices, under their numbers."""
    return tuple(Accelerator("H100", str(number), str(number)) for number in range(count))


INSTANCES = tuple(Accelerator("H100 MIG 3g.40gb", f"0:{place}", f"MIG-{place}", f"MIG-{place}") for place in (0, 1))


@pytest.mark.parametrize(
    ("group", "vendor", "visible", "shown"),
    [
        ((0, 1), "nvidia", gpus(4), {"CUDA_VISIBLE_DEVICES": "0,1"}),
        ((2,), "amd", gpus(4), {"HIP_VISIBLE_DEVICES": "2"}),
        ((1, 2), "intel", gpus(4), {"ZE_AFFINITY_MASK": "1,2", "XPU_VISIBLE_DEVICES": "1,2"}),
        ((0, 1), "nvidia", gpus(4)[:1:-1], {"CUDA_VISIBLE_DEVICES": "3,2"}),
        ((0,), "apple", gpus(1), {}),
        ((0,), None, (), {}),
    ],
)
def test_a_worker_of_several_devices_sees_those_under_the_names_they_have(
    group: tuple[int, ...], vendor: Vendor | None, visible: tuple[Accelerator, ...], shown: dict[str, str]
) -> None:
    """A list that the server itself was given is looked up: numbers are indices into what is visible.

    They are numbered from 0 there, so `gpu_id` 0 is the first of them, in a second group as well.
    """
    assert view_of(group[0], group, visible, vendor) == View(shown, 0)


def test_an_ordinary_worker_sees_all_devices_and_is_told_its_own() -> None:
    """As with TorchServe: nothing is added to its environment."""
    assert view_of(3, (), gpus(4), "nvidia") == View({}, 3)
    assert view_of(None, (), gpus(4), "nvidia") == View({}, None)


def test_devices_named_by_uuid_are_shown_in_full() -> None:
    """To every worker alike, so that its number means the same device."""
    visible = [Accelerator("H100", "2", "GPU-22ff", "GPU-22ff"), Accelerator("H100", "0", "GPU-00ff", "GPU-00ff")]

    assert view_of(1, (), visible, "nvidia") == View({"CUDA_VISIBLE_DEVICES": "GPU-22ff,GPU-00ff"}, 1)
    assert view_of(None, (), visible, "nvidia") == View({}, None)


def test_intels_devices_that_torchserves_variable_chose_are_shown_as_torch_reads_it() -> None:
    """torch knows ZE_AFFINITY_MASK alone; without a choice nothing is added."""
    chosen = (Accelerator("Max", "2", "2"), Accelerator("Max", "3", "3"))

    shown = view_of(1, (), chosen, "intel")

    assert shown == View({"ZE_AFFINITY_MASK": "2,3", "XPU_VISIBLE_DEVICES": "2,3"}, 1)
    assert view_of(1, (), gpus(2), "intel") == View({}, 1)


def test_while_a_device_is_lost_each_worker_is_shown_its_own_by_uuid() -> None:
    """CUDA of a new process may count without the lost one, so numbers mean others, and ends a list at its UUID."""
    visible = [Accelerator("H100", str(number), str(number), f"GPU-{number}") for number in range(4)]
    named = [device._replace(handle=device.uuid) for device in visible]

    for devices in (visible, named):
        assert view_of(2, (), devices, "nvidia", is_one_lost=True) == View({"CUDA_VISIBLE_DEVICES": "GPU-2"}, 0)
        assert view_of(2, (2, 3), devices, "nvidia", is_one_lost=True).environment == {
            "CUDA_VISIBLE_DEVICES": "GPU-2,GPU-3"
        }
    assert view_of(None, (), visible, "nvidia", is_one_lost=True) == View({}, None)
    assert view_of(1, (), INSTANCES, "nvidia", is_one_lost=True) == View({"CUDA_VISIBLE_DEVICES": "MIG-1"}, 0)
    assert view_of(1, (), gpus(2), "nvidia", is_one_lost=True) == View({}, 1)


def test_a_worker_without_a_device_is_shown_nothing_special() -> None:
    """Whatever the machine has."""
    assert view_of(None, (), INSTANCES, "nvidia") == View({}, None)


def test_a_worker_on_a_mig_instance_sees_that_alone() -> None:
    """CUDA shows a process one instance at most: by its number the second worker would compute on the first one's."""
    assert view_of(1, (), INSTANCES, "nvidia") == View({"CUDA_VISIBLE_DEVICES": "MIG-1"}, 0)
    beside_a_whole_one = (*INSTANCES, Accelerator("H100", "1", "1", "GPU-1"))
    assert view_of(2, (), beside_a_whole_one, "nvidia") == View({"CUDA_VISIBLE_DEVICES": "1"}, 0)


def test_workers_of_several_devices_do_not_share_one_while_a_group_is_free() -> None:
    """Consecutive, from the first on; the place of one that left is taken again, but one that is leaving last."""
    devices = (0, 1, 2, 3, 4, 5, 6)
    assert most_groups(devices, 2) == 3

    given: list[tuple[int, ...]] = []
    for _ in range(3):
        given.append(choose_group(devices, 2, given, ()))

    assert given == [(0, 1), (2, 3), (4, 5)]
    assert choose_group(devices, 2, [(0, 1), (4, 5)], []) == (2, 3)
    assert choose_group(devices, 2, [(0, 1)], [(2, 3)]) == (4, 5)
    assert choose_group(devices, 2, [(4, 5)], [(0, 1), (2, 3)]) == (0, 1)
    assert choose_group((5, 3, 1), 3, [], []) == (5, 3, 1)
