"""What the dispatcher counts, and how it decides by what it counted: figures, batches ahead, lengths it asks for."""

from __future__ import annotations

import math
from typing import Any

import pytest

from marserve.errors import BadFrame, NoWorker, WorkerDied
from marserve.messages import Part, Request, Result
from marserve.pool.dispatch.batcher import PRIORITIES_SEEN_S
from marserve.pool.dispatch.dispatcher import Dispatcher
from marserve.pool.dispatch.jobs import Landed, Question
from marserve.pool.options import PoolOptions
from marserve.telemetry.metrics.counts import VersionMetrics
from marserve.telemetry.metrics.measurements import Event, Ran, Tap
from support.mode_stage import LAST, ModeStage
from support.receivers import Told


class Stage(ModeStage):
    """A plain dispatcher, and the questions that it has put."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        assert type(self.dispatcher) is Dispatcher
        self.questions: list[tuple[str, Question]] = []
        self.sent_when_asked: list[int] = []

    def ask_lengths(self, key: str, question: Question) -> None:
        """A worker is asked for lengths."""
        self.questions.append((key, question))
        self.sent_when_asked.append(len(self.flights.get(key, [])))

    def teach(self, key: str, run_s: float, now: float = 0.0) -> None:
        """A worker's batches take so long."""
        self.submit("teach", now)
        self.done(key, now, run_s)

    def done(self, key: str, now: float, run_s: float) -> None:
        """A worker echoes its oldest flight after so long."""
        flight = self.flights[key].pop(0)
        bodies = [job.request.parts[0].body for job in flight.jobs]
        self.dispatcher.finished(key, flight.number, run_s, [LAST] * len(bodies), bodies, now)

    def in_flight(self, key: str) -> int:
        """How many batches a worker has."""
        return len(self.dispatcher.flights(key))


# ------------------------------------------------------------------------------------------- ahead


@pytest.mark.parametrize(("run_s", "ahead"), [(0.049, 1), (0.05, 0), (0.051, 0)])
def test_batches_go_ahead_only_to_workers_whose_batches_take_less_than_50_ms(run_s: float, ahead: int) -> None:
    """To slower ones the way there is nothing."""
    stage = Stage(batch_size=1)
    stage.open("w")
    stage.teach("w", run_s)

    for body in ("1", "2"):
        stage.submit(body)

    assert stage.in_flight("w") == 1 + ahead


@pytest.mark.parametrize(("run_s", "ahead"), [(0.0009, 1), (0.0011, 0), (0.02, 0)])
def test_for_a_while_after_an_urgent_request_less_goes_ahead(run_s: float, ahead: int) -> None:
    """What was sent cannot be overtaken: only batches below a millisecond go ahead, and ten seconds later all again."""
    stage = Stage(batch_size=1)
    stage.open("w")
    stage.teach("w", run_s)
    stage.submit("urgent", 1.0, priority=0)
    stage.done("w", 1.0, run_s)
    later = 1.0 + PRIORITIES_SEEN_S

    for body in ("1", "2"):
        stage.submit(body, later - 0.001)
    assert stage.in_flight("w") == 1 + ahead

    stage.dispatcher.pump(later)
    assert stage.in_flight("w") == 2


def test_a_request_of_the_models_own_priority_changes_nothing_for_the_others() -> None:
    """Saying the default is saying nothing."""
    stage = Stage(batch_size=1, default_priority=3)
    stage.open("w")
    stage.teach("w", 0.02)
    stage.submit("plain", 1.0, priority=3)
    stage.done("w", 1.0, 0.02)

    for body in ("1", "2"):
        stage.submit(body, 2.0)

    assert stage.in_flight("w") == 2


