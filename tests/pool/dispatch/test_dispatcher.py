"""Tests for the dispatcher: the life of every job from `submit` to its one end. Times are seconds that tests pass."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import weakref
from collections.abc import Sequence
from typing import Any

import pytest

from marserve.errors import (
    BadFrame,
    DeadlinePassed,
    Draining,
    FingerprintRefused,
    HandlerFailed,
    MarserveError,
    NoTicket,
    NoWorker,
    OutOfMemory,
    QueueFull,
    Thrown,
    WorkerDied,
)
from marserve.messages import Answer, Part, Raised, Request, Result
from marserve.pool.dispatch.dispatcher import Dispatcher
from marserve.pool.dispatch.jobs import Flight, Job, JobState
from marserve.pool.dispatch.modes.steps_and_sequences import STREAM_HEADER
from marserve.pool.dispatch.queue import GivenUp
from marserve.pool.options import PoolOptions
from marserve.telemetry.metrics.counts import VersionMetrics
from marserve.telemetry.metrics.measurements import Answered, Event, Queued, Ran, Tap
from support.blind import Blind
from support.receivers import Told

OK = Result(200, "", [])


class Client(Told):
    """A receiver with its job."""

    job: Job


class Stage:
    """A dispatcher, and everything that it asked for. Workers are what the test says they are."""

    def __init__(self, **options: Any) -> None:
        self.metrics = VersionMetrics("m", "1")
        self.dispatcher = Dispatcher(PoolOptions("m", "1", 1, 4, **options), self.metrics, self)
        self.dispatcher.living_slots = 1
        self.flights: dict[str, list[Flight]] = {}
        self.sent: list[tuple[str, list[bytes]]] = []
        self.cancelled: list[tuple[str, int, int]] = []
        self.emptied: list[str] = []
        self.all_ended_calls = 0
        self._ids = itertools.count()

    # What the dispatcher asks for.

    def send(self, key: str, flight: Flight) -> None:
        """A flight leaves."""
        self.flights.setdefault(key, []).append(flight)
        self.sent.append((key, bodies_of(flight)))

    def mark_cancelled(self, key: str, number: int, index: int) -> None:
        """A running item is no longer wanted."""
        self.cancelled.append((key, number, index))

    def lane_emptied(self, key: str) -> None:
        """A closed worker is done."""
        self.emptied.append(key)

    def all_ended(self) -> None:
        """The last job left."""
        self.all_ended_calls += 1

    # What the test lets happen.

    def open(self, *keys: str, now: float = 0.0) -> None:
        """Workers are ready."""
        for key in keys:
            self.dispatcher.open_lane(key, now)

    def submit(self, body: bytes, now: float = 0.0, *, deadline: float | None = None, describe: bool = False) -> Client:
        """A request arrives."""
        client = Client()
        request = Request(f"r{next(self._ids)}", [Part("body", body)], deadline=deadline, is_describe=describe)
        client.job = self.dispatcher.submit(request, client, now)
        return client

    def submit_all(self, bodies: Sequence[bytes], now: float = 0.0) -> list[Client]:
        """Requests arrive."""
        return [self.submit(body, now) for body in bodies]

    def answer(self, key: str, now: float = 0.0, *, run_s: float = 0.001, results: list[Result] | None = None) -> None:
        """A worker echoes its oldest flight."""
        flight = self.flights[key].pop(0)
        results = results or [OK] * len(flight.jobs)
        self.dispatcher.finished(key, flight.number, run_s, results, bodies_of(flight), now)

    def fail(self, key: str, now: float = 0.0, *, kind: str = "handler", code: int = 503) -> list[Job]:
        """A worker's oldest flight raises as a whole."""
        flight = self.flights[key].pop(0)
        return self.dispatcher.raised(key, Raised(flight.number, 0.001, kind, "Prediction failed", code, "trace"), now)

    def die(
        self,
        key: str,
        now: float = 0.0,
        *,
        begun: int | None = None,
        may_retry: bool = True,
        cause: str = "killed",
        began_oldest: bool = False,
    ) -> None:
        """A worker is gone; it had begun its oldest flight, unless said otherwise."""
        flights = self.flights.pop(key, [])
        if begun is None:
            begun = flights[0].number if flights else 0
        self.dispatcher.died(key, begun, WorkerDied(cause), may_retry=may_retry, began_oldest=began_oldest, now=now)

    def run_until_empty(self, guilty: set[bytes], key: str = "w") -> None:
        """A worker whose handler raises for batches that hold something guilty."""
        for _ in range(1000):
            if not self.flights.get(key):
                return
            if guilty & set(bodies_of(self.flights[key][0])):
                self.fail(key)
            else:
                self.answer(key)
        raise AssertionError("it does not come to rest")


def bodies_of(flight: Flight) -> list[bytes]:
    """What the flight's requests carry."""
    return [job.request.parts[0].body for job in flight.jobs]


# ------------------------------------------------------------------------------------------- admission


def test_a_request_goes_to_an_idle_worker_at_once_and_its_answer_comes_back() -> None:
    """The shortest path."""
    stage = Stage()
    stage.open("w")

    client = stage.submit(b"hello")
    stage.answer("w")

    assert stage.sent == [("w", [b"hello"])]
    assert client.end == Answer(b"hello", 200, "", [])
    assert stage.dispatcher.is_empty


def test_a_request_waits_while_workers_load() -> None:
    """A slot that lives is enough to be accepted."""
    stage = Stage()
    client = stage.submit(b"early")

    stage.open("w", now=3.0)
    stage.answer("w", now=3.1)

    assert client.body == b"early"


def test_without_a_living_slot_a_request_is_refused() -> None:
    """It could wait for ever."""
    stage = Stage()
    stage.dispatcher.living_slots = 0

    with pytest.raises(NoWorker) as caught:
        stage.submit(b"x")

    assert caught.value.cause == "no_worker"
    assert "Please use scale workers API to add workers. If this is a sequence" in str(caught.value)  # TorchServe's
    assert stage.metrics.requests == 0


def test_a_draining_pool_refuses() -> None:
    """What was accepted goes on."""
    stage = Stage()
    stage.open("w")
    before = stage.submit(b"before")
    stage.dispatcher.is_draining = True

    with pytest.raises(Draining, match=r"Version .* of model .* is stopping"):
        stage.submit(b"after")

    stage.answer("w")
    assert before.body == b"before"


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    """At once: nothing is gained by waiting."""
    stage = Stage(queue_size=2)
    stage.open("w")
    stage.submit_all([b"running", b"1", b"2"])

    with pytest.raises(QueueFull) as caught:
        stage.submit(b"3")

    assert caught.value.retry_after_s == 1.0
    assert stage.dispatcher.queue.oldest() is not None


