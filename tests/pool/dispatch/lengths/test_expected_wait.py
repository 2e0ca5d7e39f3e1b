"""Tests for the guess of how long a request would wait: what is known, what is left, whose turn comes when."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.pool.dispatch.jobs import Flight, WorkerLane
from marserve.pool.dispatch.lengths.expected_wait import FEWEST_RUNS, FreeOrder, RunTimes


def lane(*sent_at: float, is_open: bool = True) -> WorkerLane:
    """A worker with flights that were sent then."""
    made = WorkerLane("w", is_open=is_open)
    made.flights.extend(Flight(number, [], False, when) for number, when in enumerate(sent_at, 1))
    return made


def wait_s(before: int, lanes: Sequence[WorkerLane], run_s: float, now: float) -> float | None:
    """The guess for a request with so many batches before it."""
    order = FreeOrder()
    for lane in lanes:
        order.note(lane)
    return order.wait_s(before, run_s, now)


def plain_wait_s(before: int, lanes: Sequence[WorkerLane], run_s: float, now: float) -> float | None:
    """The same by a look at every worker: when each comes free, and whose turn it then is."""
    free = sorted(
        max(0.0, run_s - (now - lane.flights[0].sent_at)) + run_s * (len(lane.flights) - 1)
        for lane in lanes
        if lane.is_open and lane.flights
    )
    if not free:
        return None
    rounds, turn = divmod(before, len(free))
    return free[turn] + (rounds + 1) * run_s


def test_nothing_is_known_before_some_batches_have_run() -> None:
    """A guess from one batch is none."""
    times = RunTimes()

    seen = []
    for _ in range(FEWEST_RUNS):
        seen.append(times.typical_s)
        times.add(0.2)

    assert seen == [None] * FEWEST_RUNS
    assert times.typical_s == 0.2


def test_one_slow_batch_does_not_move_the_guess_and_a_lasting_change_does() -> None:
    """The median of the last ones."""
    times = RunTimes()
    for _ in range(20):
        times.add(0.1)

    times.add(30.0)
    after_one = times.typical_s
    for _ in range(40):
        times.add(0.4)

    assert after_one == 0.1
    assert times.typical_s == 0.4


def test_batches_that_reached_no_handler_say_nothing() -> None:
    """Whole batches that had expired are answered in no time."""
    times = RunTimes()

    for _ in range(10):
        times.add(0.0)

    assert times.typical_s is None


@pytest.mark.parametrize(
    ("before", "expected_s"),
    [(0, 1.4), (1, 1.9), (2, 2.4), (3, 2.9), (10, 6.4)],
)
def test_batches_are_dealt_to_workers_in_the_order_in_which_they_come_free(before: int, expected_s: float) -> None:
    """Two workers of one second a batch, sent 0.6 and 0.1 s ago: free in 0.4 and 0.9 s, then every second.

    The run itself is part of the wait.
    """
    lanes = [lane(9.9), lane(9.4)]

    assert wait_s(before, lanes, 1.0, 10.0) == pytest.approx(expected_s)


def test_an_overdue_batch_may_end_at_once_and_one_sent_ahead_counts_whole() -> None:
    """The guess errs on the short side."""
    assert wait_s(0, [lane(0.0)], 1.0, 10.0) == 1.0
    assert wait_s(0, [lane(0.0, 9.9)], 1.0, 10.0) == 2.0


def test_without_an_open_worker_there_is_no_guess() -> None:
    """One that is being retired takes nothing more."""
    assert wait_s(0, [], 1.0, 10.0) is None
    assert wait_s(0, [lane(9.0, is_open=False)], 1.0, 10.0) is None


STEPS = st.lists(
    st.tuples(st.sampled_from(["open", "send", "send", "end", "close", "die"]), st.integers(0, 5), st.floats(0.0, 0.4)),
    max_size=60,
)


@given(STEPS, st.floats(0.001, 3.0), st.integers(0, 30))
def test_the_order_that_is_kept_gives_what_a_look_at_every_worker_gives(
    steps: list[tuple[str, int, float]], run_s: float, before: int
) -> None:
    """Batches leave and end, workers come, close and die in any order, at any distance; asked after each step."""
    order, lanes, now = FreeOrder(), list[WorkerLane](), 0.0
    for what, number, passed_s in steps:
        now += passed_s
        if what == "open" or not lanes:
            lanes.append(WorkerLane("w"))
            continue
        one = lanes[number % len(lanes)]
        if what == "die":
            lanes.remove(one)
            order.forget(one)
        elif what == "close":
            one.is_open = False
        elif what == "send":
            one.flights.append(Flight(1, [], False, now))
        elif one.flights:
            one.flights.popleft()
        if what != "die":
            order.note(one)

        plain = plain_wait_s(before, lanes, run_s, now)
        assert order.wait_s(before, run_s, now) == (None if plain is None else pytest.approx(plain))