@pytest.mark.parametrize(("run_s", "ahead"), [(0.004, 1), (0.006, 0)])
def test_with_a_goal_batches_go_ahead_only_below_5_ms(run_s: float, ahead: int) -> None:
    """What is sent to one worker cannot leave for another that is free sooner."""
    stage = Stage(batch_size=1, batch_policy="goal", latency_goal_s=10.0)
    stage.open("w")
    stage.teach("w", run_s)

    for body in ("1", "2"):
        stage.submit(body)

    assert stage.in_flight("w") == 1 + ahead


# ------------------------------------------------------------------------------------------- figures


def test_what_is_where_is_counted() -> None:
    """Waiting, to be run again, running; busy workers, and one to spare."""
    stage = Stage(batch_size=2)
    dispatcher = stage.dispatcher
    assert not dispatcher.has_spare_lane
    stage.open("a", "b")
    assert dispatcher.has_spare_lane
    assert dispatcher.oldest_wait_s(5.0) == 0.0

    for index in range(3):
        stage.submit(str(index), float(index))
    stage.submit("3", 3.0)
    waits = (dispatcher.waiting, dispatcher.running, dispatcher.busy_lanes)
    stage.submit("4", 4.0)

    assert waits == (2, 2, 2)
    assert dispatcher.oldest_wait_s(5.0) == 3.0
    assert dispatcher.oldest_wait_s(1.0) == 0.0
    assert not dispatcher.has_spare_lane
    assert not dispatcher.is_empty
    stage.flights.pop("a", None)
    dispatcher.died("a", 1, WorkerDied("killed"), may_retry=True, now=6.0)
    assert (dispatcher.waiting, dispatcher.running, dispatcher.busy_lanes) == (4, 1, 1)


def test_the_mean_run_is_over_the_workers_that_had_one() -> None:
    """A fifth of each new batch counts; a worker that goes takes its own along."""
    stage = Stage(batch_size=1)
    assert stage.dispatcher.mean_batch_s == 0.0
    stage.open("a")
    stage.teach("a", 1.0)
    stage.teach("a", 2.0)
    assert stage.dispatcher.mean_batch_s == pytest.approx(1.2)
    assert stage.metrics.busy_seconds == 3.0

    stage.open("b")
    assert stage.dispatcher.mean_batch_s == pytest.approx(1.2)
    stage.teach("b", 3.0)
    assert stage.dispatcher.mean_batch_s == pytest.approx(2.1)

    assert stage.dispatcher.close_lane("a")
    assert stage.dispatcher.mean_batch_s == 3.0
    assert stage.dispatcher.close_lane("b")
    assert stage.dispatcher.mean_batch_s == 0.0


def test_requests_that_name_their_version_or_come_from_within_are_counted_apart() -> None:
    """For the versions' shares, and for what workflows cause."""
    stage = Stage(batch_size=1)
    stage.open("w")
    stage.submit("plain", 1.0)
    stage.submit("named", 1.0, names_version=True)
    stage.submit("inner", 1.0, is_inner=True)
    for now in (2.0, 4.0, 8.0):
        stage.done("w", now, 0.5)

    metrics = stage.metrics
    assert (metrics.requests, metrics.named_requests, metrics.inner_requests) == (3, 1, 1)
    assert metrics.named_queue_s == 1.0
    assert metrics.named_total_s == 3.0


def test_a_named_request_that_fails_took_its_time_too() -> None:
    """Also one that never reached a worker."""
    stage = Stage()
    stage.submit("named", 1.0, names_version=True)
    stage.submit("plain", 1.0)

    assert stage.dispatcher.fail_waiting(WorkerDied("killed"), 4.0) == 2

    assert stage.metrics.named_total_s == 3.0
    assert stage.metrics.errors["killed"] + stage.metrics.errors["worker_died"] == 2


