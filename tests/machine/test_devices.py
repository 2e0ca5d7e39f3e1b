"""Which worker gets which device, and which devices there are to get."""

from __future__ import annotations

import pytest

from marserve.errors import BadSettings
from marserve.machine.devices import Assigner, cap, count_visible, usable_ids


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