def test_what_was_sent_ahead_still_counts_against_the_queues_bound() -> None:
    """Sending ahead must not make the queue longer than the operator said."""
    stage = Stage(queue_size=2, batch_size=1)
    stage.open("w")
    stage.submit(b"teach")
    stage.answer("w")  # the worker is known to be quick
    stage.submit_all([b"running", b"ahead", b"waiting"])
    assert stage.sent[-1] == ("w", [b"ahead"])

    with pytest.raises(QueueFull):
        stage.submit(b"one too many")


def test_what_was_sent_ahead_stops_counting_when_its_turn_has_come() -> None:
    """Or when its worker has died: the bound is for what waits."""
    stage = Stage(queue_size=2, batch_size=1)
    stage.open("w")
    stage.submit(b"teach")
    stage.answer("w")
    stage.submit_all([b"running", b"ahead"])

    stage.answer("w")  # what was ahead runs
    stage.submit(b"ahead again")
    stage.die("w", begun=3)  # both are to be run by others
    stage.open("v")
    assert stage.sent[-1] == ("v", [b"ahead"])
    stage.submit_all([b"1"])

    assert stage.dispatcher.waiting == 2
    with pytest.raises(QueueFull):
        stage.submit(b"2")


def test_a_cancelled_request_makes_room() -> None:
    """Its place is free at once."""
    stage = Stage(queue_size=1)
    stage.submit(b"1").job.cancel()

    assert stage.submit(b"2").end is None


def test_fixed_policy_does_not_count_what_an_idle_worker_collects() -> None:
    """In TorchServe the collected requests have left the queue."""
    stage = Stage(queue_size=2, batch_size=2, batch_policy="fixed", max_batch_delay_s=1.0)
    stage.open("w")

    stage.submit(b"collected")
    stage.submit(b"collected too")

    assert stage.sent == [("w", [b"collected", b"collected too"])]
    stage.submit_all([b"1", b"2"])
    with pytest.raises(QueueFull):
        stage.submit(b"3")


def test_a_fixed_batch_that_is_larger_than_the_queue_is_collected_while_a_worker_is_idle() -> None:
    """TorchServe's workers take requests out of the queue as they come; a busy worker takes none."""
    stage = Stage(queue_size=1, batch_size=3, batch_policy="fixed", max_batch_delay_s=1.0)
    stage.open("w")

    stage.submit_all([b"1", b"2", b"3"])

    assert stage.sent == [("w", [b"1", b"2", b"3"])]
    stage.submit(b"waits")
    with pytest.raises(QueueFull):
        stage.submit(b"refused")


def test_a_model_with_job_tickets_takes_only_what_a_worker_is_idle_for() -> None:
    """The rest is refused at once."""
    stage = Stage(use_job_ticket=True)

    with pytest.raises(NoTicket):
        stage.submit(b"no worker yet")
    stage.open("a", "b")
    stage.submit_all([b"1", b"2"])
    with pytest.raises(NoTicket) as caught:
        stage.submit(b"3")

    assert caught.value.retry_after_s is not None
    stage.answer("a")
    assert stage.submit(b"4").end is None


def test_a_request_that_waits_to_be_run_again_has_the_next_job_ticket() -> None:
    """Its worker died; the worker that comes in its place is not promised to another."""
    stage = Stage(use_job_ticket=True)
    stage.open("w")
    again = stage.submit(b"again")
    stage.die("w")
    assert again.ends == []

    with pytest.raises(NoTicket):
        stage.submit(b"another")

    stage.open("x")
    stage.answer("x")
    assert again.body == b"again"
    assert stage.submit(b"another").ends == []


@pytest.mark.parametrize(
    ("run_s", "workers", "queued", "expected"),
    [(0.001, 1, 1, 1.0), (3.0, 1, 3, 12.0), (3.0, 2, 3, 6.0), (100.0, 1, 9, 60.0)],
)
def test_retry_after_is_how_long_the_queue_may_take(run_s: float, workers: int, queued: int, expected: float) -> None:
    """Whole seconds, from 1 to 60, shared among the workers."""
    stage = Stage(queue_size=100)
    keys = [f"w{number}" for number in range(workers)]
    for key in keys:  # each has been seen to take `run_s`
        stage.open(key)
        stage.submit(b"teach")
        stage.answer(key, run_s=run_s)
    stage.submit_all([b"x"] * (workers + queued))
    waiting = len(stage.dispatcher.queue)

    if run_s > 0.05:
        assert waiting == queued
        assert stage.dispatcher.retry_after_s(0.0) == expected
    else:  # one was sent ahead
        assert stage.dispatcher.retry_after_s(0.0) == 1.0


def test_retry_after_is_a_second_where_nothing_is_known() -> None:
    """No worker has answered yet."""
    assert Stage().dispatcher.retry_after_s(0.0) == 1.0


# ------------------------------------------------------------------------------------------- answers


def test_each_job_gets_its_own_result() -> None:
    """Status, reason and headers are those of its place in the batch."""
    stage = Stage(batch_size=3)
    clients = stage.submit_all([b"a", b"b", b"c"])
    stage.open("w")

    results = [OK, Result(201, "Made", [("x", "1")]), Result(503, "too large", [], "too_large")]
    stage.answer("w", results=results)

    assert clients[0].end == Answer(b"a")
    assert clients[1].end == Answer(b"b", 201, "Made", [("x", "1")])
    assert isinstance(clients[2].end, HandlerFailed)
    assert (clients[2].end.code, clients[2].end.message) == (None, "too large")


def test_an_item_that_ran_out_of_memory_is_told_so() -> None:
    """Its mates are not."""
    stage = Stage(batch_size=2)
    clients = stage.submit_all([b"a", b"b"])
    stage.open("w")

    stage.answer("w", results=[Result(507, "Out of resources", [], "memory"), OK])

    assert isinstance(clients[0].end, OutOfMemory)
    assert clients[1].body == b"b"


def test_an_item_that_the_worker_found_expired_is_past_its_deadline() -> None:
    """The worker looks once more just before it hands the batch to the handler."""
    stage = Stage()
    stage.open("w")
    client = stage.submit(b"a", deadline=5.0)

    stage.answer("w", now=4.999, results=[Result(504, "", [], "expired")])

    assert isinstance(client.end, DeadlinePassed)
    assert stage.metrics.expired == 1


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_wrong_number_of_results_is_a_bad_frame(count: int) -> None:
    """No honest worker says so; giving them out would cross answers."""
    stage = Stage(batch_size=2)
    clients = stage.submit_all([b"a", b"b"])
    stage.open("w")

    with pytest.raises(BadFrame, match="2 items"):
        stage.dispatcher.finished("w", 1, 0.1, [OK] * count, [b""] * count, 0.0)

    assert [client.end for client in clients] == [None, None]


