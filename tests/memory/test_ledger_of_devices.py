"""Whether a worker fits on a device: free memory, less what was promised and is not taken yet."""

from __future__ import annotations

import random

import pytest

from marserve.machine.accelerators import DeviceReading
from marserve.memory.ledger import DeviceReservation, Ledger

GIB = 1 << 30
TOTAL = 100 * GIB


class Books(Ledger):
    """A ledger whose devices are read when the test says so."""

    def __init__(self) -> None:
        self.free: dict[int, int] = {}
        self.read_at = 0.0
        super().__init__(readings=self)

    def of(self, device: int) -> DeviceReading:
        """What was read of one."""
        return DeviceReading(str(device), TOTAL - self.free[device], TOTAL)

    def read(self, device: int, free: int, at: float) -> None:
        """So much is free now."""
        self.free[device], self.read_at = free, at

    def can_have(self, device: int, free: int, at: float) -> int | None:
        """What one more worker could be promised when so much is free."""
        self.read(device, free, at)
        return self.could_be_had(device)

    def promise(self, label: str, device: int, size: int, free: int, at: float) -> DeviceReservation:
        """A worker's reservation, made when so much was free."""
        self.read(device, free, at)
        return self.reserve(label, (device,), size)


def test_two_loads_at_once_never_count_on_the_same_bytes() -> None:
    """The second sees what is left of the promise to the first."""
    books = Books()
    assert books.can_have(0, 80 * GIB, 1.0) == 80 * GIB

    books.promise("a 1.0", 0, 50 * GIB, 80 * GIB, 1.0)

    assert books.can_have(0, 80 * GIB, 1.0) == 30 * GIB
    assert books.can_have(1, 80 * GIB, 1.0) == 80 * GIB


def test_what_a_load_has_taken_already_is_not_counted_twice() -> None:
    """It took 40 of its 50: 30 of the 40 that are free can still be had."""
    books = Books()
    books.promise("a 1.0", 0, 50 * GIB, 80 * GIB, 1.0)

    assert books.can_have(0, 40 * GIB, 2.0) == 30 * GIB


def test_what_others_free_meanwhile_can_be_had() -> None:
    """A model that leaves while another one is loaded makes room at once."""
    books = Books()
    books.promise("a 1.0", 0, 10 * GIB, 12 * GIB, 1.0)

    assert books.can_have(0, 42 * GIB, 2.0) == 32 * GIB


def test_what_others_take_meanwhile_cannot_be_had() -> None:
    """Never more than what is free now."""
    books = Books()
    books.promise("a 1.0", 0, 10 * GIB, 80 * GIB, 1.0)

    assert books.can_have(0, 5 * GIB, 2.0) == 5 * GIB
    assert books.can_have(0, 0, 3.0) == 0


def test_a_promise_holds_until_a_reading_after_the_load_has_seen_it() -> None:
    """A tool's reading may be older than the load."""
    books = Books()
    promise = books.promise("a 1.0", 0, 50 * GIB, 80 * GIB, 1.0)
    promise.loaded_at = 5.0

    assert books.can_have(0, 80 * GIB, 4.0) == 30 * GIB
    assert books.can_have(0, 31 * GIB, 6.0) == 31 * GIB
    assert books.holders(0) == [("a 1.0", 50 * GIB)]


def test_a_worker_that_ends_gives_its_promise_back() -> None:
    """Whether it loaded, failed or never began."""
    books = Books()
    loading = books.promise("a 1.0", 0, 50 * GIB, 80 * GIB, 1.0)
    books.promise("b 1.0", 0, 10 * GIB, 80 * GIB, 1.0)

    books.release(loading, 1.5)
    books.release(loading, 1.5)

    assert books.can_have(0, 80 * GIB, 2.0) == 70 * GIB
    assert books.holders(0) == [("b 1.0", 10 * GIB)]


def test_who_waits_counts_on_what_those_before_leave() -> None:
    """More is promised than there is: each of them has what is free less the promises that came before its own."""
    books = Books()
    first = books.promise("a 1.0", 0, 50 * GIB, 30 * GIB, 1.0)
    second = books.promise("b 1.0", 0, 20 * GIB, 30 * GIB, 1.0)

    assert books.can_have(0, 60 * GIB, 2.0) == 0
    assert books.margin(0) == -10 * GIB
    assert books.margin(0, before=first) == 60 * GIB
    assert books.margin(0, before=second) == 10 * GIB


@pytest.mark.parametrize("seed", range(30))
def test_a_device_is_never_promised_twice(seed: int) -> None:
    """Workers that take no more than they were promised never ask for more than there is, in any order of events."""
    dice = random.Random(seed)
    total, books, now = 80, Books(), 0.0
    taken: dict[DeviceReservation, int] = {}
    living: list[tuple[DeviceReservation, int]] = []
    for _ in range(300):
        now += 1.0
        free = total - sum(taken.values())
        assert free >= 0
        kind = dice.choice("bbtte")
        if kind == "b":
            size = dice.randint(1, 40)
            if size <= (books.can_have(0, free, now) or 0):
                promise = books.promise("m", 0, size, free, now)
                living.append((promise, size))
                taken[promise] = 0
        elif living and kind == "t":  # it goes on loading, and may be done
            promise, size = dice.choice(living)
            taken[promise] = min(size, taken[promise] + dice.randint(0, size))
            if taken[promise] == size and promise.loaded_at is None:
                promise.loaded_at = now
        elif living:
            promise, size = living.pop(dice.randrange(len(living)))
            del taken[promise]
            books.release(promise, now)
    assert len(living) < 300
