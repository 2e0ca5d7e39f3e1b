"""Tests for the restart policy: TorchServe's delays, the end of trying, and the row of failures."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from marserve.pool.options import PoolOptions
from marserve.pool.slots.restart_policy import RETRY_DELAYS_S, Restart, RestartPolicy

TORCHSERVE_DELAYS_S = (1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597)


def policy(**options: Any) -> RestartPolicy:
    """A policy with the contract's limit and a probe that is easy to tell from a delay."""
    said = {"max_retry_timeout_s": 300.0, "retry_failed_every_s": 77.0, **options}
    return RestartPolicy(PoolOptions("m", "1.0", 1, 1, **said))


def test_the_delays_are_torchserves() -> None:
    """The contract's §10.4."""
    assert RETRY_DELAYS_S == TORCHSERVE_DELAYS_S


def test_a_first_failure_is_followed_at_once() -> None:
    """One death says nothing of the next worker."""
    assert policy().ended(now=100.0) == Restart(0.0)


def test_from_the_second_failure_in_a_row_the_delays_apply() -> None:
    """Whatever time passes between failures, while it is within the limit."""
    restarts = policy(max_retry_timeout_s=1e9)

    delays = [restarts.ended(now=0.0).delay_s for _ in range(20)]

    assert delays == [0.0, *TORCHSERVE_DELAYS_S, 1597.0, 1597.0]


def test_an_answer_ends_the_row() -> None:
    """A worker that has answered since its start is replaced at once, however often that happens."""
    restarts = policy()

    for now in range(50):
        assert restarts.ended(now=float(now)) == Restart(0.0)
        restarts.loaded()
        restarts.answered()


def test_loading_alone_does_not_end_the_row_of_delays() -> None:
    """A worker that dies of its first batch each time must not be started in a tight circle."""
    restarts = policy()
    delays = []

    for now in range(5):
        delays.append(restarts.ended(now=float(now)).delay_s)
        restarts.loaded()

    assert delays == [0.0, 1.0, 1.0, 2.0, 3.0]


def test_loading_stops_the_clock_of_the_row() -> None:
    """As in TorchServe: only time without a loaded worker counts against `maxRetryTimeoutInSec`."""
    restarts = policy(max_retry_timeout_s=10.0)
    restarts.ended(now=0.0)
    restarts.loaded()

    much_later = restarts.ended(now=1000.0)

    assert much_later == Restart(1.0)


def test_a_slot_is_given_up_when_the_next_try_would_be_past_the_limit() -> None:
    """Then it is tried again every `retryFailedEvery`."""
    restarts = policy(max_retry_timeout_s=10.0)
    now = 0.0
    delays = []

    for _ in itertools.repeat(None, 20):
        restart = restarts.ended(now)
        delays.append(restart.delay_s)
        now += restart.delay_s
        if restart.gave_up:
            break

    assert delays == [0.0, 1.0, 1.0, 2.0, 3.0, 77.0]
    assert restart.gave_up


def test_a_probe_that_fails_is_followed_by_another() -> None:
    """A slot that was given up is never forgotten."""
    restarts = policy(max_retry_timeout_s=1.0)
    for now in (0.0, 0.5, 1.0):
        restarts.ended(now)

    probes = [restarts.ended(now) for now in (100.0, 200.0, 300.0)]

    assert probes == [Restart(77.0, gave_up=True)] * 3


def test_a_slot_that_was_given_up_recovers_with_an_answer() -> None:
    """When the cause is gone the history is, too."""
    restarts = policy(max_retry_timeout_s=1.0)
    for now in (0.0, 0.5, 1.0):
        assert restarts.ended(now) is not None

    restarts.loaded()
    restarts.answered()

    assert restarts.ended(now=500.0) == Restart(0.0)


@pytest.mark.parametrize("limit_s", [0.0, -1.0])
def test_without_time_to_retry_the_first_failure_gives_up(limit_s: float) -> None:
    """`maxRetryTimeoutInSec=0` switches retrying off, but for the probe."""
    assert policy(max_retry_timeout_s=limit_s).ended(now=5.0) == Restart(77.0, gave_up=True)


def test_an_exit_code_that_is_not_restarted_ends_the_trying() -> None:
    """No delay ends, no probe comes: somebody must ask for the slot."""
    restarts = policy(no_restart_exit_codes=(0, 78))

    assert restarts.ended(now=0.0, exit_code=78) == Restart(math.inf, gave_up=True)
    assert restarts.ended(now=0.0, exit_code=0) == Restart(math.inf, gave_up=True)
    assert restarts.ended(now=0.0, exit_code=1) == Restart(0.0)
    assert restarts.ended(now=0.0, exit_code=None) == Restart(1.0)


def test_a_row_is_no_longer_than_the_bound_and_an_answer_begins_a_new_one() -> None:
    """`maxRestarts`; then the probe, as after the time limit."""
    restarts = policy(max_restarts=2)

    assert [restarts.ended(now=0.0) for _ in range(4)] == [
        Restart(0.0),
        Restart(1.0),
        Restart(77.0, gave_up=True),
        Restart(77.0, gave_up=True),
    ]
    restarts.answered()
    assert restarts.ended(now=500.0) == Restart(0.0)


def test_a_hundred_failures_never_come_faster_than_the_delays() -> None:
    """C8: whatever happens, the time spent starting is bounded by the pauses between."""
    restarts = policy(max_retry_timeout_s=300.0)
    now = 0.0
    starts = []

    for _ in range(100):
        starts.append(now)
        now += restarts.ended(now).delay_s

    gaps = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert gaps[:8] == [0.0, 1.0, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0]
    assert min(gaps[12:]) == 77.0