def test_bodies_and_results_must_be_as_many() -> None:
    """A body too few would shift the answers."""
    stage = Stage(batch_size=2)
    stage.submit_all([b"a", b"b"])
    stage.open("w")

    with pytest.raises(BadFrame):
        stage.dispatcher.finished("w", 1, 0.1, [OK, OK], [b"a"], 0.0)


@pytest.mark.parametrize("number", [0, 2, 2**63])
def test_an_answer_to_a_batch_that_is_not_running_is_a_bad_frame(number: int) -> None:
    """Late, early, or made up: it is given to nobody."""
    stage = Stage()
    stage.open("w")
    client = stage.submit(b"a")

    with pytest.raises(BadFrame, match="not running"):
        stage.dispatcher.finished("w", number, 0.1, [OK], [b"crossed"], 0.0)
    with pytest.raises(BadFrame):
        stage.dispatcher.raised("w", Raised(number, 0.1, "handler", "", 503, ""), 0.0)
    with pytest.raises(BadFrame):
        stage.dispatcher.piece("w", number, [OK], [b"crossed"], 0.0)

    assert client.end is None
    assert client.pieces == []


def test_an_answer_from_an_unknown_worker_is_a_bad_frame() -> None:
    """As from one that has died meanwhile."""
    stage = Stage()

    with pytest.raises(BadFrame):
        stage.dispatcher.finished("nobody", 1, 0.1, [OK], [b""], 0.0)


@pytest.mark.parametrize("run_s", [math.nan, math.inf, -0.001])
def test_a_time_that_is_none_is_a_bad_frame(run_s: float) -> None:
    """One such number would spoil the means and histograms for good."""
    stage = Stage()
    stage.open("w")
    stage.submit(b"a")

    with pytest.raises(BadFrame, match="taken"):
        stage.dispatcher.finished("w", 1, run_s, [OK], [b""], 0.0)

    assert stage.metrics.handler_seconds.count == 0


# ------------------------------------------------------------------------------------------- deadlines


def test_a_deadline_in_the_queue_ends_the_job_unseen_by_any_worker() -> None:
    """It costs nothing but the place it had."""
    stage = Stage()
    client = stage.submit(b"late", deadline=1.0)

    assert stage.dispatcher.next_wake() == 1.0
    stage.dispatcher.pump(1.0)
    stage.open("w", now=1.1)

    assert isinstance(client.end, DeadlinePassed)
    assert client.end.where == "queue"
    assert stage.sent == []
    assert stage.dispatcher.is_empty


def test_a_job_past_its_deadline_is_dropped_before_a_batch_is_made() -> None:
    """Even when the clock was not looked at in between."""
    stage = Stage(batch_size=2)
    late, living = stage.submit(b"late", deadline=1.0), stage.submit(b"living")

    stage.open("w", now=2.0)

    assert isinstance(late.end, DeadlinePassed)
    assert stage.sent == [("w", [b"living"])]
    assert living.end is None


def test_a_deadline_while_it_runs_ends_the_job_and_its_answer_is_thrown_away() -> None:
    """The worker is told, and may say what it likes."""
    stage = Stage()
    stage.open("w")
    client = stage.submit(b"slow", deadline=1.0)

    stage.dispatcher.pump(1.0)
    stage.answer("w", now=1.5)

    assert isinstance(client.end, DeadlinePassed)
    assert client.end.where == "worker"
    assert stage.cancelled == [("w", 1, 0)]
    assert len(client.ends) == 1


def test_an_answer_that_comes_after_the_deadline_is_thrown_away() -> None:
    """Though the clock has not been looked at since."""
    stage = Stage()
    stage.open("w")
    client = stage.submit(b"slow", deadline=1.0)

    stage.answer("w", now=1.5)

    assert isinstance(client.end, DeadlinePassed)


def test_a_raised_batch_past_its_deadline_ends_once() -> None:
    """Deadline and failure meet in the same moment."""
    stage = Stage()
    stage.open("w")
    client = stage.submit(b"slow", deadline=1.0)

    stage.fail("w", now=1.5)

    assert isinstance(client.end, DeadlinePassed)


def test_a_dead_workers_job_past_its_deadline_ends_once() -> None:
    """Deadline and death meet in the same moment."""
    stage = Stage(retry_on_worker_death=False)
    stage.open("w")
    client = stage.submit(b"slow", deadline=1.0)

    stage.die("w", now=1.5)

    assert isinstance(client.end, DeadlinePassed)


def test_the_clients_own_limit_counts_from_its_arrival() -> None:
    """`clientTimeoutInMills`; an earlier deadline of the request wins."""
    stage = Stage(client_timeout_s=2.0)
    plain, earlier, later = (
        stage.submit(b"x", now=10.0),
        stage.submit(b"x", now=10.0, deadline=11.0),
        stage.submit(b"x", now=10.0, deadline=99.0),
    )

    assert [client.job.deadline for client in (plain, earlier, later)] == [12.0, 11.0, 12.0]


def test_a_job_that_waits_to_be_run_again_still_has_its_deadline() -> None:
    """A group is no place to hide."""
    stage = Stage()
    stage.open("w")
    client = stage.submit(b"x", deadline=5.0)
    stage.die("w", now=1.0)

    stage.dispatcher.pump(5.0)

    assert isinstance(client.end, DeadlinePassed)
    assert stage.dispatcher.is_empty


def test_a_job_that_runs_though_its_deadline_had_passed_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counter that stays at zero everywhere else counts where nothing looks at deadlines; in time is in time."""
    monkeypatch.setattr(Dispatcher, "_expire", lambda dispatcher, now: None)
    stage = Stage(batch_size=3, max_batch_delay_s=0.0)
    stage.submit(b"early", 0.0, deadline=1.0)
    stage.submit(b"at its end", 0.0, deadline=2.0)
    stage.submit(b"in time", 0.0, deadline=2.5)

    stage.open("a", now=2.0)
    stage.answer("a", now=3.0)

    assert stage.sent == [("a", [b"early", b"at its end", b"in time"])]
    assert stage.metrics.expired_run == 2


def test_a_job_whose_item_a_worker_left_out_was_not_run_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker saw its deadline and never ran it."""
    monkeypatch.setattr(Dispatcher, "_expire", lambda dispatcher, now: None)
    stage = Stage()
    stage.submit(b"early", 0.0, deadline=1.0)
    stage.open("a", now=2.0)

    stage.answer("a", now=3.0, results=[Result(504, "", [], error="expired")])

    assert stage.metrics.expired_run == 0


