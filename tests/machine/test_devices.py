"""Which worker gets which device, and which devices there are to get."""

from __future__ import annotations

import pytest

from marserve.errors import BadSettings
from marserve.machine.devices import (
    Assigner,
    Vendor,
    cap,
    choose_group,
    count_visible,
    most_groups,
    show_only,
    usable_ids,
)


@pytest.mark.parametrize(
    ("value", "visible"),
    [("0,1", 2), ("3", 1), ("0, 2", 2), ("", 0), ("-1", 0), ("0,9,1", 1), ("0,0,1", 1)],
)
def test_the_vendors_variable_says_which_devices_are_visible(value: str, visible: int) -> None:
    """The list ends at the first number that is no device, as CUDA reads it."""
    assert count_visible(4, "nvidia", {"CUDA_VISIBLE_DEVICES": value}) == visible


def test_only_the_own_vendors_variable_counts() -> None:
    """Each vendor has a variable; without it all devices are visible."""
    assert count_visible(4, "amd", {"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "0,1"}) == 2
    assert count_visible(4, "intel", {"XPU_VISIBLE_DEVICES": "2"}) == 1
    assert count_visible(4, "nvidia", {}) == 4
    assert count_visible(1, "apple", {"CUDA_VISIBLE_DEVICES": ""}) == 1
    assert count_visible(0, None, {"CUDA_VISIBLE_DEVICES": "x"}) == 0


@pytest.mark.parametrize("value", ["GPU-1f3a", "0;1", "a,b", "0,,1"])
def test_visible_devices_that_are_no_numbers_stop_the_server(value: str) -> None:
    """TorchServe's message, with the variable, its value and an example."""
    with pytest.raises(
        BadSettings, match=r"^Invalid format: The env defining visible devices must be integers"
    ) as error:
        count_visible(4, "nvidia", {"CUDA_VISIBLE_DEVICES": value})

    assert f"CUDA_VISIBLE_DEVICES is '{value}'" in str(error.value)


def test_number_of_gpu_is_an_upper_bound() -> None:
    """It can take devices away, not add them."""
    assert [cap(4, None), cap(4, 2), cap(4, 9), cap(4, 0)] == [4, 2, 4, 0]


@pytest.mark.parametrize(
    ("device_type", "device_ids", "devices", "ids"),
    [
        (None, (), 2, (0, 1)),
        ("gpu", (), 2, (0, 1)),
        ("gpu", (1,), 2, (1,)),
        ("gpu", (1, 7), 2, (0, 1)),  # one id that is not there: the list counts as not given
        ("gpu", (-1,), 2, (0, 1)),
        ("cpu", (1,), 2, ()),
        ("gpu", (), 0, ()),
        (None, (0,), 0, ()),
    ],
)
def test_a_models_devices(
    device_type: str | None, device_ids: tuple[int, ...], devices: int, ids: tuple[int, ...]
) -> None:
    """`deviceType` and `deviceIds` against what is there."""
    assert usable_ids(device_type, device_ids, devices) == ids


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


@pytest.mark.parametrize(
    ("devices", "vendor", "environment", "shown"),
    [
        ((0, 1), "nvidia", {}, {"CUDA_VISIBLE_DEVICES": "0,1"}),
        ((2,), "amd", {}, {"HIP_VISIBLE_DEVICES": "2"}),
        ((1, 2), "intel", {"XPU_VISIBLE_DEVICES": "4, 5,7"}, {"XPU_VISIBLE_DEVICES": "5,7"}),
        ((0, 1), "nvidia", {"CUDA_VISIBLE_DEVICES": "3,2"}, {"CUDA_VISIBLE_DEVICES": "3,2"}),
        ((0,), "apple", {}, {}),
        ((0,), None, {}, {}),
        ((), "nvidia", {}, {}),
    ],
)
def test_a_worker_is_shown_its_devices_under_the_names_they_have(
    devices: tuple[int, ...], vendor: Vendor | None, environment: dict[str, str], shown: dict[str, str]
) -> None:
    """A list that the server itself was given is looked up: indices are among what is visible."""
    assert show_only(devices, vendor, environment) == shown


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
