"""How late the event loop is, and what a watchdog says of it. Times are numbers."""

from __future__ import annotations

import pytest

from marserve.telemetry.happenings import Happenings
from marserve.telemetry.loop_lag import (
    BEAT_S,
    KEPT,
    Clocks,
    Finding,
    Held,
    Interval,
    LoopLag,
    Paused,
    Released,
    StallJudge,
    Stuck,
)

EVERY_S = 0.25


class Watched:
    """A loop and its watchdog, played: `run` has both run for some time, as told."""

    def __init__(self, *, stuck_after_s: float = 0.0) -> None:
        self.now = 0.0
        self.clocks = Clocks()
        self.happenings = Happenings()
        self.lag = LoopLag(0.0, 1.0, self.happenings)
        self.judge = StallJudge(0.0, threshold_s=1.0, every_s=EVERY_S, stuck_after_s=stuck_after_s)
        self.found: list[Finding] = []

    def look(self) -> None:
        """The watchdog looks."""
        long = self.lag.take_long()
        self.found += self.judge.look(self.now, self.lag.due, long, self.clocks)

    def run(
        self,
        seconds: float,
        *,
        beats: bool = True,
        looks: bool = True,
        loop: float = 0.0,
        others: float = 0.0,
        loop_waits: float = 0.0,
        watch_waits: float = 0.0,
    ) -> None:
        """Both run, or only one of them; the rest are shares of a processor that threads use, or wait for."""
        step = EVERY_S / 4
        for number in range(1, round(seconds / step) + 1):
            self.now += step
            used = (loop, loop_waits, watch_waits, loop + others)
            self.clocks = Clocks(*(clock + step * share for clock, share in zip(self.clocks, used, strict=True)))
            if beats and self.now >= self.lag.due:
                self.lag.beat(self.now)
            if looks and number % 4 == 0:
                self.look()


def test_a_loop_that_runs_is_not_spoken_of() -> None:
    """Its beats are a little late, as timers are."""
    watched = Watched()

    watched.run(10.0)

    assert watched.found == []
    assert watched.lag.lag_seconds.count == pytest.approx(10.0 / BEAT_S, rel=0.3)
    assert list(watched.happenings) == []


def test_a_loop_that_is_held_is_told_once_and_then_how_long_it_was() -> None:
    """While it waits in a call, the watchdog runs."""
    watched = Watched()
    watched.run(1.0)

    watched.run(3.0, beats=False)
    assert [type(each) for each in watched.found] == [Held]
    watched.run(1.0)

    held, released = watched.found
    assert isinstance(held, Held)
    assert 1.0 <= held.seconds <= 1.0 + EVERY_S
    assert (held.cpu_s, held.by_others) == (0.0, False)
    assert isinstance(released, Released)
    assert released.was_told
    assert released.held_s == pytest.approx(3.0, abs=BEAT_S)


def test_a_call_that_lets_no_thread_run_is_told_when_it_returns() -> None:
    """The watchdog was late too, but the loop's thread used the processor all the time."""
    watched = Watched()
    watched.run(1.0)

    watched.run(3.0, beats=False, looks=False, loop=1.0)
    watched.look()  # before the loop gets to its beat
    watched.run(1.0)

    held, released = watched.found
    assert isinstance(held, Held)
    assert not held.by_others
    assert held.cpu_s == pytest.approx(3.0, abs=0.3)
    assert isinstance(released, Released)
    assert released.was_told


def test_a_stall_that_ended_before_the_watchdog_looked_is_counted() -> None:
    """Its place was not read."""
    watched = Watched()
    watched.run(1.0)

    watched.run(3.0, beats=False, looks=False, loop=1.0)
    watched.run(1.0)

    (released,) = watched.found
    assert isinstance(released, Released)
    assert not released.was_told


def test_another_thread_that_keeps_the_interpreter_is_not_taken_for_the_loop() -> None:
    """The loop's own thread hardly ran, while the process did."""
    watched = Watched()
    watched.run(1.0)

    watched.run(3.0, beats=False, looks=False, others=1.0)
    watched.look()

    (held,) = watched.found
    assert isinstance(held, Held)
    assert held.by_others


def test_a_call_that_lets_no_thread_run_is_told_on_a_busy_machine_too() -> None:
    """The loop's thread got a tenth of a processor and waited for the rest, which is said."""
    watched = Watched()
    watched.run(1.0)

    watched.run(3.0, beats=False, looks=False, loop=0.1, loop_waits=0.9)
    watched.look()

    (held,) = watched.found
    assert isinstance(held, Held)
    assert not held.by_others
    assert (held.cpu_s, held.wait_s) == (pytest.approx(0.3, abs=0.05), pytest.approx(2.7, abs=0.3))


