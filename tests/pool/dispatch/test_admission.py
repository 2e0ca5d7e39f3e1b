"""Who is let in: deadlines that cannot be kept, full queues, and who makes room for the more urgent."""

from __future__ import annotations

import heapq
import itertools
import math
from typing import Any

import pytest

from marserve.errors import DeadlinePassed, MarserveError, QueueFull, WaitTooLong
from marserve.messages import Part, Request, Result
from marserve.pool.dispatch.dispatcher import Dispatcher
from marserve.pool.dispatch.jobs import Flight, Job
from marserve.pool.options import PoolOptions
from marserve.telemetry.happenings import Happenings
from marserve.telemetry.metrics.counts import VersionMetrics
from support.receivers import Told

RUN_S = 1.0


class Door:
    """A dispatcher whose workers take a second a batch, and the clock."""

    def __init__(self, workers: int = 1, **options: Any) -> None:
        self.metrics = VersionMetrics("m", "1")
        self.dispatcher = Dispatcher(PoolOptions("m", "1", 1, 4, **options), self.metrics, self)
        self.dispatcher.living_slots = 1
        self.now = 0.0
        self.order: list[str] = []
        self.flights: dict[str, list[Flight]] = {}
        self._ids = itertools.count()
        for number in range(workers):
            self.dispatcher.open_lane(f"w{number}", self.now)

    def send(self, key: str, flight: Flight) -> None:
        """A flight leaves."""
        self.flights.setdefault(key, []).append(flight)
        self.order += [job.request.id for job in flight.jobs]

    def mark_cancelled(self, key: str, number: int, index: int) -> None:
        """A running item is no longer wanted."""

    def lane_emptied(self, key: str) -> None:
        """A closed worker is done."""

    def all_ended(self) -> None:
        """The last job left."""

    def learn(self, batches: int = 5) -> None:
        """Let a worker run that many batches."""
        for _ in range(batches):
            self.submit()
            self.end_of(next(key for key, flights in self.flights.items() if flights))
        self.order.clear()

    def submit(self, name: str = "", *, within_s: float | None = None, priority: int | None = None) -> tuple[Job, Told]:
        """A request arrives."""
        told = Told()
        deadline = None if within_s is None else self.now + within_s
        request = Request(name or f"r{next(self._ids)}", [Part("body", b"")], deadline=deadline, priority=priority)
        return self.dispatcher.submit(request, told, self.now), told

    def end_of(self, key: str, run_s: float = RUN_S) -> None:
        """A worker's oldest batch has run its second, or another time."""
        flight = self.flights[key].pop(0)
        self.now = max(self.now, flight.sent_at + run_s)
        count = len(flight.jobs)
        self.dispatcher.finished(key, flight.number, run_s, [Result(200, "", [])] * count, [b""] * count, self.now)


# ------------------------------------------------------------------------------------------- deadlines


def test_a_request_that_came_after_its_deadline_is_refused() -> None:
    """It waited too long behind others of its connection; no worker sees it, though one is idle."""
    door = Door()

    with pytest.raises(DeadlinePassed):
        door.submit(within_s=0.0)

    assert door.order == []
    assert door.metrics.refused == {"deadline": 1}
    assert door.metrics.requests == 0


def test_what_would_wait_past_its_deadline_is_refused_at_once_with_the_time_to_come_back() -> None:
    """One runs for another second and two wait: the fourth would be answered in four seconds."""
    door = Door()
    door.learn()
    for _ in range(3):
        door.submit()

    with pytest.raises(WaitTooLong) as refusal:
        door.submit(within_s=3.9)
    accepted, _ = door.submit(within_s=4.1)

    assert refusal.value.wait_s == pytest.approx(4.0)
    assert refusal.value.left_s == pytest.approx(3.9)
    assert refusal.value.retry_after_s == 3.0
    assert door.metrics.refused == {"predicted_wait": 1}
    assert accepted.deadline == door.now + 4.1


def test_the_models_own_limit_is_a_deadline_like_any_other() -> None:
    """`clientTimeoutInMills` refuses at the door too; the earlier of the two counts."""
    door = Door(client_timeout_s=2.5)
    door.learn()
    door.submit()
    door.submit()

    with pytest.raises(WaitTooLong):
        door.submit()
    with pytest.raises(WaitTooLong):
        door.submit(within_s=60.0)


def test_nothing_is_refused_while_a_worker_is_idle() -> None:
    """However long batches have taken: this one may be quicker, and costs nobody anything."""
    door = Door(workers=2)
    door.learn()
    door.submit()

    job, _ = door.submit(within_s=0.001)

    assert job.flight is not None


def test_nothing_is_refused_before_anything_is_known() -> None:
    """A guess from too few batches is none."""
    door = Door()
    door.learn(4)
    for _ in range(10):
        door.submit()

    job, _ = door.submit(within_s=0.001)

    assert job.flight is None