def test_the_time_between_a_worker_and_the_server_is_told_only_of_batches_that_found_it_idle() -> None:
    """One that was sent ahead waited there, which is no way."""
    stage = Stage(batch_size=1)
    events: list[Event] = []
    stage.metrics.tap = Tap("m", "1", events.append)
    stage.open("w")
    stage.teach("w", 0.001)
    stage.submit("1", 1.0)
    stage.submit("2", 1.0)

    stage.done("w", 1.75, 0.5)
    stage.done("w", 3.0, 0.5)

    ran = [(event.handler_s, event.server_s) for event in events if isinstance(event, Ran)]
    assert ran[1:] == [(0.5, 0.25), (0.5, 0.0)]


def test_a_dispatcher_of_batches_knows_no_sequences_and_no_steps() -> None:
    """Describe and the watch for workers that hang ask every kind the same."""
    stage = Stage()

    assert stage.dispatcher.describe_sequences() is None
    assert stage.dispatcher.quiet_since("w") is None
    assert stage.dispatcher.keeps_time is False
    assert stage.dispatcher.flights("nobody") == ()


def test_a_new_dispatcher_has_no_worker_and_takes_nothing() -> None:
    """Until somebody says that a slot lives."""
    metrics = VersionMetrics("m", "1")
    dispatcher = Dispatcher(PoolOptions("m", "1", 1, 4), metrics, Stage())

    with pytest.raises(NoWorker):
        dispatcher.submit(Request("r", [Part("body", b"")]), Told(), 0.0)

    assert metrics.refused["no_worker"] == 1


def test_it_is_empty_when_nothing_waits_and_nothing_runs() -> None:
    """Either alone is something."""
    stage = Stage(batch_size=1)
    assert stage.dispatcher.is_empty
    stage.submit("waits")
    assert not stage.dispatcher.is_empty
    stage.open("w")
    assert not stage.dispatcher.is_empty
    stage.done("w", 1.0, 0.5)
    assert stage.dispatcher.is_empty


def test_what_is_expected_of_a_wait_is_known_to_be_none_or_not_known() -> None:
    """None at all while a worker is idle; nothing is known before batches have run."""
    stage = Stage(batch_size=1)
    assert stage.dispatcher.expected_wait_s(5, 0.0) is None
    stage.open("w")
    assert stage.dispatcher.expected_wait_s(5, 0.0) == 0.0
    stage.submit("runs")
    assert stage.dispatcher.expected_wait_s(5, 0.0) is None


def test_the_next_moment_is_the_earliest_of_deadlines_and_delays() -> None:
    """Those of jobs that have ended do not count, nor does a delay where no busy worker could be sent a batch."""
    stage = Stage(batch_size=4, max_batch_delay_s=3.0)
    stage.open("w")
    stage.teach("w", 0.001)
    stage.submit("runs", 1.0)
    late, early = stage.submit("late", 2.0, deadline=9.0), stage.submit("early", 2.0, deadline=4.0)
    assert stage.dispatcher.next_wake() == 4.0
    early.job.cancel()
    assert stage.dispatcher.next_wake() == 5.0
    late.job.cancel()
    assert stage.dispatcher.next_wake() is None

    slow = Stage(batch_size=4, max_batch_delay_s=3.0)
    slow.open("w")
    slow.teach("w", 1.0)
    slow.submit("runs", 1.0)
    slow.submit("waits", 2.0)
    assert slow.dispatcher.next_wake() is None
    slow.submit("late", 2.0, deadline=9.0)
    slow.submit("later", 2.0, deadline=11.0)
    assert slow.dispatcher.next_wake() == 9.0


# ------------------------------------------------------------------------------------------- lengths


class Asking(Stage):
    """A version with a goal whose handler can say how long inputs are; `w` is quick and busy with a first batch."""

    def __init__(self) -> None:
        super().__init__(batch_size=4, batch_policy="goal", latency_goal_s=10.0)
        self.dispatcher.offer_lengths()
        self.open("w")
        for _ in range(3):
            self.submit("x" * 10)
            self.done("w", 0.0, 1.0)


