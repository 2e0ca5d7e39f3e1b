"""Tests for how long requests wait where every start of a worker failed of late: `pool/dispatch/hold.py`, and the
dispatcher."""

from __future__ import annotations

import math
from typing import Any

import pytest

from marserve.errors import DeadlinePassed, MarserveError, NoWorker, QueueFull
from marserve.messages import Part, Request, Result
from marserve.pool.dispatch.dispatcher import Dispatcher
from marserve.pool.dispatch.hold import HOLD_S, Hold
from marserve.pool.dispatch.jobs import Flight, Job
from marserve.pool.options import PoolOptions, SequenceOptions
from marserve.telemetry.metrics.counts import VersionMetrics
from support.receivers import Told


class Stage:
    """A dispatcher whose only worker is gone since `at`, and is started again at `next_start`."""

    def __init__(self, next_start: float | None, at: float = 0.0, **options: Any) -> None:
        self.dispatcher: Dispatcher = Dispatcher(PoolOptions("m", "1", 1, 1, **options), VersionMetrics("m", "1"), self)
        self.flights: list[Flight] = []
        self.lose(next_start, at)

    def lose(self, next_start: float | None, now: float) -> None:
        """What the pool says when a start has failed."""
        self.dispatcher.living_slots = 0
        self.dispatcher.last_death = "load_failed"
        self.dispatcher.hold_for_start.note(next_start, now)
        self.dispatcher.fail_stranded(now)

    def load(self, now: float) -> None:
        """What the pool says when a worker has loaded the model."""
        self.dispatcher.open_lane("w", now)
        self.dispatcher.living_slots = 1
        self.dispatcher.hold_for_start.end()
        self.dispatcher.fail_stranded(now)

    def submit(self, now: float, *, deadline: float | None = None, **fields: Any) -> tuple[Told, Job]:
        """A request comes."""
        told = Told()
        request = Request("r", [Part("body", b"x")], deadline=deadline, **fields)
        return told, self.dispatcher.submit(request, told, now)

    def send(self, key: str, flight: Flight) -> None:
        """A flight leaves."""
        self.flights.append(flight)

    def __getattr__(self, name: str) -> Any:
        """The dispatcher's other wishes are of no interest here."""
        return lambda *_: None


@pytest.mark.parametrize(
    ("next_start", "deadline", "is_kept"),
    [
        (None, None, False),
        (None, 100.0, False),
        (14.9, None, True),
        (15.1, None, False),
        (15.1, 16.0, True),
        (12.0, 11.0, False),
        (9.0, None, True),
        (9.0, 10.0, False),
        (math.inf, 100.0, False),
    ],
)
def test_a_request_waits_for_a_start_that_comes_within_its_deadline_or_five_seconds(
    next_start: float | None, deadline: float | None, is_kept: bool
) -> None:
    """A start that is under way lies in the past; a deadline that has come keeps nothing."""
    hold = Hold()
    hold.note(next_start, 3.0)

    assert hold.keeps(10.0, deadline, 10.0) is is_kept


def test_one_that_waited_before_the_loss_waits_five_seconds_from_the_loss() -> None:
    """However often starts fail meanwhile; a worker that came in between begins the time anew."""
    hold = Hold()
    hold.note(101.0, 100.0)
    hold.note(105.5, 102.0)
    first = hold.until(20.0, None)
    hold.end()
    hold.note(201.0, 200.0)

    assert (first, hold.until(20.0, None)) == (100.0 + HOLD_S, 200.0 + HOLD_S)


def test_requests_are_held_until_the_start_and_answered_after_it() -> None:
    """Two failed loads, the third start in two seconds."""
    stage = Stage(2.0)
    clients = [stage.submit(0.1 * number) for number in range(20)]

    stage.load(2.5)

    assert [told.ends for told, _ in clients] == [[]] * 20
    assert stage.flights[0].jobs[0] is clients[0][1]
    assert stage.dispatcher.hold_for_start.look_at == math.inf


def test_what_cannot_wait_so_long_is_refused_and_told_when_the_start_is() -> None:
    """At the door and in the queue; those with time enough stay."""
    stage = Stage(2.0)
    short, _ = stage.submit(0.0)
    long, _ = stage.submit(0.0, deadline=40.0)

    stage.lose(21.0, 2.0)
    with pytest.raises(NoWorker) as refused:
        stage.submit(3.0)

    assert isinstance(short.end, NoWorker)
    assert (short.end.retry_after_s, refused.value.retry_after_s) == (19.0, 18.0)
    assert "The next one is started in 18 seconds." in str(refused.value)
    assert "scale workers API" not in str(refused.value)
    assert long.end is None