def test_more_workers_and_larger_batches_make_the_wait_shorter() -> None:
    """Eight before it, and what runs: ten seconds one by one, three in batches of eight, four with four workers."""
    waits = []
    for workers, batch_size in ((1, 1), (1, 8), (4, 1)):
        door = Door(workers, batch_size=batch_size, max_batch_delay_s=100.0)
        door.learn()
        for _ in range(workers + 8):
            door.submit()
        waits.append(door.dispatcher.expected_wait_s(5, door.now))

    assert waits == pytest.approx([10.0, 3.0, 4.0])


def test_an_urgent_request_does_not_wait_for_the_others() -> None:
    """Only for what runs, and for its equals."""
    door = Door()
    door.learn()
    for _ in range(6):
        door.submit()

    with pytest.raises(WaitTooLong):
        door.submit(within_s=2.5)
    job, _ = door.submit(within_s=2.5, priority=0)

    assert job.priority == 0


def test_no_request_is_run_after_its_deadline() -> None:
    """The counter of those that were stays at zero, though most expire in the queue."""
    door = Door(queue_size=1000)
    for _ in range(100):
        door.submit(within_s=3.5)

    while door.flights.get("w0"):
        door.end_of("w0")

    assert len(door.order) == 4
    assert door.metrics.expired == 97
    assert door.metrics.expired_run == 0
    assert door.dispatcher.is_empty


# ------------------------------------------------------------------------------------------- priorities


def test_requests_that_name_no_priority_have_the_models() -> None:
    """`defaultPriority`; 5 where the model's configuration is silent."""
    plain, _ = Door().submit()
    urgent, _ = Door(default_priority=1).submit()
    named, _ = Door(default_priority=1).submit(priority=9)

    assert [plain.priority, urgent.priority, named.priority] == [5, 1, 9]


def test_the_urgent_overtake_those_who_wait_but_not_what_runs() -> None:
    """In the order of their turns."""
    door = Door()
    door.submit("first", priority=9)
    for name, priority in (("low", 9), ("plain", None), ("high", 0), ("high too", 0)):
        door.submit(name, priority=priority)

    while door.flights["w0"]:
        door.end_of("w0")

    assert door.order == ["first", "high", "high too", "plain", "low"]


def test_the_low_are_not_starved_by_a_lasting_flood_of_the_urgent() -> None:
    """Four times as many urgent requests as can be run, for a minute: the low one is run in its tenth second."""
    door = Door(queue_size=20)
    door.submit()
    door.submit("low", priority=9)

    while "low" not in door.order and door.now < 60.0:
        for _ in range(4):
            try:
                door.submit(priority=0)
            except QueueFull:
                break
        door.end_of("w0")

    assert 9.0 <= door.now <= 30.0
    assert "low" in door.order


def test_in_a_full_queue_the_newest_of_the_least_urgent_makes_room() -> None:
    """Otherwise urgent requests would be refused by a queue full of others."""
    door = Door(queue_size=3)
    door.submit()
    _, old = door.submit("old")
    _, mid = door.submit("mid")
    _, new = door.submit("new")

    door.submit("urgent", priority=0)

    assert isinstance(new.end, QueueFull)
    assert new.end.retry_after_s is not None
    assert (old.end, mid.end) == (None, None)
    assert len(door.dispatcher.queue) == 3
    assert door.metrics.errors == {"queue_full": 1}


def test_what_made_room_is_not_run_with_what_leaves_at_that_moment() -> None:
    """A delay is over as the urgent one comes, and all that waits is sent ahead: the refused one is not among it."""
    door = Door(queue_size=3, batch_size=4, max_batch_delay_s=0.01)
    door.submit("quick")
    door.end_of("w0", 0.0005)
    door.submit("first")
    told = [door.submit(name)[1] for name in ("old", "mid", "new")]
    door.now = 0.02

    _, urgent = door.submit("urgent", priority=0)
    left = len(door.dispatcher.queue), door.dispatcher.waiting, door.dispatcher.running
    door.end_of("w0")
    door.end_of("w0")

    assert left == (0, 0, 4)
    assert door.order == ["quick", "first", "urgent", "old", "mid"]
    assert [len(one.ends) for one in (*told, urgent)] == [1, 1, 1, 1]
    assert isinstance(told[2].end, QueueFull)
    assert door.dispatcher.is_empty


class Canceller(Told):
    """A client that takes another request back when it is told of its own."""

    other: Job

    def on_error(self, error: MarserveError) -> None:
        """An error."""
        super().on_error(error)
        self.other.cancel()


def test_what_made_room_may_be_cancelled_before_it_is_told() -> None:
    """The end of another request's time is told at that moment, and its client cancels the displaced one."""
    door = Door(queue_size=3)
    door.submit()
    late = Canceller()
    door.dispatcher.submit(Request("late", [Part("body", b"")], deadline=1.0), late, door.now)
    _, mid = door.submit()
    late.other, gone = door.submit()
    door.now = 1.0

    door.submit("urgent", priority=0)

    assert isinstance(late.end, DeadlinePassed)
    assert (mid.end, gone.ends) == (None, [])
    assert door.dispatcher.waiting == 2
    assert door.metrics.cancelled == 1