def test_lengths_are_asked_for_right_before_a_batch_and_taken_once() -> None:
    """The question has the number of the batch behind it, and until it is answered the worker is being asked."""
    stage = Asking()
    for body in ("a" * 10, "b" * 10, "c" * 900, "d" * 10):
        stage.submit(body)
    stage.done("w", 1.0, 1.0)

    ((key, question),) = stage.questions
    number = stage.flights["w"][0].number
    assert (key, question.number) == ("w", number)
    assert stage.sent_when_asked == [0]
    assert stage.dispatcher.is_asked("w")
    assert not stage.dispatcher.is_asked("nobody")
    with pytest.raises(BadFrame, match="before the lengths that were asked for"):
        stage.done("w", 2.0, 1.0)


@pytest.mark.parametrize(
    ("key", "later", "seconds", "count"),
    [
        ("nobody", 0, 0.1, 1),
        ("w", 1, 0.1, 1),
        ("w", -1, 0.1, 1),
        ("w", 0, -0.1, 1),
        ("w", 0, math.inf, 1),
        ("w", 0, math.nan, 1),
        ("w", 0, 0.1, 99),
    ],
)
def test_lengths_that_nobody_asked_for_are_a_broken_frame(key: str, later: int, seconds: float, count: int) -> None:
    """Of another worker, before another batch, more than were asked for, or in no time that there is."""
    stage = Asking()
    for body in ("a" * 10, "b" * 10, "c" * 900, "d" * 10):
        stage.submit(body)
    stage.done("w", 1.0, 1.0)
    number = stage.questions[0][1].number

    with pytest.raises(BadFrame):
        stage.dispatcher.told_lengths(key, number + later, seconds, [5] * count)
    stage.dispatcher.told_lengths("w", number, 0.0, [5])

    assert not stage.dispatcher.is_asked("w")
    with pytest.raises(BadFrame):
        stage.dispatcher.told_lengths("w", number, 0.0, [5])


def test_a_worker_that_dies_of_a_question_does_the_batch_behind_it_no_harm() -> None:
    """It was not begun: it goes back to the queue, and counts no death, whyever the worker was ended."""
    stage = Asking()
    clients = [stage.submit(body) for body in ("a" * 10, "b" * 10, "c" * 900, "d" * 10)]
    stage.done("w", 1.0, 1.0)
    question = stage.questions[0][1]

    stage.dispatcher.died("w", question.number - 1, WorkerDied("hung"), may_retry=False, now=2.0)

    assert [client.end for client in clients[1:]] == [None] * 3
    assert [client.job.deaths for client in clients] == [0] * 4
    assert all(digest not in ("", None) for digest in question.digests)


def test_no_lengths_are_asked_for_where_a_rule_or_no_goal_says_them() -> None:
    """The handler's word is for versions with a goal and without `lengthFrom`."""
    assert Stage().dispatcher.asked_lengths is None
    rule = Stage(batch_size=4, batch_policy="goal", latency_goal_s=1.0, length_from="bytes")
    assert rule.dispatcher.asked_lengths is None
    rule.dispatcher.offer_lengths()
    handler = Stage(batch_size=4, batch_policy="goal", latency_goal_s=1.0, length_from="handler")
    assert handler.dispatcher.asked_lengths is not None
    assert not handler.dispatcher.asked_lengths.is_offered


def test_the_share_of_padding_is_counted_where_batches_are_formed_by_length() -> None:
    """Inputs of 10 and 6 bytes, padded to 10, are a fifth padding. Without lengths nobody knows."""
    goal: dict[str, Any] = {"batch_size": 2, "batch_policy": "goal", "latency_goal_s": 10.0}
    measured, unknown = Stage(**goal, length_from="body_bytes", padding_budget=0.5), Stage(**goal)
    for stage in (measured, unknown):
        for body in ("0123456789", "012345"):
            stage.submit(body)
        stage.open("w", 1.0)
        while stage.flights["w"]:
            stage.done("w", 1.0, 0.1)

    padding = measured.dispatcher.metrics.padding
    assert measured.dispatcher.metrics.batch_sizes.last == 2
    assert (padding.count, round(padding.sum, 3)) == (1, 0.2)
    assert unknown.dispatcher.metrics.padding.count == 0