def test_ended_jobs_are_not_kept_until_their_deadline() -> None:
    """Requests that were answered long ago must not hold memory for an hour."""
    stage = Stage()
    stage.open("w")
    stage.submit(b"hangs", deadline=1e6)  # the oldest deadline, so none behind it is looked at
    stage.open("v")
    jobs = []
    for _ in range(2000):
        client = stage.submit(b"x", deadline=2e6)
        jobs.append(weakref.ref(client))
        stage.answer("v")
    del client
    gc.collect()

    assert sum(ref() is not None for ref in jobs) < 1000


# ------------------------------------------------------------------------------------------- cancels


def test_cancelling_a_waiting_job_takes_it_out() -> None:
    """No worker ever sees it."""
    stage = Stage()
    client = stage.submit(b"x")

    client.job.cancel()
    stage.open("w")

    assert stage.sent == []
    assert client.ends == []
    assert stage.metrics.cancelled == 1
    assert stage.all_ended_calls == 1


def test_cancelling_a_running_job_tells_its_worker_which_one() -> None:
    """And its answer is thrown away."""
    stage = Stage(batch_size=3)
    clients = stage.submit_all([b"a", b"b", b"c"])
    stage.open("w")

    clients[1].job.cancel()
    stage.answer("w")

    assert stage.cancelled == [("w", 1, 1)]
    assert [client.body for client in clients] == [b"a", None, b"c"]
    assert clients[1].ends == []


def test_cancelling_a_job_sent_ahead_tells_the_right_batch() -> None:
    """Two are with the worker."""
    stage = Stage()
    stage.open("w")
    stage.submit(b"teach")
    stage.answer("w")
    clients = stage.submit_all([b"1", b"2"])

    clients[1].job.cancel()

    assert stage.cancelled == [("w", 3, 0)]


def test_a_cancelled_job_keeps_the_only_worker_until_the_batch_that_runs_it_ends() -> None:
    """Jobs that wait or were sent ahead keep none; nor does any while another worker lives."""
    stage = Stage()
    stage.open("w")
    stage.submit(b"teach")
    stage.answer("w")
    runs, ahead, waits = (client.job for client in stage.submit_all([b"runs", b"ahead", b"waits"]))
    assert not runs.keeps_the_only_worker

    for job in (runs, ahead, waits):
        job.cancel()

    assert [job.keeps_the_only_worker for job in (runs, ahead, waits)] == [True, False, False]
    stage.dispatcher.living_slots = 2
    assert not runs.keeps_the_only_worker
    stage.dispatcher.living_slots = 1
    stage.answer("w")
    assert not runs.keeps_the_only_worker
    stage.answer("w")
    assert not any(job.keeps_the_only_worker for job in (runs, ahead, waits))
    again = stage.submit(b"again").job
    again.cancel()
    assert again.keeps_the_only_worker
    stage.die("w")
    assert not again.keeps_the_only_worker


def test_cancelling_a_job_that_waits_to_be_run_again_forgets_it() -> None:
    """Nothing is left of its group."""
    stage = Stage()
    stage.open("w")
    client = stage.submit(b"x")
    stage.die("w")
    assert stage.dispatcher.waiting == 1

    client.job.cancel()

    assert stage.dispatcher.waiting == 0
    assert stage.dispatcher.is_empty
    assert stage.all_ended_calls == 1
    assert client.ends == []


def test_cancelling_an_ended_job_does_nothing() -> None:
    """Surfaces cancel when a connection closes, whatever was answered on it."""
    stage = Stage()
    stage.open("w")
    client = stage.submit(b"x")
    stage.answer("w")

    client.job.cancel()

    assert client.job.state is JobState.DONE
    assert len(client.ends) == 1
    assert stage.metrics.cancelled == 0


def test_a_receiver_may_cancel_others_while_it_is_told() -> None:
    """One connection may carry many requests; when the first fails it may give up the rest."""
    stage = Stage()
    clients = stage.submit_all([b"1", b"2", b"3"])
    clients[0].on_error = lambda error: [client.job.cancel() for client in clients[1:]]  # type: ignore[method-assign,assignment]

    ended = stage.dispatcher.fail_waiting(Draining(), 0.0)

    assert ended == 3
    assert [client.ends for client in clients[1:]] == [[], []]
    assert len(stage.dispatcher.queue) == 0
    assert stage.dispatcher.is_empty


def test_all_that_was_accepted_can_be_refused_and_is_told_apart() -> None:
    """A server that ends names what it gives up: what waits, what runs, and streams that are cut; the oldest first."""
    stage = Stage()
    stage.open("a", "b")
    stream = stage.submit(b"stream", now=1.0)
    stage.dispatcher.piece("b", 1, [OK], [b"x"], 1.5)
    runs = stage.submit(b"runs", now=2.0)
    waits = stage.submit(b"waits", now=3.0)

    given_up = stage.dispatcher.refuse_accepted(Draining(), 5.0)

    assert given_up == [GivenUp("r0", "stream", 4.0), GivenUp("r1", "running", 3.0), GivenUp("r2", "waiting", 2.0)]
    assert all(isinstance(client.end, Draining) for client in (stream, runs, waits))
    assert sorted(stage.cancelled) == [("a", 1, 0), ("b", 1, 0)]
    assert stage.metrics.errors["draining"] == 3
    stage.answer("a", 6.0)  # too late: nobody hears of it
    assert isinstance(runs.end, Draining)
    assert stage.dispatcher.refuse_accepted(Draining(), 7.0) == []


def test_who_is_refused_may_cancel_others_that_are_to_be_refused() -> None:
    """They were given up by their client, not by the server."""
    stage = Stage()
    stage.open("a", "b")
    clients = stage.submit_all([b"1", b"2", b"3"])
    clients[2].on_error = lambda error: [client.job.cancel() for client in clients[:2]]  # type: ignore[method-assign,assignment]

    given_up = stage.dispatcher.refuse_accepted(Draining(), 0.0)

    assert [one.request_id for one in given_up] == ["r2"]
    assert [client.ends for client in clients[:2]] == [[], []]


def test_a_receiver_may_cancel_others_of_a_dead_worker_while_it_is_told() -> None:
    """As above, for jobs that ran together."""
    stage = Stage(batch_size=3, retry_on_worker_death=False)
    clients = stage.submit_all([b"1", b"2", b"3"])
    clients[0].on_error = lambda error: [client.job.cancel() for client in clients[1:]]  # type: ignore[method-assign,assignment]
    stage.open("w")

    stage.die("w")

    assert [client.ends for client in clients[1:]] == [[], []]


def test_a_receiver_may_send_the_next_request_while_it_is_told() -> None:
    """A pipelined connection does."""
    stage = Stage()
    stage.open("w")
    client = stage.submit(b"1")
    following: list[Client] = []
    client.on_answer = lambda answer: following.append(stage.submit(b"2"))  # type: ignore[method-assign]

    stage.answer("w")
    stage.answer("w")

    assert following[0].body == b"2"


