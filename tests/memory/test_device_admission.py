"""Whether a worker fits on a device: free memory, less what was promised and is not taken yet."""

from __future__ import annotations

import random

import pytest

from marserve.memory.device_admission import CONTEXT_BYTES, DeviceBooks, DeviceNeed, device_need

GIB = 1 << 30


@pytest.mark.parametrize(
    ("declared", "learned", "wanted"),
    [
        (9 * GIB, 7 * GIB, DeviceNeed(9 * GIB, "declared")),
        (None, 7 * GIB, DeviceNeed(7 * GIB, "learned")),
        (None, None, DeviceNeed(2 * GIB + CONTEXT_BYTES, "estimated")),
    ],
)
def test_what_is_said_goes_before_what_was_seen_and_that_before_a_guess(
    declared: int | None, learned: int | None, wanted: DeviceNeed
) -> None:
    """Weights are shared among the devices of a worker; the context is paid on each."""
    need = device_need(declared_bytes=declared, learned_bytes=learned, weight_bytes=4 * GIB, devices_per_worker=2)

    assert need == wanted


def test_two_loads_at_once_never_count_on_the_same_bytes() -> None:
    """The second sees what is left of the promise to the first."""
    books = DeviceBooks()
    assert books.could_be_had(0, 80 * GIB, 1.0) == 80 * GIB

    books.promise("a 1.0", 0, 50 * GIB, 80 * GIB, 1.0)

    assert books.could_be_had(0, 80 * GIB, 1.0) == 30 * GIB
    assert books.could_be_had(1, 80 * GIB, 1.0) == 80 * GIB


def test_what_a_load_has_taken_already_is_not_counted_twice() -> None:
    """It took 40 of its 50: 30 of the 40 that are free can still be had."""
    books = DeviceBooks()
    books.promise("a 1.0", 0, 50 * GIB, 80 * GIB, 1.0)

    assert books.could_be_had(0, 40 * GIB, 2.0) == 30 * GIB


def test_what_others_free_meanwhile_can_be_had() -> None:
    """A model that leaves while another one is loaded makes room at once."""
    books = DeviceBooks()
    books.promise("a 1.0", 0, 10 * GIB, 12 * GIB, 1.0)

    assert books.could_be_had(0, 42 * GIB, 2.0) == 32 * GIB


def test_what_others_take_meanwhile_cannot_be_had() -> None:
    """Never more than what is free now."""
    books = DeviceBooks()
    books.promise("a 1.0", 0, 10 * GIB, 80 * GIB, 1.0)

    assert books.could_be_had(0, 5 * GIB, 2.0) == 5 * GIB
    assert books.could_be_had(0, 0, 3.0) == 0


def test_a_promise_holds_until_a_reading_after_the_load_has_seen_it() -> None:
    """A tool's reading may be older than the load."""
    books = DeviceBooks()
    promise = books.promise("a 1.0", 0, 50 * GIB, 80 * GIB, 1.0)
    books.loaded(promise, 5.0)

    assert books.could_be_had(0, 80 * GIB, 4.0) == 30 * GIB
    assert books.could_be_had(0, 31 * GIB, 6.0) == 31 * GIB
    assert books.holders(0) == [("a 1.0", 50 * GIB)]


def test_a_worker_that_ends_gives_its_promise_back() -> None:
    """Whether it loaded, failed or never began."""
    books = DeviceBooks()
    loading = books.promise("a 1.0", 0, 50 * GIB, 80 * GIB, 1.0)
    books.promise("b 1.0", 0, 10 * GIB, 80 * GIB, 1.0)

    books.end(loading)
    books.end(loading)

    assert books.could_be_had(0, 80 * GIB, 2.0) == 70 * GIB
    assert books.holders(0) == [("b 1.0", 10 * GIB)]


def test_who_waits_counts_on_what_those_before_leave() -> None:
    """More is promised than there is: each of them has what is free less the promises that came before its own."""
    books = DeviceBooks()
    first = books.promise("a 1.0", 0, 50 * GIB, 30 * GIB, 1.0)
    second = books.promise("b 1.0", 0, 20 * GIB, 30 * GIB, 1.0)

    assert books.margin(0, 60 * GIB, 2.0) == -10 * GIB
    assert books.could_be_had(0, 60 * GIB, 2.0) == 0
    assert books.margin(0, 60 * GIB, 2.0, before=first) == 60 * GIB
    assert books.margin(0, 60 * GIB, 2.0, before=second) == 10 * GIB


@pytest.mark.parametrize("seed", range(30))
def test_a_device_is_never_promised_twice(seed: int) -> None:
    """Workers that take no more than they were promised never ask for more than there is, in any order of events."""
    dice = random.Random(seed)
    total, books, now = 80, DeviceBooks(), 0.0
    taken: dict[object, int] = {}
    living: list[tuple[object, int]] = []
    for _ in range(300):
        now += 1.0
        free = total - sum(taken.values())
        assert free >= 0
        kind = dice.choice("bbtte")
        if kind == "b":
            size = dice.randint(1, 40)
            if size <= books.could_be_had(0, free, now):
                promise = books.promise("m", 0, size, free, now)
                living.append((promise, size))
                taken[promise] = 0
        elif living and kind == "t":  # it goes on loading, and may be done
            promise, size = dice.choice(living)
            taken[promise] = min(size, taken[promise] + dice.randint(0, size))
            if taken[promise] == size and promise.loaded_at is None:  # type: ignore[attr-defined]
                books.loaded(promise, now)  # type: ignore[arg-type]
        elif living:
            promise, size = living.pop(dice.randrange(len(living)))
            del taken[promise]
            books.end(promise)  # type: ignore[arg-type]
    assert len(living) < 300
