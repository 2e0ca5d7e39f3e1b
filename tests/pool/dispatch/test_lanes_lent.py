"""Lanes lent to the server itself, and batches formed by other values: the dispatcher's part of both."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from marserve.errors import BadFrame, WorkerDied
from marserve.messages import Part, Request, Result
from marserve.pool.dispatch.dispatcher import Dispatcher
from marserve.pool.dispatch.jobs import Flight
from marserve.pool.options import PoolOptions
from marserve.telemetry.metrics.counts import VersionMetrics
from support.receivers import Told


class Stage:
    """A dispatcher, and what it asked for."""

    def __init__(self, **options: Any) -> None:
        self.dispatcher = Dispatcher(PoolOptions("m", "1", 1, 4, **options), VersionMetrics("m", "1"), self)
        self.dispatcher.living_slots = 1
        self.lent: list[tuple[str, Flight]] = []
        self.flights: list[tuple[str, Flight]] = []
        self.emptied: list[str] = []
        self._ids = itertools.count()

    def send(self, key: str, flight: Flight) -> None:
        """A flight leaves."""
        self.flights.append((key, flight))

    def lane_lent(self, key: str, flight: Flight) -> None:
        """A worker is lent."""
        self.lent.append((key, flight))

    def mark_cancelled(self, key: str, number: int, index: int) -> None:
        """An item is no longer wanted."""

    def lane_emptied(self, key: str) -> None:
        """A closed worker is done."""
        self.emptied.append(key)

    def all_ended(self) -> None:
        """The last job left."""

    def submit(self, count: int = 1) -> list[Told]:
        """Requests arrive."""
        clients = [Told() for _ in range(count)]
        for client in clients:
            self.dispatcher.submit(Request(f"r{next(self._ids)}", [Part("body", b"x")]), client, 0.0)
        return clients

    def answer(self, now: float = 0.0) -> None:
        """The oldest flight is answered."""
        key, flight = self.flights.pop(0)
        results = [Result(200, "", [])] * len(flight.jobs)
        self.dispatcher.finished(key, flight.number, 0.2, results, [b""] * len(flight.jobs), now)


def test_an_idle_worker_is_lent_at_once_and_given_back() -> None:
    """Meanwhile requests wait."""
    stage = Stage()
    stage.dispatcher.open_lane("a", 0.0)

    stage.dispatcher.want_lane(stage.lane_lent, 0.0)
    stage.submit()

    assert [(key, flight.number, flight.jobs) for key, flight in stage.lent] == [("a", 1, [])]
    assert stage.flights == []
    assert not stage.dispatcher.has_spare_lane
    stage.dispatcher.end_loan("a", 1, 1.0)
    assert [(key, flight.number) for key, flight in stage.flights] == [("a", 2)]


def test_a_certain_worker_is_lent_if_it_is_idle() -> None:
    """One that has a batch, or that is gone, is not."""
    stage = Stage()
    for key in "abc":
        stage.dispatcher.open_lane(key, 0.0)
    stage.submit()  # the worker that became idle last

    assert stage.dispatcher.borrow("c", 0.0) == 0
    assert stage.dispatcher.borrow("gone", 0.0) == 0
    assert stage.dispatcher.borrow("a", 0.0) == 1
    assert stage.dispatcher.borrow("a", 0.0) == 0
    stage.submit(2)
    assert [key for key, _ in stage.flights] == ["c", "b"]

    stage.dispatcher.end_loan("a", 1, 1.0)

    assert [key for key, _ in stage.flights] == ["c", "b", "a"]


def test_a_worker_that_is_borrowed_fulfils_no_wish_of_a_check() -> None:
    """The wish waits for the next one."""
    stage = Stage()
    stage.dispatcher.open_lane("a", 0.0)
    stage.dispatcher.borrow("a", 0.0)

    stage.dispatcher.want_lane(stage.lane_lent, 0.0)
    assert stage.lent == []
    stage.dispatcher.end_loan("a", 1, 0.0)

    assert [(key, flight.number) for key, flight in stage.lent] == [("a", 2)]


def test_a_busy_worker_is_lent_before_it_gets_its_next_batch() -> None:
    """A steady stream of requests cannot keep a check away."""
    stage = Stage()
    stage.dispatcher.open_lane("a", 0.0)
    stage.submit(3)

    stage.dispatcher.want_lane(stage.lane_lent, 0.0)
    assert stage.lent == []
    stage.answer()

    assert len(stage.lent) == 1
    assert stage.flights == []


def test_the_first_worker_that_loads_is_lent_before_it_serves() -> None:
    """A wish from before there was one."""
    stage = Stage()
    stage.dispatcher.want_lane(stage.lane_lent, 0.0)
    stage.submit()

    stage.dispatcher.open_lane("a", 0.0)
    stage.dispatcher.open_lane("b", 0.0)

    assert [key for key, _ in stage.lent] == ["a"]
    assert [key for key, _ in stage.flights] == ["b"]


def test_a_wish_is_fulfilled_once_and_may_be_taken_back() -> None:
    """Two wishes are one."""
    stage = Stage()
    stage.dispatcher.want_lane(stage.lane_lent, 0.0)
    stage.dispatcher.want_no_lane()
    stage.dispatcher.open_lane("a", 0.0)
    assert stage.lent == []

    stage.dispatcher.want_lane(stage.lane_lent, 0.0)
    stage.dispatcher.end_loan("a", 1, 0.0)

    assert len(stage.lent) == 1
    assert stage.dispatcher.has_spare_lane


def test_a_lent_worker_is_sent_nothing_ahead() -> None:
    """However quick it was."""
    stage = Stage(batch_size=1)
    stage.dispatcher.open_lane("a", 0.0)
    stage.submit()
    key, flight = stage.flights.pop(0)
    stage.dispatcher.finished(key, flight.number, 0.0001, [Result(200, "", [])], [b""], 0.0)
    stage.dispatcher.want_lane(stage.lane_lent, 0.0)

    stage.submit(5)
    stage.dispatcher.pump(10.0)

    assert stage.flights == []


def test_a_lent_worker_that_dies_is_gone_and_nobody_fails() -> None:
    """It held no request."""
    stage = Stage()
    stage.dispatcher.open_lane("a", 0.0)
    stage.dispatcher.want_lane(stage.lane_lent, 0.0)
    clients = stage.submit(2)

    stage.dispatcher.died("a", 1, WorkerDied("killed"), may_retry=True, now=0.0)
    stage.dispatcher.open_lane("b", 0.0)

    assert [client.ends for client in clients] == [[], []]
    assert [key for key, _ in stage.flights] == ["b"]


def test_a_lent_worker_that_is_retired_goes_when_it_is_given_back() -> None:
    """As one with a batch does."""
    stage = Stage()
    stage.dispatcher.open_lane("a", 0.0)
    stage.dispatcher.want_lane(stage.lane_lent, 0.0)

    assert not stage.dispatcher.close_lane("a")
    stage.dispatcher.end_loan("a", 1, 0.0)

    assert stage.emptied == ["a"]


def test_a_lent_worker_leaves_the_pool_empty() -> None:
    """Whoever waits for the last request does not wait for it."""
    stage = Stage()
    stage.dispatcher.open_lane("a", 0.0)
    stage.dispatcher.want_lane(stage.lane_lent, 0.0)

    assert stage.dispatcher.is_empty
    assert stage.dispatcher.running == 0


def test_what_a_worker_says_of_a_loan_that_is_none_is_a_broken_frame() -> None:
    """Nor may it answer a loan as a batch."""
    stage = Stage()
    stage.dispatcher.open_lane("a", 0.0)
    with pytest.raises(BadFrame):
        stage.dispatcher.end_loan("a", 1, 0.0)
    stage.dispatcher.want_lane(stage.lane_lent, 0.0)

    with pytest.raises(BadFrame):
        stage.dispatcher.end_loan("a", 2, 0.0)
    with pytest.raises(BadFrame):
        stage.dispatcher.finished("a", 1, 0.1, [], [], 0.0)


def test_a_new_batch_size_counts_for_what_waits() -> None:
    """At once; what left before runs as it is."""
    stage = Stage(batch_size=1)
    stage.dispatcher.open_lane("a", 0.0)
    stage.submit(9)

    stage.dispatcher.reconfigure(batch_size=4, max_batch_delay_s=0.0, now=0.0)
    sizes = []
    while stage.flights:
        sizes.append(len(stage.flights[0][1].jobs))
        stage.answer()

    assert sizes == [1, 4, 4]


def test_a_shorter_delay_lets_a_waiting_batch_go() -> None:
    """With the policy that waits."""
    stage = Stage(batch_size=4, max_batch_delay_s=10.0, batch_policy="fixed")
    stage.dispatcher.open_lane("a", 0.0)
    stage.submit(2)
    assert stage.dispatcher.next_wake() == 10.0

    stage.dispatcher.reconfigure(batch_size=4, max_batch_delay_s=0.5, now=1.0)

    assert len(stage.flights) == 1


def test_the_goal_policy_heeds_the_new_size() -> None:
    """It chooses up to what is allowed."""
    stage = Stage(batch_size=8, batch_policy="goal", latency_goal_s=1.0)

    stage.dispatcher.reconfigure(batch_size=1, max_batch_delay_s=0.0, now=0.0)
    stage.submit(3)
    stage.dispatcher.open_lane("a", 0.0)

    assert [len(flight.jobs) for _, flight in stage.flights] == [1]
