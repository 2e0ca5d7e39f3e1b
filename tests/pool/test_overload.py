"""Overload without a clock: arrivals at random, workers that take exactly 10 ms, and the figures of RELIABILITY D.

Time is a number here, so the figures are exact: what they say of the rules is not blurred by the machine.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from marserve.errors import DeadlinePassed, MarserveError, QueueFull, WaitTooLong
from marserve.messages import Answer, Part, Request, Result
from marserve.pool.dispatch.dispatcher import Dispatcher
from marserve.pool.dispatch.jobs import Flight
from marserve.pool.options import PoolOptions
from marserve.telemetry.metrics.counts import VersionMetrics

RUN_S = 0.01
WORKERS = 4
CAPACITY = WORKERS / RUN_S
OK = Result(200, "", [])


@dataclass
class Client:
    """One request: when it came, when and how it ended."""

    world: World
    name: str
    came_s: float
    ended_s: float = math.inf
    error: MarserveError | None = None

    def on_answer(self, answer: Answer) -> None:
        """Answered."""
        self.ended_s = self.world.now

    def on_piece(self, piece: Answer, last: bool) -> None:
        """No stream here."""

    def on_error(self, error: MarserveError) -> None:
        """Failed."""
        self.ended_s, self.error = self.world.now, error

    @property
    def took_s(self) -> float:
        """From its coming to its end."""
        return self.ended_s - self.came_s


class World:
    """A dispatcher, workers that are numbers, and a clock that jumps."""

    def __init__(self, **options: Any) -> None:
        self.now = 0.0
        self.metrics = VersionMetrics("m", "1")
        self.dispatcher = Dispatcher(PoolOptions("m", "1", WORKERS, WORKERS, **options), self.metrics, self)
        self.dispatcher.living_slots = WORKERS
        self.clients: list[Client] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._waiting: dict[str, list[Flight]] = {}
        for number in range(WORKERS):
            self.dispatcher.open_lane(f"w{number}", 0.0)

    def at(self, when: float, event: Callable[[], None]) -> None:
        """Have something happen."""
        heapq.heappush(self._events, (when, next(self._order), event))

    def arrive(self, name: str, rate: float, seconds: float, seed: int, **request: Any) -> None:
        """Requests of one kind at random, `rate` a second. `within_s` is their deadline from when they come."""
        dice = random.Random(seed)
        when = dice.expovariate(rate)
        while when < seconds:
            self.at(when, lambda: self._submit(name, **request))
            when += dice.expovariate(rate)

    def _submit(self, name: str, *, within_s: float | None = None, priority: int | None = None) -> None:
        client = Client(self, name, self.now)
        self.clients.append(client)
        deadline = None if within_s is None else self.now + within_s
        request = Request(f"r{len(self.clients)}", [Part("body", b"")], deadline=deadline, priority=priority)
        try:
            self.dispatcher.submit(request, client, self.now)
        except (QueueFull, WaitTooLong, DeadlinePassed) as error:
            client.on_error(error)

    def run(self) -> None:
        """Until nothing happens any more."""
        while True:
            wake = self.dispatcher.next_wake()
            if self._events and (wake is None or self._events[0][0] <= wake):
                self.now, _, event = heapq.heappop(self._events)
                event()
            elif wake is not None:
                self.now = max(self.now, wake)
                self.dispatcher.pump(self.now)
            else:
                return

    def send(self, key: str, flight: Flight) -> None:
        """A worker is sent a batch; it runs it when it has run what it had."""
        waiting = self._waiting.setdefault(key, [])
        waiting.append(flight)
        if len(waiting) == 1:
            self._begin(key)

    def _begin(self, key: str) -> None:
        flight = self._waiting[key][0]
        live = [job.deadline is None or job.deadline > self.now for job in flight.jobs]
        results = [OK if alive else Result(504, "", [], "expired") for alive in live]
        run_s = RUN_S if any(live) else 0.0

        def end() -> None:
            waiting = self._waiting[key]
            waiting.pop(0)
            has_next = bool(waiting)
            self.dispatcher.finished(key, flight.number, run_s, results, [b""] * len(results), self.now)
            if has_next:
                self._begin(key)

        self.at(self.now + run_s, end)

    def mark_cancelled(self, key: str, number: int, index: int) -> None:
        """A running item is no longer wanted."""

    def hold(self, key: str) -> None:
        """No streams here."""

    def resume(self, key: str) -> None:
        """No streams here."""

    def lane_emptied(self, key: str) -> None:
        """A closed worker is done."""

    def all_ended(self) -> None:
        """The last job left."""

    def of(self, name: str) -> list[Client]:
        """The clients of one kind."""
        return [client for client in self.clients if client.name == name]


def p99(clients: list[Client]) -> float:
    """Of those that were answered."""
    took = sorted(client.took_s for client in clients if client.error is None)
    return took[math.ceil(0.99 * len(took)) - 1]


def test_a_flood_is_refused_and_the_model_does_all_that_it_can() -> None:
    """Three times the load for six seconds: goodput, and nobody accepted waits longer than the queue takes (D1)."""
    world = World(queue_size=40)
    world.arrive("flood", 3 * CAPACITY, 6.0, seed=1)

    world.run()

    answered = [client for client in world.clients if client.error is None]
    refused = [client.error for client in world.clients if client.error is not None]
    assert len(answered) >= 0.99 * CAPACITY * 6.0
    assert all(isinstance(error, QueueFull) and 1.0 <= (error.retry_after_s or 0.0) <= 60.0 for error in refused)
    assert p99(answered) <= (40 / WORKERS + 2) * RUN_S + 1e-9
    assert len(answered) + len(refused) == len(world.clients)
    assert world.dispatcher.is_empty


def test_half_the_load_after_a_flood_is_as_if_nothing_had_been() -> None:
    """From the moment when the queue is empty (D2)."""
    alone, after = World(queue_size=40), World(queue_size=40)
    after.arrive("flood", 3 * CAPACITY, 3.0, seed=1)
    for world in (alone, after):
        world.at(3.2, lambda world=world: None)  # type: ignore[misc]
    alone.arrive("half", CAPACITY / 2, 10.0, seed=2)
    after.arrive("half", CAPACITY / 2, 10.0, seed=2)

    alone.run()
    after.run()

    def late(world: World) -> list[Client]:
        return [client for client in world.of("half") if client.came_s > 5.0]

    assert p99(late(after)) <= 1.1 * p99(late(alone))


def test_expired_work_is_never_run_and_most_is_refused_before_it_waits() -> None:
    """Half the clients give 100 ms at twice the load, and the queue alone takes longer (D3)."""
    world = World(queue_size=200)
    world.arrive("hurried", CAPACITY, 2.5, seed=3, within_s=0.1)
    world.arrive("patient", CAPACITY, 2.5, seed=4)

    world.run()

    kinds = [type(client.error) for client in world.of("hurried")]
    assert world.metrics.expired_run == 0
    assert all(client.took_s <= 0.1 + 1e-9 for client in world.of("hurried"))
    assert kinds.count(WaitTooLong) > 20 * kinds.count(DeadlinePassed)
    # What a worker did was wanted: nobody's answer was thrown away.
    done = sum(client.error is None for client in world.clients)
    assert done >= 0.99 * CAPACITY * 2.5


def test_deadlines_refused_at_the_door_leave_the_workers_to_those_who_can_be_served() -> None:
    """All clients give 50 ms at three times the load: what is accepted is answered in time."""
    world = World(queue_size=1000)
    world.arrive("hurried", 3 * CAPACITY, 5.0, seed=5, within_s=0.05)

    world.run()

    done = sum(client.error is None for client in world.clients)
    assert done >= 0.95 * CAPACITY * 5.0
    assert world.metrics.expired_run == 0


def test_urgent_requests_do_not_notice_twice_the_load() -> None:
    """One in ten is urgent: its p99 is at most 1.5 times its quiet value, and the others get what is left (D5)."""
    quiet, loaded = World(queue_size=40), World(queue_size=40)
    for world in (quiet, loaded):
        world.arrive("urgent", 0.2 * CAPACITY, 8.0, seed=6, priority=0)
    loaded.arrive("low", 1.8 * CAPACITY, 8.0, seed=7)

    quiet.run()
    loaded.run()

    assert all(client.error is None for client in loaded.of("urgent"))
    assert p99(loaded.of("urgent")) <= 1.5 * max(p99(quiet.of("urgent")), 1.5 * RUN_S)
    assert sum(client.error is None for client in loaded.of("low")) >= 0.75 * CAPACITY * 8.0


@pytest.mark.parametrize("seconds", [20.0, pytest.param(60.0, marks=pytest.mark.long)])
def test_the_least_urgent_are_served_while_the_urgent_alone_are_too_many(seconds: float) -> None:
    """Ageing and the place that the first of a line keeps: a trickle, but no end of it (D5)."""
    world = World(queue_size=40)
    world.arrive("urgent", 2 * CAPACITY, seconds, seed=8, priority=0)
    world.arrive("low", 0.2 * CAPACITY, seconds, seed=9, priority=9)

    world.run()

    ended = [client.ended_s for client in world.of("low") if client.error is None and client.ended_s < seconds]
    gaps = [later - earlier for earlier, later in itertools.pairwise(sorted(ended))]
    assert len(gaps) >= 2
    assert max(gaps) <= 12.0
    assert max(client.took_s for client in world.of("low") if client.error is None) <= 10.0