# ------------------------------------------------------------------------------------------- a batch that raises


@pytest.mark.parametrize(
    "guilty",
    [{0}, {7}, {15}, {0, 15}, {6, 7}, {3, 4, 11}, set(range(16)), set(range(8))],
    ids=["first", "middle", "last", "both ends", "neighbours", "three", "all", "half"],
)
def test_a_batch_that_raises_is_split_until_the_guilty_stand_alone(guilty: set[int]) -> None:
    """Their mates succeed."""
    stage = Stage(batch_size=16)
    bodies = [b"%d" % number for number in range(16)]
    clients = stage.submit_all(bodies)

    stage.open("w")
    stage.run_until_empty({bodies[number] for number in guilty})

    for number, client in enumerate(clients):
        if number in guilty:
            assert isinstance(client.end, HandlerFailed)
            assert client.end.thrown is not None
            assert client.end.thrown.traceback == "trace"
        else:
            assert client.body == bodies[number]
    assert stage.dispatcher.is_empty
    assert stage.metrics.isolated <= 15


def test_finding_one_bad_item_of_sixteen_takes_four_splits() -> None:
    """Halving, and the innocent half is run once."""
    stage = Stage(batch_size=16)
    stage.submit_all([b"%d" % number for number in range(16)])
    stage.open("w")

    stage.run_until_empty({b"5"})

    assert [len(bodies) for _, bodies in stage.sent] == [16, 8, 4, 4, 2, 1, 1, 2, 8]
    assert stage.metrics.isolated == 4


def test_halves_keep_the_order_of_the_batch() -> None:
    """The older half goes first."""
    stage = Stage(batch_size=4)
    stage.submit_all([b"1", b"2", b"3", b"4"])
    stage.open("w")

    stage.fail("w")
    stage.answer("w")

    assert [bodies for _, bodies in stage.sent] == [[b"1", b"2", b"3", b"4"], [b"1", b"2"], [b"3", b"4"]]


def test_halves_go_before_what_came_later() -> None:
    """They have waited longest."""
    stage = Stage(batch_size=2)
    stage.submit_all([b"1", b"2", b"later"])
    stage.open("w")

    stage.fail("w")

    assert stage.sent[1] == ("w", [b"1"])


def test_without_isolation_the_whole_batch_fails() -> None:
    """`batchIsolation: false`: the handler has side effects and must not see an item twice."""
    stage = Stage(batch_size=4, batch_isolation=False)
    clients = stage.submit_all([b"1", b"2", b"3", b"4"])
    stage.open("w")

    failed = stage.fail("w")

    assert [job.request.id for job in failed] == [client.job.request.id for client in clients]
    assert all(isinstance(client.end, HandlerFailed) for client in clients)
    assert len(stage.sent) == 1


def test_the_one_who_stayed_is_run_again_though_its_mates_have_left() -> None:
    """One of those who left may have been the guilty one."""
    stage = Stage(batch_size=2)
    clients = stage.submit_all([b"guilty", b"innocent"])
    stage.open("w")
    clients[0].job.cancel()

    stage.fail("w")
    stage.answer("w")

    assert clients[1].body == b"innocent"


def test_a_raised_batch_of_which_everybody_left_is_done() -> None:
    """Nothing is run again for nobody."""
    stage = Stage(batch_size=2)
    clients = stage.submit_all([b"1", b"2"])
    stage.open("w")
    for client in clients:
        client.job.cancel()

    assert stage.fail("w") == []
    assert stage.dispatcher.is_empty


@pytest.mark.parametrize(("kind", "expected"), [("memory", OutOfMemory), ("prediction", HandlerFailed)])
def test_a_batch_of_one_that_raises_fails_with_what_it_raised(kind: str, expected: type[MarserveError]) -> None:
    """The author's status and message, or that memory ran out."""
    stage = Stage()
    stage.open("w")
    client = stage.submit(b"x")

    failed = stage.fail("w", kind=kind, code=422)

    assert failed == [client.job]
    assert type(client.end) is expected
    if isinstance(client.end, HandlerFailed):
        assert (client.end.code, client.end.message) == (422, "Prediction failed")


def test_other_workers_help_with_the_halves() -> None:
    """They are ordinary work."""
    stage = Stage(batch_size=2)
    clients = stage.submit_all([b"1", b"2"])
    stage.open("a")
    stage.open("b")

    stage.fail("a")

    assert {key for key, _ in stage.sent[1:]} == {"a", "b"}
    stage.answer("a")
    stage.answer("b")
    assert [client.body for client in clients] == [b"1", b"2"]


# ------------------------------------------------------------------------------------------- a worker that dies


def test_the_items_of_a_dead_worker_are_run_once_more_each_by_itself() -> None:
    """So that a deadly one takes nobody along the second time."""
    stage = Stage(batch_size=3)
    clients = stage.submit_all([b"1", b"2", b"3"])
    stage.open("a")

    stage.die("a")
    for number in range(3):
        stage.open(f"b{number}")
    for number in range(3):
        stage.answer(f"b{number}")

    assert sorted(bodies for _, bodies in stage.sent[1:]) == [[b"1"], [b"2"], [b"3"]]
    assert [client.body for client in clients] == [b"1", b"2", b"3"]
    assert stage.metrics.retried == 3


def test_a_batch_that_was_not_begun_goes_back_to_the_queue_as_it_was() -> None:
    """Its items are no suspects: they may share a batch again."""
    stage = Stage(batch_size=2)
    stage.open("a")
    stage.submit_all([b"teach"])
    stage.answer("a")
    clients = stage.submit_all([b"running", b"2", b"3"])
    assert stage.sent[-1] == ("a", [b"2", b"3"])
    later = stage.submit(b"later")

    stage.die("a", begun=2)
    stage.open("b")
    stage.answer("b")

    assert [bodies for _, bodies in stage.sent[3:]] == [[b"running"], [b"2", b"3"]]
    stage.answer("b")
    stage.answer("b")
    assert [client.body for client in (*clients, later)] == [b"running", b"2", b"3", b"later"]
    assert clients[1].job.deaths == 0


def test_a_worker_that_died_before_it_began_costs_its_items_nothing() -> None:
    """They may still survive one death."""
    stage = Stage()
    stage.open("a")
    client = stage.submit(b"x")

    stage.die("a", begun=0)
    stage.open("b")
    stage.die("b")
    stage.open("c")
    stage.answer("c")

    assert client.body == b"x"