def test_what_made_room_as_its_time_ended_is_told_once() -> None:
    """Of the time, which is looked at first."""
    door = Door(queue_size=2)
    door.submit()
    door.submit()
    _, late = door.submit(within_s=1.0)
    door.now = 1.0

    door.submit("urgent", priority=0)

    assert isinstance(late.end, DeadlinePassed)
    assert door.dispatcher.waiting == 2


def refused(door: Door) -> float:
    """A client that is refused, and in how many seconds it is told to come back, without what is drawn."""
    with pytest.raises(QueueFull) as refusal:
        door.submit()
    assert refusal.value.retry_after_s is not None
    return refusal.value.retry_after_s


def test_refused_clients_are_told_to_come_one_after_another_as_the_queue_drains() -> None:
    """Each in the second in which there is room for it; when that time has passed it starts anew."""
    door = Door(queue_size=2)
    door.learn()
    for _ in range(3):
        door.submit()

    told = [refused(door) for _ in range(5)]
    door.now += 30.0
    later = refused(door)

    assert told == [3.0, 4.0, 5.0, 6.0, 7.0]
    assert later == 3.0


def test_clients_that_come_again_at_their_moment_find_room() -> None:
    """Twenty-four of a model that takes a second, and a queue for two: no client is refused twice."""
    door = Door(queue_size=2)
    door.learn()
    began = door.now
    coming = [(began, 1, number) for number in range(24)]
    tries = dict.fromkeys(range(24), 0)
    while coming or door.flights["w0"]:
        ends = door.flights["w0"][0].sent_at + RUN_S if door.flights["w0"] else math.inf
        if not coming or ends <= coming[0][0]:
            door.end_of("w0")
            continue
        moment, _, number = heapq.heappop(coming)
        door.now = max(door.now, moment)
        tries[number] += 1
        try:
            door.submit()
        except QueueFull as refusal:
            heapq.heappush(coming, (door.now + (refusal.retry_after_s or 0.0), tries[number] + 1, number))

    assert max(tries.values()) == 2
    assert door.now - began == pytest.approx(24.0, abs=2.0)


def test_nobody_is_told_to_come_in_more_than_a_minute_however_many_are_refused() -> None:
    """Clients that do not wait are refused again and again: the minute is dealt out anew."""
    door = Door(queue_size=2)
    door.learn()
    for _ in range(3):
        door.submit()

    told = [refused(door) for _ in range(200)]

    assert (min(told), max(told)) == (3.0, 60.0)
    assert told.count(3.0) == 4


def test_before_a_batch_has_run_nothing_is_dealt_out() -> None:
    """Nobody knows how long one takes: the seconds are drawn."""
    door = Door(queue_size=1)
    door.submit()
    door.submit()

    assert [refused(door) for _ in range(3)] == [1.0, 1.0, 1.0]


def test_equals_do_not_make_room_for_one_another() -> None:
    """A full queue refuses, and says when to come back."""
    door = Door(queue_size=2)
    for _ in range(3):
        door.submit(priority=3)

    with pytest.raises(QueueFull) as refusal:
        door.submit(priority=3)
    with pytest.raises(QueueFull):
        door.submit(priority=4)

    assert refusal.value.retry_after_s is not None
    assert len(door.dispatcher.queue) == 2


def test_nobody_makes_room_for_who_is_refused_anyway() -> None:
    """A deadline that cannot be kept is looked at before anyone is sent away."""
    door = Door(queue_size=2)
    door.learn()
    door.submit(priority=0)
    others = [door.submit(priority=9)[1], door.submit(priority=9)[1]]

    with pytest.raises(WaitTooLong):
        door.submit(priority=0, within_s=0.5)

    assert [told.end for told in others] == [None, None]


def test_who_makes_room_may_send_another_request_while_it_is_told() -> None:
    """Surfaces may do as they like in a receiver."""
    door = Door(queue_size=2)
    door.submit()
    refused = []

    class Again(Told):
        def on_error(self, error: Any) -> None:
            super().on_error(error)
            try:
                door.submit("again")
            except QueueFull as full:
                refused.append(full)

    door.submit("stays")
    again = Again()
    door.dispatcher.submit(Request("goes", [Part("body", b"")]), again, door.now)
    door.submit("urgent", priority=0)

    assert isinstance(again.end, QueueFull)
    assert len(refused) == 1
    assert len(door.dispatcher.queue) == 2


def test_a_flood_is_noted_once_a_second_for_requests_of_other_models() -> None:
    """Not each refusal; with how many there were and why."""
    door = Door(queue_size=1)
    door.metrics.happenings = happenings = Happenings()
    door.submit()
    door.submit()
    for number in range(251):
        door.now = number / 100
        with pytest.raises(QueueFull):
            door.submit()

    assert [(each.kind, each.model, each.began, each.ended) for each in happenings] == [
        ("flood", "m", 0.0, 0.0),
        ("flood", "m", 0.0, 1.0),
        ("flood", "m", 1.0, 2.0),
    ]
    assert [each.text for each in happenings][:2] == [
        "had more requests than it takes, and refused a request (queue_full)",
        "had more requests than it takes, and refused 100 requests (queue_full)",
    ]