def test_a_busy_machine_that_leaves_the_process_no_processor_is_not_taken_for_a_stall() -> None:
    """Both threads waited for one."""
    watched = Watched()
    watched.run(1.0)

    watched.run(3.0, beats=False, looks=False, loop_waits=1.0, watch_waits=1.0)
    watched.run(1.0)

    assert [type(each) for each in watched.found] == [Paused]


def test_a_process_that_was_busy_until_it_was_stopped_is_not_blamed() -> None:
    """What it ran before the watchdog's next look does not count."""
    watched = Watched()
    watched.run(1.0, loop=1.0)

    watched.run(0.2, looks=False, loop=1.0)
    watched.run(10.0, beats=False, looks=False)
    watched.run(1.0)

    assert [type(each) for each in watched.found] == [Paused]


def test_a_process_that_was_stopped_is_not_taken_for_a_loop_that_was_held() -> None:
    """No thread of it used a processor, whichever of them runs first afterwards."""
    for looks_first in (True, False):
        watched = Watched(stuck_after_s=2.0)
        watched.run(1.0)

        watched.run(60.0, beats=False, looks=False)
        if looks_first:
            watched.look()
        watched.run(2.0)

        (paused,) = watched.found
        assert isinstance(paused, Paused)
        assert paused.seconds == pytest.approx(60.0, abs=EVERY_S)
        # The request that waited is told the truth all the same: the loop did not run.
        (stall,) = watched.happenings
        assert stall.overlap_s(0.0, 70.0) == pytest.approx(60.0, abs=2 * BEAT_S)


def test_a_loop_that_was_held_while_the_process_was_stopped_is_judged_without_that_time() -> None:
    """Held for two seconds, stopped for ten, held for one more."""
    watched = Watched(stuck_after_s=5.0)
    watched.run(1.0)

    watched.run(2.0, beats=False)
    watched.run(10.0, beats=False, looks=False)
    watched.look()
    watched.run(1.0, beats=False)
    watched.run(1.0)

    assert [type(each) for each in watched.found] == [Held, Paused, Released]
    assert isinstance(watched.found[2], Released)
    assert watched.found[2].held_s == pytest.approx(3.0, abs=EVERY_S + BEAT_S)


def test_a_loop_that_is_held_for_too_long_is_stuck() -> None:
    """Only where a limit is set, and at each look from then on."""
    watched = Watched(stuck_after_s=2.0)
    watched.run(3.0, beats=False)

    assert [type(each) for each in watched.found[:2]] == [Held, Stuck]
    assert isinstance(watched.found[1], Stuck)
    assert 2.0 <= watched.found[1].seconds <= 2.0 + EVERY_S + BEAT_S


def test_the_times_that_the_loop_stood_still_are_happenings() -> None:
    """Requests that waited meanwhile are explained by them; small delays are not kept."""
    happenings = Happenings()
    lag = LoopLag(0.0, 1.0, happenings)
    for now in (0.1, 0.2, 2.3, 2.4, 2.5, 2.62, 3.1):  # due at 0.3, 2.6, and 2.72
        lag.beat(now)

    assert [(each.kind, round(each.began, 3), each.ended) for each in happenings] == [
        ("stall", 0.3, 2.3),
        ("stall", 2.72, 3.1),
    ]


def test_beats_beyond_the_bound_are_kept_within_a_bound() -> None:
    """Where the watchdog does not take them."""
    lag = LoopLag(0.0, 1.0)
    for number in range(1, KEPT + 101):
        lag.beat(2.0 * number)

    assert len(lag.take_long()) == KEPT
    assert lag.take_long() == []


def test_the_last_stall_is_known_for_a_while() -> None:
    """Probes ask for it; a pause of the process is none."""
    lag = LoopLag(0.0, threshold_s=1.0)
    lag.note_pause(30.0)
    assert lag.last_stall(5.0, 10.0) is None

    lag.note_held(1.0)
    assert lag.last_stall(4.0, 10.0) == Interval(1.0, 4.0)
    assert lag.last_stall(4.0, 0.0) is None
    lag.note_stall(Interval(1.0, 4.0), 2.5)

    assert lag.last_stall(5.0, 10.0) == Interval(1.0, 4.0)
    assert lag.last_stall(14.0, 10.0) is None
    assert (lag.stalls, lag.stalled_seconds, lag.longest_s) == (1, 2.5, 2.5)
    assert (lag.pauses, lag.paused_seconds) == (1, 30.0)
