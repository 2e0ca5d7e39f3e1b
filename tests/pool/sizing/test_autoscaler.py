"""Tests for the number of workers over time: when there are more, when fewer, when none, and when not."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest

from marserve.pool.options import PoolOptions
from marserve.pool.sizing.autoscaler import MEMORY_LEAST_BYTES, Autoscaler, Decision, Observation

MIB = 1024 * 1024


@dataclass
class Watched:
    """An autoscaler that is asked four times a second, and what it decided."""

    scaler: Autoscaler
    now: float = 0.0
    decisions: list[tuple[float, Decision]] = field(default_factory=list)

    def watch(self, seconds: float, **seen: float) -> list[int]:
        """Let time pass while things stand so. Returns the new targets."""
        begun = len(self.decisions)
        end = self.now + seconds
        while self.now < end:
            self.now += 0.25
            decision = self.scaler.decide(self.now, look(self.scaler.target, **seen))
            if decision is not None:
                self.decisions.append((self.now, decision))
        return [decision.target for _, decision in self.decisions[begun:]]


def look(target: int, **seen: float) -> Observation:
    """An observation: all workers are there; what is not said is 0."""
    values = {"waiting": 0, "running": 0, "oldest_wait_s": 0.0, "ready": target, "busy": 0, "starting": 0, "failed": 0}
    return Observation(**{**values, **seen})  # type: ignore[arg-type]


def autoscaler(least: int, most: int, **options: Any) -> Autoscaler:
    """An autoscaler of a version with these numbers of workers."""
    return Autoscaler(PoolOptions("m", "1.0", least, most, **options))


OVERLOAD = {"waiting": 20, "running": 4, "oldest_wait_s": 1.0, "busy": 1}


def test_a_version_starts_with_its_least_number() -> None:
    """And says so."""
    scaler = autoscaler(2, 8)

    assert (scaler.target, scaler.reason) == (2, "the least number")


def test_waiting_requests_bring_more_workers_up_to_the_most() -> None:
    """By half as many again, with a pause after each step, and never more than allowed."""
    watched = Watched(autoscaler(1, 6))

    assert watched.watch(30, **OVERLOAD) == [2, 3, 4, 6]
    assert "requests wait 1 s, more than 0.1 s" in watched.decisions[0][1].reason
    assert "the most that is allowed" in watched.scaler.reason


def test_a_short_wait_changes_nothing() -> None:
    """A burst that is over before half a second has passed is no reason."""
    watched = Watched(autoscaler(1, 6))

    for _ in range(20):
        assert watched.watch(0.5, **OVERLOAD) == []
        assert watched.watch(0.5) == []


def test_a_wait_is_measured_by_the_batches_before_it() -> None:
    """Where a batch takes two seconds, to wait two is ordinary."""
    watched = Watched(autoscaler(1, 6))

    assert watched.watch(10, waiting=3, busy=1, oldest_wait_s=2.0, batch_s=2.0) == []
    assert watched.watch(1, waiting=3, busy=1, oldest_wait_s=3.5, batch_s=2.0) == [2]


def test_nobody_is_called_while_somebody_is_on_the_way() -> None:
    """Loading takes its time; more would come too late and stay too long."""
    watched = Watched(autoscaler(1, 6))

    assert watched.watch(20, **OVERLOAD, starting=1) == []
    assert watched.watch(1, **OVERLOAD) == [2]


def test_workers_that_cannot_load_are_no_reason_for_more() -> None:
    """And describe says why there are no more."""
    watched = Watched(autoscaler(1, 6))

    assert watched.watch(20, **OVERLOAD, failed=1) == []
    assert "cannot load" in watched.scaler.reason


@pytest.mark.parametrize(
    ("available", "targets"),
    [(300 * MIB, []), (1000 * MIB, [3]), (4000 * MIB, [3, 4]), (MEMORY_LEAST_BYTES, [])],
)
def test_memory_that_is_not_there_is_not_used(available: int, targets: list[int]) -> None:
    """A part of what is available stays free, whatever waits; the machine shrinks with each worker."""
    watched = Watched(autoscaler(2, 4))

    begun = watched.scaler.target
    seen = []
    for _ in range(12):
        left = available - (watched.scaler.target - begun) * 500 * MIB
        seen += watched.watch(1, **OVERLOAD, bytes_available=left, bytes_per_worker=500 * MIB)

    assert seen == targets
    if not targets:
        assert "500 MiB" in watched.scaler.reason


def test_idle_workers_go_one_by_one_down_to_the_least() -> None:
    """Slowly: each after half a minute without need."""
    watched = Watched(autoscaler(1, 6))
    watched.watch(30, **OVERLOAD)

    assert watched.watch(29) == []
    assert watched.watch(200) == [5, 4, 3, 2, 1]
    assert watched.watch(200) == []


def test_busy_workers_stay() -> None:
    """Four that are busy two thirds of their time would be too few as three."""
    watched = Watched(autoscaler(1, 4))
    watched.watch(30, **OVERLOAD)

    assert watched.scaler.target == 4
    assert watched.watch(300, busy=2.6, running=3) == []
    assert watched.watch(300, busy=1.0, running=1) == [3, 2]


def test_a_step_down_that_had_to_be_taken_back_makes_the_next_one_slower() -> None:
    """What swings does so ever more slowly."""
    watched = Watched(autoscaler(1, 2))
    watched.watch(2, **OVERLOAD)
    waits = []

    for _ in range(4):
        begun = watched.now
        assert watched.watch(2000) == [1]
        waits.append(round(watched.decisions[-1][0] - begun))
        watched.now = watched.decisions[-1][0]
        assert watched.watch(3, **OVERLOAD) == [2]

    assert waits[0] <= 31
    assert waits == sorted(waits)
    assert waits[-1] >= 4 * waits[0] - 8


def test_a_version_without_requests_falls_asleep_and_a_request_wakes_it() -> None:
    """Where that is allowed: nothing at the start, one worker at the first request, nothing again when it is idle."""
    watched = Watched(autoscaler(0, 3, idle_timeout_s=60.0))

    assert watched.scaler.target == 0
    assert watched.watch(10) == []
    woken = watched.scaler.wake(watched.now)
    assert woken is not None
    assert (woken.target, woken.reason) == (1, "woken by a request")
    assert watched.scaler.wake(watched.now) is None
    assert watched.watch(20, running=1, busy=1) == []
    assert watched.watch(59) == []
    assert watched.watch(2) == [0]
    assert watched.scaler.reason == "asleep: no request for 60 s"


def test_the_template_outlives_the_workers_by_the_same_time() -> None:
    """Who asks again soon waits for a fork only."""
    watched = Watched(autoscaler(0, 3, idle_timeout_s=60.0))
    watched.scaler.wake(0.0)
    watched.watch(61)

    assert watched.scaler.target == 0
    assert not watched.scaler.may_drop_template(119.0)
    assert watched.scaler.may_drop_template(121.0)


def test_an_awake_version_keeps_one_worker() -> None:
    """However idle it is, until the time-out."""
    watched = Watched(autoscaler(0, 3, idle_timeout_s=1000.0))
    watched.scaler.wake(0.0)
    assert watched.watch(10, **OVERLOAD) == [2, 3]

    assert watched.watch(500) == [2, 1]


def test_no_time_out_means_no_sleep() -> None:
    """A least number of 0 alone ends nothing by itself and wakes nothing."""
    scaler = autoscaler(0, 3)

    assert not scaler.may_sleep
    assert scaler.wake(1.0) is None


def test_the_first_request_brings_as_many_as_there_are_while_awake() -> None:
    """Never more than there may be; and fewer only while asleep."""
    scaler = autoscaler(0, 4, idle_timeout_s=60.0, least_awake=3)

    woken = scaler.wake(0.0)

    assert woken is not None
    assert (woken.target, scaler.least_awake) == (3, 3)
    assert autoscaler(0, 2, idle_timeout_s=60.0, least_awake=3).least_awake == 2
    assert autoscaler(2, 4, least_awake=3).least_awake == 2


def test_who_may_sleep_is_put_to_sleep_with_a_reason() -> None:
    """Once; who may not is left alone."""
    scaler = autoscaler(0, 2, idle_timeout_s=math.inf)
    scaler.wake(0.0)

    asleep = scaler.sleep(1.0, "somebody else needs the memory")

    assert asleep is not None
    assert (asleep.target, scaler.reason) == (0, "somebody else needs the memory")
    assert scaler.sleep(2.0, "again") is None
    assert autoscaler(1, 2).sleep(1.0, "never") is None


def test_without_an_idle_time_out_nobody_falls_asleep_by_themselves() -> None:
    """However long nobody asks."""
    scaler = autoscaler(0, 2, idle_timeout_s=math.inf)
    scaler.wake(0.0)
    at_rest = Observation(0, 0, 0.0, ready=1, busy=0, starting=0, failed=0)

    assert scaler.decide(1e9, at_rest) is None
    assert not scaler.may_drop_template(1e9)