def test_a_second_death_ends_the_job_and_its_body_is_refused_for_a_while() -> None:
    """A deadly item costs at most two workers."""
    stage = Stage()
    stage.open("a", "b")
    client = stage.submit(b"poison", now=10.0)

    for _ in range(2):
        stage.die(next(iter(stage.flights)), now=10.0, cause="signal")

    assert isinstance(client.end, WorkerDied)
    assert (client.end.message, client.end.cause) == ("Worker died.", "signal")
    with pytest.raises(FingerprintRefused) as caught:
        stage.submit(b"poison", now=69.5)
    assert caught.value.retry_after_s == 1.0
    assert stage.submit(b"other", now=69.5).end is None


def test_after_a_minute_the_body_is_allowed_again() -> None:
    """The model may have been mended meanwhile."""
    stage = Stage()
    stage.open("a", "b")
    stage.submit(b"poison")
    for _ in range(2):
        stage.die(next(iter(stage.flights)))

    assert stage.submit(b"poison", now=60.0).end is None


def test_the_mates_of_a_poison_survive_it() -> None:
    """C4: one of sixteen kills its worker twice; fifteen are answered."""
    stage = Stage(batch_size=16)
    bodies = [b"%d" % number for number in range(16)]
    clients = stage.submit_all(bodies)
    workers = (f"w{number}" for number in itertools.count())
    deaths = 0

    stage.open(next(workers))
    while stage.flights:
        key = next(iter(stage.flights))
        if not stage.flights[key]:
            del stage.flights[key]
        elif b"5" in bodies_of(stage.flights[key][0]):
            stage.die(key)
            stage.open(next(workers))
            deaths += 1
        else:
            stage.answer(key)

    assert deaths == 2
    assert isinstance(clients[5].end, WorkerDied)
    assert [client.body for client in clients if client is not clients[5]] == [*bodies[:5], *bodies[6:]]


def test_with_retry_off_a_death_ends_what_was_begun() -> None:
    """`retryOnWorkerDeath: false`: at most those in flight fail, and their bodies are not refused."""
    stage = Stage(retry_on_worker_death=False)
    stage.open("a")
    stage.submit(b"teach")
    stage.answer("a")
    begun, ahead = stage.submit_all([b"begun", b"ahead"])
    assert stage.sent[-1] == ("a", [b"ahead"])

    stage.die("a")
    stage.open("b")
    stage.answer("b")

    assert isinstance(begun.end, WorkerDied)
    assert ahead.body == b"ahead"
    assert stage.submit(b"begun").end is None


def test_a_time_out_is_never_run_again() -> None:
    """The next worker would only hang, too."""
    stage = Stage()
    stage.open("a")
    stage.submit(b"teach")
    stage.answer("a")
    hanging, ahead = stage.submit_all([b"hangs", b"ahead"])

    stage.die("a", may_retry=False, cause="response_timeout")
    stage.open("b")
    stage.answer("b")

    assert isinstance(hanging.end, WorkerDied)
    assert hanging.end.cause == "response_timeout"
    assert ahead.body == b"ahead"


def test_a_worker_that_never_began_its_batch_in_time_ends_it_too() -> None:
    """Its client has waited for the whole limit; running it again might go on for ever."""
    stage = Stage()
    stage.open("a")
    client = stage.submit(b"x")

    stage.die("a", begun=0, may_retry=False, cause="response_timeout")

    assert isinstance(client.end, WorkerDied)


def test_a_worker_that_may_not_have_told_what_it_began_gets_its_batch_once_more_and_no_further_time() -> None:
    """A program in another language, say, that dies of a request before it has written its page."""
    stage = Stage()
    for key in ("a", "b", "c"):
        stage.open(key)
    client = stage.submit(b"x")

    killed = []
    while client.end is None:
        [key] = [key for key, flights in stage.flights.items() if flights]
        killed.append(key)
        stage.die(key, begun=0, began_oldest=True, cause="bad_frame")

    assert len(killed) == 2
    assert isinstance(client.end, WorkerDied)


def test_a_cancelled_job_is_not_run_again() -> None:
    """Its client has gone."""
    stage = Stage()
    stage.open("a")
    client = stage.submit(b"x")
    client.job.cancel()

    stage.die("a")
    stage.open("b")

    assert len(stage.sent) == 1
    assert client.ends == []


def test_an_idle_workers_death_changes_nothing() -> None:
    """It had nothing; the next request goes elsewhere."""
    stage = Stage()
    stage.open("a", "b")

    stage.die("b")
    stage.submit(b"x")

    assert stage.sent == [("a", [b"x"])]


def test_a_death_told_twice_counts_once() -> None:
    """The second has nothing to say."""
    stage = Stage()
    stage.open("a")
    client = stage.submit(b"x")

    stage.die("a")
    stage.die("a")

    assert client.job.deaths == 1


# ------------------------------------------------------------------------------------------- streams


def test_pieces_go_out_in_order_and_the_answer_is_the_last_one() -> None:
    """Only then has the stream ended."""
    stage = Stage()
    stage.open("w")
    client = stage.submit(b"last")

    for body in (b"first", b"second"):
        stage.dispatcher.piece("w", 1, [OK], [body], 0.0)
    running = list(client.ends)
    stage.answer("w")

    assert running == []
    assert [piece.body for piece in client.pieces] == [b"first", b"second", b"last"]
    assert client.body == b"last"


def test_the_first_piece_is_timed_from_the_arrival_and_each_further_one_from_the_piece_before() -> None:
    """The end of the stream is its last piece; an answer in one has none."""
    stage = Stage()
    stage.open("w")
    stage.submit(b"streamed")
    for now in (0.25, 0.5):
        stage.dispatcher.piece("w", 1, [OK], [b"x"], now)
    stage.answer("w", 2.5)
    stage.submit(b"whole", 3.0)
    stage.answer("w", 3.5)

    stages = stage.dispatcher.metrics.stages.by_stage
    assert (sum(stages["first_chunk"].buckets), stages["first_chunk"].sum) == (1, 0.25)
    assert (sum(stages["next_chunk"].buckets), stages["next_chunk"].sum) == (2, 2.25)


def test_the_steps_of_continuous_batching_are_timed_as_pieces() -> None:
    """Each step that goes on is one, and so is the last."""
    stage = Stage(continuous_batching=True)
    stage.open("w")
    stage.submit(b"streamed")
    goes_on = Result(200, "OK", [(STREAM_HEADER, "true")])

    stage.answer("w", 0.25, results=[goes_on])
    stage.answer("w", 0.75, results=[goes_on])
    stage.answer("w", 1.75)

    stages = stage.dispatcher.metrics.stages.by_stage
    assert (sum(stages["first_chunk"].buckets), stages["first_chunk"].sum) == (1, 0.25)
    assert (sum(stages["next_chunk"].buckets), stages["next_chunk"].sum) == (2, 1.5)