def test_without_a_known_start_all_are_refused_and_told_no_time() -> None:
    """A slot that is tried again only when it is scaled."""
    stage = Stage(1.0)
    told, _ = stage.submit(0.0)

    stage.lose(None, 1.0)

    assert isinstance(told.end, NoWorker)
    assert told.end.retry_after_s is None


def test_a_start_that_takes_longer_than_five_seconds_holds_nothing_longer() -> None:
    """The dispatcher asks to be woken for the first whose time is up."""
    stage = Stage(0.0)
    early, _ = stage.submit(1.0)
    late, _ = stage.submit(2.0)

    assert stage.dispatcher.next_wake() == 6.0
    stage.dispatcher.wake(6.0)
    ends_then: list[object] = [type(early.end), late.end]

    assert ends_then == [NoWorker, None]
    assert stage.dispatcher.next_wake() == 7.0
    stage.dispatcher.wake(7.0)
    assert isinstance(late.end, NoWorker)
    assert stage.dispatcher.next_wake() is None
    assert stage.dispatcher.is_empty


def test_a_deadline_ends_what_is_held_as_it_ends_what_waits() -> None:
    """504, not 503."""
    stage = Stage(2.0)
    told, _ = stage.submit(0.0, deadline=3.0)

    stage.dispatcher.wake(3.0)

    assert isinstance(told.end, DeadlinePassed)


def test_the_queues_bound_holds_and_says_no_time_before_the_start() -> None:
    """The queue is that of every day."""
    stage = Stage(4.0, queue_size=2)
    for _ in range(2):
        stage.submit(0.0)

    with pytest.raises(QueueFull) as refused:
        stage.submit(1.0)

    assert refused.value.retry_after_s == 3.0


def test_what_another_version_would_take_is_not_held() -> None:
    """A roll-out's candidate that cannot load keeps nobody waiting."""
    stage = Stage(1.0)

    with pytest.raises(NoWorker):
        stage.submit(0.0, is_rescued=True)


def test_a_client_that_leaves_when_another_is_told_is_told_nothing() -> None:
    """Both were to be told."""
    stage = Stage(1.0)
    jobs: list[Job] = []

    class Leaves(Told):
        def on_error(self, error: MarserveError) -> None:
            super().on_error(error)
            jobs[0].cancel()

    first = Leaves()
    stage.dispatcher.submit(Request("a", []), first, 0.0)
    second, job = stage.submit(0.0)
    jobs.append(job)

    stage.lose(100.0, 1.0)

    assert isinstance(first.end, NoWorker)
    assert second.end is None


def test_the_items_of_a_dead_worker_are_held_too() -> None:
    """They wait in a group of their own, to be run once more."""
    stage = Stage(None)
    stage.load(0.0)
    told, _ = stage.submit(0.0)
    stage.dispatcher.died("w", 1, NoWorker("m"), may_retry=True, now=1.0)
    stage.lose(3.0, 1.0)

    held = told.end
    stage.lose(30.0, 3.0)

    assert held is None
    assert isinstance(told.end, NoWorker)
    assert stage.dispatcher.is_empty


@pytest.mark.parametrize(
    "options",
    [
        {"most_concurrent": 4, "is_concurrent": True},
        {"sequences": SequenceOptions(60.0, queue_size=4, most=4)},
        {"continuous_batching": True, "batch_size": 4},
    ],
    ids=["concurrent", "sequences", "continuous"],
)
def test_every_kind_of_dispatcher_holds(options: dict[str, Any]) -> None:
    """And lets go in time."""
    stage = Stage(2.0, **options)
    headers = [(b"ts_request_sequence_id", b"1"), (b"ts_request_sequence_start", b"true")]
    kept, _ = stage.submit(0.0, deadline=30.0, headers=headers)
    let_go, _ = stage.submit(0.0, headers=headers)

    stage.dispatcher.wake(5.0)
    ends: list[object] = [kept.end, type(let_go.end)]
    stage.load(6.0)

    assert ends == [None, NoWorker]
    assert len(stage.flights) == 1
    stage.dispatcher.finished("w", 1, 0.1, [Result(200, "", [])], [b"y"], 6.1)
    assert kept.body == b"y"
