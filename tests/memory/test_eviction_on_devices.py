"""Tests for where a worker goes when no device has room, and for who leaves. Sizes in GiB, times in seconds."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from marserve.memory.eviction import Devices, Place, Resident, choose_place, choose_victims


def model(name: str, demand: float = 1.0, *, load_s: float = 1.0, **facts: Any) -> Resident[str]:
    """`on0=30` is what it holds on device 0."""
    sizes = {int(key.removeprefix("on")): facts.pop(key) for key in list(facts) if key.startswith("on")}
    return Resident(name, sizes, load_s, demand, **facts)


def victims_on(
    devices: Devices, needed: int, free: Mapping[int, int], residents: Sequence[Resident[str]], now: float
) -> tuple[str, ...] | None:
    """Which leave so that a worker has so much on each of these devices."""
    return choose_victims(residents, {device: needed - free[device] for device in devices}, now)


def place_of(
    candidates: Sequence[Devices], needed: int, free: Mapping[int, int], residents: Sequence[Resident[str]], now: float
) -> Place[str] | None:
    """Where a worker goes while no model waits."""
    return choose_place(candidates, needed, free, residents, now, {})


def test_the_device_is_taken_where_those_leave_that_are_worth_least() -> None:
    """Demand times the seconds of loading, whichever device is emptier."""
    residents = [model("a", 5.0, on0=60), model("b", 1.0, on1=70), model("c", 2.0, on2=60)]

    assert place_of([(0,), (1,), (2,)], 50, {0: 20, 1: 10, 2: 20}, residents, 0.0) == Place((1,), ("b",))


def test_room_on_another_device_helps_nobody() -> None:
    """30 are free on each of two, and 60 are needed on one."""
    assert place_of([(0,), (1,)], 60, {0: 30, 1: 30}, [], 0.0) is None
    assert place_of([(0,), (1,)], 60, {0: 30, 1: 30}, [model("a", on1=30)], 0.0) == Place((1,), ("a",))


def test_a_worker_of_several_devices_has_others_leave_on_each() -> None:
    """One that holds both goes once; and with it gone nobody else has to."""
    wide, narrow = model("wide", 3.0, on0=40, on1=40), model("narrow", 2.0, on0=40)

    assert victims_on((0, 1), 50, {0: 20, 1: 10}, [narrow, wide], 0.0) == ("wide",)
    assert victims_on((0, 1), 50, {0: 0, 1: 10}, [narrow, wide], 0.0) == ("narrow", "wide")
    assert victims_on((0, 1), 50, {0: 0, 1: 10}, [wide], 0.0) is None
    assert place_of([(0, 1), (2, 3)], 50, {0: 20, 1: 10, 2: 60, 3: 55}, [wide], 0.0) == Place((2, 3), ())


def test_nobody_leaves_that_is_in_use_or_came_a_moment_ago() -> None:
    """The worker gets its place on the device that can have most, and waits."""
    residents = [model("a", on0=40, is_in_use=True), model("b", on1=60, stays_until=10.0)]

    assert place_of([(0,), (1,)], 50, {0: 20, 1: 20}, residents, 5.0) == Place((1,), None)
    assert place_of([(0,), (1,)], 50, {0: 20, 1: 20}, residents, 10.0) == Place((1,), ("b",))


def test_what_others_wait_for_is_not_counted_twice() -> None:
    """40 are missing for those before: one more that needs 50 has two leave, not one."""
    residents = [model("a", 1.0, on0=45), model("b", 2.0, on0=45)]

    assert victims_on((0,), 50, {0: -40}, residents, 0.0) == ("a", "b")


def test_what_is_promised_to_models_that_may_leave_again_can_be_had_later() -> None:
    """One that waits for a place itself is no reason to refuse another: it comes, and goes."""
    assert place_of([(0,)], 50, {0: -10}, [model("a", on0=45)], 0.0) is None
    assert choose_place([(0,)], 50, {0: -10}, [model("a", on0=45)], 0.0, {0: 20}) == Place((0,), None)


def test_a_device_of_which_nothing_is_known_has_room() -> None:
    """As everywhere: nobody leaves for a guess."""
    assert place_of([(0,), (1,)], 50, {0: 10}, [model("a", on0=45)], 0.0) == Place((1,), ())


@pytest.mark.parametrize("seed", range(50))
def test_whoever_leaves_makes_room_and_nobody_leaves_in_vain(seed: int) -> None:
    """On every device of the place there is enough then; without any one of them there would not be."""
    draw = random.Random(seed)
    devices = range(4)
    residents = [
        model(
            str(number),
            draw.random(),
            load_s=draw.random(),
            is_in_use=draw.random() < 0.2,
            **{f"on{device}": draw.randint(1, 40) for device in draw.sample(devices, draw.randint(1, 2))},
        )
        for number in range(6)
    ]
    free = {device: draw.randint(-20, 60) for device in devices}
    candidates = [(0, 1), (2, 3)] if seed % 2 else [(0,), (1,), (2,), (3,)]

    place = place_of(candidates, 50, free, residents, 0.0)

    by_name = {resident.name: resident for resident in residents}
    if place is None:
        for candidate in candidates:
            assert any(free[on] + sum(each.sizes.get(on, 0) for each in residents) < 50 for on in candidate)
        return
    assert place.devices in candidates
    if place.names is not None:
        assert not any(by_name[name].is_in_use for name in place.names)
        had = {on: free[on] + sum(by_name[name].sizes.get(on, 0) for name in place.names) for on in place.devices}
        assert min(had.values()) >= 50
        for name in place.names:
            assert any(had[on] - by_name[name].sizes.get(on, 0) < 50 for on in place.devices)