def test_a_result_that_is_an_error_costs_its_own_item_alone() -> None:
    """The others of the batch have their answers, and the goal learns from those."""
    stage = Stage(batch_size=2, batch_policy="goal", latency_goal_s=1.0)
    good, bad = stage.submit("good", 1.0), stage.submit("bad", 1.0)
    stage.open("w", now=1.0)
    flight = stage.flights["w"].pop(0)

    stage.dispatcher.finished(
        "w", flight.number, 0.1, [LAST, Result(400, "no", [], error="prediction")], [b"ok", b""], 2.0
    )

    assert good.body == b"ok"
    assert bad.body is None
    assert bad.ends


def test_batches_of_another_size_change_how_long_the_queue_takes_too() -> None:
    """A refused client is told by the size that is in force."""
    stage = Stage(queue_size=100)
    stage.open("w")
    stage.teach("w", 3.0)
    for body in ("runs", "1", "2", "3"):
        stage.submit(body)
    assert stage.dispatcher.retry_after_s(0.0) == 12.0

    stage.dispatcher.reconfigure(batch_size=4, max_batch_delay_s=0.5, now=0.0)

    assert stage.dispatcher.retry_after_s(0.0) == 3.0
    assert stage.dispatcher.options.max_batch_delay_s == 0.5


def test_all_requests_of_a_batch_have_their_end_with_it() -> None:
    """A plain version answers its batches as a whole."""
    stage = Stage(batch_size=2)
    for body in ("a", "b"):
        stage.submit(body)
    stage.open("w")
    landed = Landed(stage.flights["w"][0], [LAST, LAST], [b"", b""])

    assert stage.dispatcher.ended_in(landed) == 2


def test_a_worker_that_loads_is_a_second_away_though_a_start_is_planned() -> None:
    """The time of the next start is told where no slot lives, and there alone."""
    stage = Stage()
    stage.dispatcher.hold_for_start.note(30.0, 0.0)

    assert stage.dispatcher.living_slots == 1
    assert stage.dispatcher.retry_after_s(0.0) == 1.0
    stage.dispatcher.living_slots = 0
    assert stage.dispatcher.retry_after_s(0.0) == 30.0


def test_batches_that_ended_are_counted_by_their_size() -> None:
    """With the time that they took together."""
    stage = Stage(batch_size=4)
    stage.open("w")
    stage.teach("w", 0.5)
    stage.submit("first")
    for body in ("x", "y", "z"):
        stage.submit(body)
    stage.done("w", 1.0, 0.25)
    stage.done("w", 2.0, 0.125)

    assert stage.metrics.runs_by_size == {1: (2, 0.75), 3: (1, 0.125)}


def test_examples_of_histograms_are_the_last_request_of_a_batch_and_kept_only_where_asked_for() -> None:
    """One a batch and stage; a page in OpenMetrics asks for them."""
    stage = Stage(batch_size=2)
    stage.open("w")
    histograms = [stage.metrics.queue_seconds, stage.metrics.handler_seconds, stage.metrics.total_seconds]
    stage.submit("1", 0.0)
    stage.done("w", 1.0, 0.5)
    assert all(histogram.examples is None for histogram in histograms)
    for histogram in histograms:
        histogram.keep_examples()

    job = stage.submit("2", 2.0).job
    stage.done("w", 3.0, 0.5)

    found = [[example for example in histogram.examples or () if example is not None] for histogram in histograms]
    assert [(example.value, example.request_id) for (example,) in found] == [
        (0.0, job.request.id),
        (0.5, job.request.id),
        (1.0, job.request.id),
    ]