def test_a_stream_is_never_run_again_after_a_death() -> None:
    """Bytes of an answer have gone out."""
    stage = Stage(batch_size=2)
    clients = stage.submit_all([b"1", b"2"])
    stage.open("a")
    stage.dispatcher.piece("a", 1, [OK, OK], [b"x", b"y"], 0.0)

    stage.die("a")
    stage.open("b")

    assert all(isinstance(client.end, WorkerDied) for client in clients)
    assert len(stage.sent) == 1


def test_a_stream_that_raises_is_not_split() -> None:
    """All its items have begun to answer."""
    stage = Stage(batch_size=2)
    clients = stage.submit_all([b"1", b"2"])
    stage.open("a")
    stage.dispatcher.piece("a", 1, [OK, OK], [b"x", b"y"], 0.0)

    stage.fail("a")

    assert all(isinstance(client.end, HandlerFailed) for client in clients)
    assert len(stage.sent) == 1


@pytest.mark.parametrize("is_last", [True, False])
def test_what_was_raised_goes_on_with_the_last_event_of_a_failed_stream(is_last: bool) -> None:
    """At the end of its batch, or before, where mates go on; the surface decides who sees it."""
    thrown = Thrown("ValueError", "no", "trace")
    failed = Result(200, "", [], None, thrown)
    stage = Stage(batch_size=1)
    client = stage.submit(b"1")
    stage.open("w")

    stage.dispatcher.piece("w", 1, [OK], [b"first"], 0.0)
    if is_last:
        stage.dispatcher.finished("w", 1, 0.1, [failed], [b"error"], 1.0)
    else:
        stage.dispatcher.piece("w", 1, [failed], [b"error"], 0.0)

    assert [(piece.body, piece.thrown) for piece in client.pieces] == [(b"first", None), (b"error", thrown)]
    if not is_last:
        stage.answer("w")
    assert (dict(stage.metrics.answers), dict(stage.metrics.errors)) == ({}, {"handler": 1})


def test_a_cancelled_stream_gets_no_more_pieces() -> None:
    """Its mates do."""
    stage = Stage(batch_size=2)
    gone, staying = stage.submit_all([b"1", b"2"])
    stage.open("w")
    stage.dispatcher.piece("w", 1, [OK, OK], [b"a", b"b"], 0.0)

    gone.job.cancel()
    stage.dispatcher.piece("w", 1, [OK, OK], [b"c", b"d"], 0.0)

    assert [piece.body for piece in gone.pieces] == [b"a"]
    assert [piece.body for piece in staying.pieces] == [b"b", b"d"]


def test_an_item_whose_piece_is_an_error_ends_alone() -> None:
    """It is no piece of an answer: what the client must hear is the error."""
    stage = Stage(batch_size=3)
    large, late, fine = stage.submit_all([b"1", b"2", b"3"])
    stage.open("w")

    results = [Result(503, "too large", [], "too_large"), Result(504, "", [], "expired"), OK]
    stage.dispatcher.piece("w", 1, results, [b"", b"", b"x"], 0.0)
    stage.answer("w")

    assert isinstance(large.end, HandlerFailed)
    assert isinstance(late.end, DeadlinePassed)
    assert (large.pieces, late.pieces) == ([], [])
    assert fine.body == b"3"
    assert stage.cancelled == [("w", 1, 0), ("w", 1, 1)]


def test_a_wrong_number_of_pieces_is_a_bad_frame() -> None:
    """As with results."""
    stage = Stage(batch_size=2)
    stage.submit_all([b"1", b"2"])
    stage.open("w")

    with pytest.raises(BadFrame, match="a piece of it 1"):
        stage.dispatcher.piece("w", 1, [OK], [b"x"], 0.0)


# ------------------------------------------------------------------------------------------- workers come and go


def test_a_closed_lane_gets_nothing_more_and_tells_when_it_is_done() -> None:
    """Scaling down while a batch runs loses nothing."""
    stage = Stage()
    stage.open("old")
    first = stage.submit(b"1")

    was_idle = stage.dispatcher.close_lane("old")
    second = stage.submit(b"2")
    told_early = list(stage.emptied)
    stage.answer("old")
    stage.open("new")
    stage.answer("new")

    assert not was_idle
    assert told_early == []
    assert stage.emptied == ["old"]
    assert (first.body, second.body) == (b"1", b"2")


def test_closing_an_idle_lane_is_done_at_once() -> None:
    """And closing one that is not there."""
    stage = Stage()
    stage.open("w")

    assert stage.dispatcher.close_lane("w")
    assert stage.dispatcher.close_lane("w")
    stage.submit(b"x")
    assert stage.sent == []


def test_a_closed_lane_ends_what_was_sent_ahead_first() -> None:
    """It was promised to this worker."""
    stage = Stage()
    stage.open("w")
    stage.submit(b"teach")
    stage.answer("w")
    clients = stage.submit_all([b"1", b"2"])

    stage.dispatcher.close_lane("w")
    stage.answer("w")
    between = list(stage.emptied)
    stage.answer("w")

    assert between == []
    assert stage.emptied == ["w"]
    assert [client.body for client in clients] == [b"1", b"2"]


def test_halves_of_a_closed_lanes_batch_end_when_no_worker_is_left() -> None:
    """Scaled to nothing while a batch raises: nobody could ever run them."""
    stage = Stage(batch_size=2)
    clients = stage.submit_all([b"1", b"2"])
    stage.open("w")
    stage.dispatcher.close_lane("w")
    stage.dispatcher.living_slots = 0

    stage.fail("w")

    assert all(isinstance(client.end, NoWorker) for client in clients)
    assert stage.dispatcher.is_empty


def test_items_of_a_dead_worker_end_when_no_worker_is_left() -> None:
    """As above, when it dies."""
    stage = Stage()
    client = stage.submit(b"x")
    stage.open("w")
    stage.dispatcher.close_lane("w")
    stage.dispatcher.living_slots = 0

    stage.die("w")

    assert isinstance(client.end, NoWorker)


def test_a_draining_pool_tells_the_stranded_that_it_drains() -> None:
    """Scaling more workers would not help them."""
    stage = Stage()
    client = stage.submit(b"x")
    stage.dispatcher.is_draining = True
    stage.dispatcher.living_slots = 0

    assert stage.dispatcher.fail_stranded(0.0) == 1

    assert isinstance(client.end, Draining)


def test_who_can_still_be_served_is_not_stranded() -> None:
    """A slot that lives will have a worker again."""
    stage = Stage()
    client = stage.submit(b"x")

    assert stage.dispatcher.fail_stranded(0.0) == 0
    assert client.end is None


