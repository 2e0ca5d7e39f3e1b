"""Lanes: what is known of the workers, beside a plain look at all of them; whose flights may end; who is held."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.errors import BadFrame
from marserve.messages import Request
from marserve.pool.dispatch.jobs import Flight, Job, WorkerLane
from marserve.pool.dispatch.lanes import Lanes
from marserve.telemetry.metrics.counts import VersionMetrics
from support.receivers import Told


class Stage:
    """Lanes, and what they asked for."""

    def __init__(self, *, in_any_order: bool = False) -> None:
        self.asked: list[str] = []
        self.metrics = VersionMetrics("m", "1")
        self.lanes = Lanes(self.metrics, self, in_any_order=in_any_order)  # type: ignore[arg-type]
        self.time = 0.0

    def __getattr__(self, name: str) -> Any:
        return lambda key, *_: self.asked.append(f"{name} {key}")

    def open(self, key: str) -> None:
        """A worker is ready."""
        self.lanes.rest(self.lanes.add(key), self.time)

    def begin(self, key: str, count: int = 1) -> Flight:
        """A worker is sent so many jobs, ahead where it has others."""
        lane = self.lanes.by_key[key]
        if lane in self.lanes.idle:
            self.lanes.idle.remove(lane)
        jobs = [Job(Request("r", []), Told(), 0.0, None, None) for _ in range(count)]  # type: ignore[arg-type]
        return self.lanes.begin(lane, jobs, False, self.time, is_ahead=bool(lane.flights))

    def land(self, flight: Flight, handler_s: float = 0.01) -> None:
        """A flight ends."""
        lane = self.lanes.land(flight, handler_s, self.time)
        if not lane.flights:
            self.lanes.rest(lane, self.time)


class Noted:
    """An order that notes of each worker how many flights it has, how long its batches take, and if it is open."""

    def __init__(self) -> None:
        self.seen: dict[WorkerLane, tuple[int, float, bool]] = {}

    def note(self, lane: WorkerLane) -> None:
        """A worker has changed."""
        self.seen[lane] = len(lane.flights), lane.mean_run_s, lane.is_open

    def forget(self, lane: WorkerLane) -> None:
        """A worker is gone."""
        self.seen.pop(lane, None)


STEPS = ["open", "open", "begin", "begin", "land", "close", "lose", "lend"]


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 3)), min_size=20, max_size=60))
def test_what_is_kept_is_what_a_look_at_every_worker_says(steps: list[tuple[str, int]]) -> None:
    """The idle ones, what runs, what was sent ahead, how long batches take, each order; after each of any steps."""
    stage = Stage()
    lanes = stage.lanes
    orders = [Noted()]
    lanes.keep(orders[0])

    for turn, (what, number) in enumerate(steps):
        key, stage.time = str(number), float(turn)
        lane = lanes.by_key.get(key)
        if what == "open" and lane is None:
            stage.open(key)
        elif lane is None:
            continue
        elif what == "begin" and lane.is_open and not (lane.flights and lane.flights[0].is_check):
            stage.begin(key, number + 1)
        elif what == "land" and lane.flights and lane.flights[0].is_check:
            lanes.rest(lanes.end_loan(key, lane.last_number), stage.time)
        elif what == "land" and lane.flights:
            stage.land(lane.flights[0], 0.01 * turn)
        elif what == "close":
            assert lanes.close(lane) == (not lane.flights)
        elif what == "lose":
            assert lanes.lost(key) is lane
        elif what == "lend" and lanes.idle:
            lanes.lend_to = lambda *_: None
            lanes.rest(lanes.idle.pop(), stage.time)

        if turn >= 3 and len(orders) == 1:
            orders.append(Noted())
            lanes.keep(orders[1])
        every = lanes.by_key.values()
        batches = [[flight for flight in one.flights if not flight.is_check] for one in every]
        assert sorted(one.key for one in lanes.idle) == sorted(one.key for one in every if not one.flights)
        assert all(one.is_open or one.flights for one in every)
        assert lanes.is_at_rest == (not any(batches))
        assert lanes.jobs_ahead == sum(len(flight.jobs) for flights in batches for flight in flights[1:])
        assert lanes.running == sum(len(flight.jobs) for flights in batches for flight in flights)
        for order in orders:
            new = (0, 0.0, True)
            assert set(order.seen) <= set(every)
            assert all(order.seen.get(one, new) == (len(one.flights), one.mean_run_s, one.is_open) for one in every)
        assert lanes.mean_runs_s == pytest.approx(sum(one.mean_run_s for one in every))


def test_what_was_sent_ahead_goes_with_its_worker() -> None:
    """The batch that it ran was not ahead; of another worker nothing is forgotten."""
    stage = Stage()
    for key in "wx":
        stage.open(key)
        for count in (1, 2, 4):
            stage.begin(key, count)

    stage.lanes.lost("w")

    assert stage.lanes.jobs_ahead == 6


def test_where_workers_run_many_at_once_nothing_is_ahead() -> None:
    """What they have beside the first has begun, and takes nothing off the bound of what may wait."""
    stage = Stage(in_any_order=True)
    stage.open("w")
    lane = stage.lanes.by_key["w"]
    stage.lanes.idle.remove(lane)
    flights = [stage.lanes.begin(lane, [], False, 0.0) for _ in range(3)]
    flights[1].jobs.append(Job(Request("r", []), Told(), 0.0, None, None))  # type: ignore[arg-type]

    stage.land(flights[0])

    assert stage.lanes.jobs_ahead == 0


def test_a_flight_ends_in_its_turn_unless_workers_run_many_at_once() -> None:
    """What a worker says of another is no honest word; nor of a loan."""
    one, many = Stage(), Stage(in_any_order=True)
    for stage in (one, many):
        stage.open("w")
        stage.begin("w")
        second = stage.begin("w")

    assert many.lanes.flight("w", 2) is second
    for lanes, key, number in ((one.lanes, "w", 2), (many.lanes, "w", 3), (one.lanes, "x", 1)):
        with pytest.raises(BadFrame):
            lanes.flight(key, number)


@pytest.mark.parametrize("seconds", [-0.1, float("inf"), float("nan")])
def test_a_time_that_is_none_books_nothing(seconds: float) -> None:
    """The worker is ended for it, and what it has is given back."""
    stage = Stage()
    stage.open("w")
    flight = stage.begin("w")

    with pytest.raises(BadFrame):
        stage.land(flight, seconds)

    assert list(stage.lanes.by_key["w"].flights) == [flight]
    assert not stage.lanes.is_at_rest


def test_a_closed_worker_goes_with_its_last_flight() -> None:
    """And is told so then."""
    stage = Stage()
    stage.open("w")
    flights = [stage.begin("w"), stage.begin("w")]

    assert not stage.lanes.close(stage.lanes.by_key["w"])
    for flight in flights:
        assert stage.asked == []
        stage.land(flight)

    assert stage.asked == ["lane_emptied w"]
    assert not stage.lanes.by_key


def test_a_worker_is_read_again_when_the_last_that_holds_it_lets_go() -> None:
    """Unless it has ended by then."""
    stage = Stage()
    for key in "wx":
        stage.open(key)
    (one, two), (three,) = stage.begin("w", 2).jobs, stage.begin("x").jobs

    for job in (one, two, three):
        stage.lanes.hold(job)
    assert stage.lanes.held == {"w", "x"}
    stage.lanes.lost("x")
    for job in (one, three, two):
        stage.lanes.release(job)

    assert stage.asked == ["hold w", "hold x", "resume w"]
    assert not stage.lanes.held


def test_a_loan_is_ended_only_by_the_worker_that_is_lent_and_by_its_number() -> None:
    """A worker that runs a batch, or has nothing, was not lent."""
    stage = Stage()
    for key in ("w", "runs", "idle"):
        stage.open(key)
    stage.begin("runs")
    stage.lanes.lend_to = lambda key, flight: stage.asked.append(f"lent {key} {flight.number}")
    lane = stage.lanes.by_key["w"]
    stage.lanes.idle.remove(lane)
    stage.lanes.rest(lane, 0.0)

    for key, number in (("w", 2), ("runs", 1), ("idle", 0), ("gone", 1)):
        with pytest.raises(BadFrame):
            stage.lanes.end_loan(key, number)
    stage.lanes.end_loan("w", 1)

    assert stage.asked == ["lent w 1"]
    assert not lane.flights
