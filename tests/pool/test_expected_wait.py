"""Tests for the guess of how long a request would wait: what is known, what is left, whose turn comes when."""

from __future__ import annotations

import pytest

from marserve.pool.batcher import Flight, WorkerLane
from marserve.pool.expected_wait import FEWEST_RUNS, RunTimes, expected_wait_s


def lane(*sent_at: float, is_open: bool = True) -> WorkerLane:
    """A worker with flights that were sent then."""
    made = WorkerLane("w", is_open=is_open)
    made.flights.extend(Flight(number, [], False, when) for number, when in enumerate(sent_at, 1))
    return made


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
    ("before", "wait_s"),
    [(0, 1.4), (1, 1.9), (2, 2.4), (3, 2.9), (10, 6.4)],
)
def test_batches_are_dealt_to_workers_in_the_order_in_which_they_come_free(before: int, wait_s: float) -> None:
    """Two workers of one second a batch, sent 0.6 and 0.1 s ago: free in 0.4 and 0.9 s, then every second.

    The run itself is part of the wait.
    """
    lanes = [lane(9.9), lane(9.4)]

    wait = expected_wait_s(before, lanes, 1.0, 10.0)

    assert wait == pytest.approx(wait_s)


def test_an_overdue_batch_may_end_at_once_and_one_sent_ahead_counts_whole() -> None:
    """The guess errs on the short side."""
    assert expected_wait_s(0, [lane(0.0)], 1.0, 10.0) == 1.0
    assert expected_wait_s(0, [lane(0.0, 9.9)], 1.0, 10.0) == 2.0


def test_without_an_open_worker_there_is_no_guess() -> None:
    """One that is being retired takes nothing more."""
    assert expected_wait_s(0, [], 1.0, 10.0) is None
    assert expected_wait_s(0, [lane(9.0, is_open=False)], 1.0, 10.0) is None