def test_failing_what_waits_leaves_what_runs() -> None:
    """Jobs that are to be run again count as waiting."""
    stage = Stage(batch_size=2)
    stage.submit_all([b"1", b"2"])
    stage.open("w")
    stage.die("w")
    stage.open("v")
    waiting = stage.submit(b"3")
    assert stage.dispatcher.waiting == 2

    ended = stage.dispatcher.fail_waiting(Draining(), 1.0)
    stage.answer("v")

    assert ended == 2
    assert isinstance(waiting.end, Draining)
    assert stage.sent[1] == ("v", [b"1"])
    assert stage.dispatcher.is_empty


def test_running_and_waiting_count_what_is_where() -> None:
    """For describe, for metrics, for the drain."""
    stage = Stage(batch_size=2)
    stage.open("w")

    stage.submit_all([b"1", b"2", b"3"])

    assert (stage.dispatcher.running, stage.dispatcher.waiting) == (1, 2)
    assert [bodies_of(flight) for flight in stage.dispatcher.flights("w")] == [[b"1"]]
    assert stage.dispatcher.flights("nobody") == ()
    assert not stage.dispatcher.is_empty


# ------------------------------------------------------------------------------------------- counting


def test_everything_that_happens_is_counted() -> None:
    """Plain numbers that are rendered when somebody scrapes."""
    stage = Stage(batch_size=2)
    metrics = stage.metrics
    stage.submit_all([b"1", b"2"], now=0.0)
    stage.open("w", now=1.0)
    stage.answer("w", now=3.0, run_s=1.5, results=[OK, Result(418, "", [])])
    stage.submit(b"3", now=4.0)
    stage.fail("w", now=5.0)

    assert metrics.requests == 3
    assert dict(metrics.answers) == {200: 1, 418: 1}
    assert dict(metrics.errors) == {"handler": 1}
    assert (metrics.queue_seconds.count, metrics.queue_seconds.sum) == (3, 2.0)
    assert (metrics.handler_seconds.count, metrics.handler_seconds.sum) == (3, pytest.approx(3.001))
    assert (metrics.total_seconds.count, metrics.total_seconds.sum) == (3, 7.0)
    assert (metrics.batch_sizes.count, metrics.batch_sizes.sum) == (2, 3)


def test_a_batch_leaves_when_its_oldest_job_has_waited_long_enough() -> None:
    """The fixed policy, by way of the dispatcher's own clock."""
    stage = Stage(batch_size=4, batch_policy="fixed", max_batch_delay_s=0.1)
    stage.open("w", now=0.0)
    stage.submit(b"1", now=1.0)

    wake = stage.dispatcher.next_wake()
    stage.dispatcher.pump(1.05)
    early = list(stage.sent)
    stage.dispatcher.pump(1.1)

    assert wake == 1.1
    assert early == []
    assert stage.sent == [("w", [b"1"])]


def test_a_cancel_that_empties_the_queue_ends_the_collecting() -> None:
    """The next request waits for its own delay, not for the rest of another's."""
    stage = Stage(batch_size=4, batch_policy="fixed", max_batch_delay_s=0.1)
    stage.open("w")
    stage.submit(b"gone", now=1.0).job.cancel()

    stage.submit(b"next", now=1.09)
    stage.dispatcher.pump(1.1)

    assert stage.sent == []
    assert stage.dispatcher.next_wake() == pytest.approx(1.19)


def test_nothing_to_do_is_no_reason_to_wake() -> None:
    """An idle pool sleeps."""
    stage = Stage()
    stage.open("w")

    assert stage.dispatcher.next_wake() is None


def test_a_describe_request_runs_alone() -> None:
    """Though a batch had room for it."""
    stage = Stage(batch_size=4)
    stage.submit(b"1")
    stage.submit(b"?", describe=True)
    stage.submit(b"2")

    stage.open("w")
    stage.answer("w", run_s=1.0)
    stage.answer("w", run_s=1.0)

    assert [bodies for _, bodies in stage.sent] == [[b"1"], [b"?"], [b"2"]]


# ---------------------------------------------------------------------------------------------- single events


def test_who_wants_single_events_is_told_of_each_batch() -> None:
    """When it left the queue, how long it ran, when its requests were answered: once each, in seconds."""
    stage = Stage(batch_size=2)
    events: list[Event] = []
    stage.metrics.tap = Tap("m", "1", events.append)
    stage.submit_all([b"a", b"b"], now=1.0)
    stage.open("w", now=1.5)

    stage.answer("w", now=1.75, run_s=0.125)

    assert events == [
        Queued("m", "1", [0.5, 0.5], []),
        Ran("m", ["r0", "r1"], 0.125, 0.125),
        Answered("m", "1", [0.75, 0.75], []),
    ]


def test_who_wants_single_events_is_told_of_failures_and_of_named_versions() -> None:
    """A request that failed was answered, too."""
    stage = Stage()
    events: list[Event] = []
    stage.metrics.tap = Tap("m", "1", events.append)
    client = Client()
    client.job = stage.dispatcher.submit(Request("r", [Part("body", b"x")], names_version=True), client, 1.0)
    stage.open("w", now=1.5)

    stage.fail("w", now=2.0)

    assert [event for event in events if not isinstance(event, Ran)] == [
        Queued("m", "1", [0.5], [0.5]),
        Answered("m", "1", [1.0], [1.0]),
    ]
    assert stage.metrics.named_total_s == 1.0


# ------------------------------------------------------------------------------------------- many workers


@pytest.mark.parametrize("run_s", [1e-4, 0.02, 0.1])
@pytest.mark.parametrize("batch", [1, 4])
def test_no_request_costs_a_look_at_every_worker(run_s: float, batch: int) -> None:
    """Neither its coming nor the guess of its wait, its refusal, its batch, its answer or its client's leaving."""
    stage = Stage(batch_size=batch, queue_size=60, max_batch_delay_s=0.0)
    keys = [str(number) for number in range(10)]
    stage.open(*keys)
    stage.submit_all([b"x"] * (10 + 12 * batch))
    for key in keys:
        for _ in stage.flights[key][:]:
            stage.answer(key, 0.2, run_s=run_s)
    with contextlib.suppress(QueueFull):  # the first that finds all busy has the order kept in which they come free
        for _ in range(400):
            stage.submit(b"x", 0.3, deadline=9e9)
    stage.dispatcher.lanes.by_key = Blind(stage.dispatcher.lanes.by_key)

    refused = 0
    for number in range(400):
        now = 0.3 + number / 100
        try:
            client = stage.submit(b"x", now, deadline=9e9 if number % 2 else None)
        except QueueFull:
            refused += 1
        else:
            if number % 5 == 0:
                stage.dispatcher.cancel(client.job)
        stage.dispatcher.next_wake()
        if number % 4:
            busy = next(key for key in keys[number % 10 :] + keys if stage.flights[key])
            stage.answer(busy, now, run_s=run_s)

    assert len(stage.sent) > 100
    assert refused > 0
