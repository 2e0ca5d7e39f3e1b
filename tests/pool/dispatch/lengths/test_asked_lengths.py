"""Lengths that the handler says: who is asked for, what is kept, what it costs, and what deaths over it do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from marserve.errors import BadFrame, WorkerDied
from marserve.messages import Answer, Part, Request, Result
from marserve.pool.dispatch.dispatcher import Dispatcher
from marserve.pool.dispatch.jobs import Flight, Job, Question
from marserve.pool.dispatch.lengths.asked_lengths import (
    FIRST_ITEMS,
    MAX_BYTES,
    MAX_DEATHS,
    MAX_KNOWN,
    AskedLengths,
    digest_of,
)
from marserve.pool.options import PoolOptions
from marserve.telemetry.metrics.counts import VersionMetrics
from support.processes import until
from support.receivers import Told
from support.running_pool import RunningPool

OK = Result(200, "", [])


class Owner:
    """Nobody's jobs."""

    def cancel(self, job: Job) -> None:
        """No client leaves."""

    def hold(self, job: Job) -> None:
        """No client is slow."""

    def resume(self, job: Job) -> None:
        """No client is slow."""


def job_of(body: bytes, kind: str | None = None, *, is_describe: bool = False) -> Job:
    """A request that waits."""
    return Job(Request("r", [Part("body", body, kind)], is_describe=is_describe), Told(), 0.0, None, Owner())


def offered(busy_s: float = 1000.0) -> AskedLengths:
    """Lengths of a handler that can be asked, with time for it."""
    lengths = AskedLengths(VersionMetrics("m", "1"))
    lengths.is_offered = True
    lengths.earn(busy_s)
    return lengths


def ask(lengths: AskedLengths, jobs: Sequence[Job], *, run_s: float = 1.0) -> Question:
    """Look the jobs up and ask for those that are not known."""
    for job in jobs:
        lengths.look_up(job)
    question = lengths.ask(jobs, 1, run_s)
    assert question is not None
    return question


# ------------------------------------------------------------------------------------------- what is known


def test_what_was_said_once_is_known_for_every_equal_input() -> None:
    """By a digest of names, types and bytes."""
    lengths = offered()
    lengths.take(ask(lengths, [job_of(b"abc", "text/plain")]), [40], 0.001)

    assert lengths.look_up(job_of(b"abc", "text/plain")) == 40
    assert lengths.ask([job_of(b"abc", "text/plain")], 2, 1.0) is None
    assert digest_of(Request("1", [Part("body", b"abc")])) != digest_of(
        Request("1", [Part("body", b"abc", "text/plain")])
    )
    assert lengths.describe()["cached"] == 1


def test_what_is_not_known_is_guessed_from_its_bytes() -> None:
    """At first a byte has a length of 1, then what those that were asked for had."""
    lengths = offered()

    assert lengths.look_up(job_of(b"x" * 100)) == 100
    lengths.take(ask(lengths, [job_of(b"a" * 40), job_of(b"b" * 80), job_of(b"c" * 20)]), [10, 20, 20], 0.001)
    assert lengths.look_up(job_of(b"x" * 100)) == 25
    assert lengths.look_up(job_of(b"")) == 1


def test_what_the_handler_cannot_say_is_guessed_and_not_asked_for_again() -> None:
    """A -1 is kept as such."""
    lengths = offered()
    failed = job_of(b"1234")

    lengths.take(ask(lengths, [failed]), [-1], 0.001)

    assert lengths.look_up(failed) == 4
    again = job_of(b"1234")
    assert lengths.look_up(again) == 4
    assert lengths.ask([failed, again], 2, 1.0) is None
    assert lengths.describe()["failed"] == 1


def test_the_answers_that_are_kept_are_bounded() -> None:
    """The one that was used last stays longest."""
    lengths = offered()
    first = job_of(b"first")
    lengths.take(ask(lengths, [first]), [9], 0.0001)

    for number in range(MAX_KNOWN):
        lengths.take(ask(lengths, [job_of(b"%d" % number)]), [5], 0.00001)
        if number % 1000 == 0:
            assert lengths.look_up(job_of(b"first")) == 9

    assert lengths.look_up(job_of(b"first")) == 9
    oldest = job_of(b"0")
    lengths.look_up(oldest)
    assert lengths.ask([oldest], 2, 1.0) is not None


def test_large_inputs_and_describe_requests_are_not_asked_for() -> None:
    """What is sent twice should be small; a describe request has no input."""
    lengths = offered()
    large, describe = job_of(bytes(MAX_BYTES + 1)), job_of(b"", is_describe=True)

    assert lengths.look_up(large) == MAX_BYTES + 1
    assert lengths.look_up(describe) == 1
    assert lengths.ask([large, describe], 1, 1.0) is None


# ------------------------------------------------------------------------------------------- what it costs


def test_nothing_is_asked_before_it_was_earned_nor_on_credit() -> None:
    """A twentieth of what workers are busy; a question that took longer is paid off first."""
    lengths = offered(busy_s=0.0)
    jobs = [job_of(b"%d" % number) for number in range(3)]
    for job in jobs:
        lengths.look_up(job)

    assert lengths.ask(jobs, 1, 1.0) is None
    lengths.earn(0.1)
    question = lengths.ask(jobs[:1], 1, 1.0)
    assert question is not None
    assert question.limit_s == pytest.approx(0.005)
    lengths.take(question, [3], 0.015)
    assert lengths.ask(jobs, 2, 1.0) is None
    lengths.earn(0.1)
    assert lengths.ask(jobs, 2, 1.0) is None
    lengths.earn(0.2)
    assert lengths.ask(jobs, 2, 1.0) is not None
    assert lengths.describe()["askedSeconds"] == 0.015
    assert lengths.describe()["itemMs"] == 15.0


def test_a_question_is_as_large_as_a_part_of_a_batch_is_long() -> None:
    """A few while the price is not known; what time did not allow may be asked for again, and once at a time."""
    lengths = offered()
    jobs = [job_of(b"%d" % number) for number in range(50)]

    first = ask(lengths, jobs)
    assert len(first.jobs) == FIRST_ITEMS
    assert lengths.ask(first.jobs, 1, 1.0) is None
    lengths.take(first, [7, 7], 0.002)
    second = lengths.ask(jobs, 2, 0.020)

    assert second is not None
    assert len(second.jobs) == 5
    assert second.limit_s == pytest.approx(0.005)
    assert second.jobs[0] is jobs[2]


# ------------------------------------------------------------------------------------------- deaths


def test_inputs_that_a_worker_died_of_are_not_asked_for_again() -> None:
    """And after several such deaths in a row nothing is."""
    lengths = offered()

    for number in range(MAX_DEATHS):
        jobs = [job_of(b"%d" % number)]
        assert lengths.lost(ask(lengths, jobs), is_guilty=True) is (number == MAX_DEATHS - 1)
        again = job_of(b"%d" % number)
        lengths.look_up(again)
        assert lengths.ask([again], 2, 1.0) is None

    new = job_of(b"new")
    lengths.look_up(new)
    assert lengths.ask([new], 3, 1.0) is None
    assert "stopped" in lengths.describe()


def test_a_death_for_another_reason_only_loses_the_question() -> None:
    """It is asked again, of another worker."""
    lengths = offered()
    job = job_of(b"1")

    lengths.lost(ask(lengths, [job]), is_guilty=False)

    assert lengths.ask([job], 2, 1.0) is not None


class Stage:
    """A dispatcher with a goal, and what it asked of its one worker `w`."""

    def __init__(self, **options: Any) -> None:
        settings = {"batch_size": 2, "batch_policy": "goal", "latency_goal_s": 1.0, "padding_budget": 0.0, **options}
        self.dispatcher = Dispatcher(PoolOptions("m", "1", 1, 4, **settings), VersionMetrics("m", "1"), self)
        self.dispatcher.living_slots = 1
        self.said: list[Question | Flight] = []
        self.told: dict[str, Told] = {}
        self.dispatcher.offer_lengths()
        self.dispatcher.open_lane("w", 0.0)
        assert self.dispatcher.asked_lengths is not None
        self.dispatcher.asked_lengths.earn(100.0)

    def ask_lengths(self, key: str, question: Question) -> None:
        """A worker is asked."""
        self.said.append(question)

    def send(self, key: str, flight: Flight) -> None:
        """A flight leaves."""
        self.said.append(flight)

    def submit(self, *bodies: bytes) -> None:
        """Requests arrive."""
        for body in bodies:
            told = self.told[body.decode()] = Told()
            self.dispatcher.submit(Request(body.decode(), [Part("body", body)]), told, 0.0)

    def answer(self, flight: Flight) -> None:
        """A batch ends."""
        count = len(flight.jobs)
        self.dispatcher.finished("w", flight.number, 0.01, [OK] * count, [b""] * count, 0.1)

    def busy(self) -> tuple[Question, Flight]:
        """A worker that has been asked and has a batch behind it."""
        self.submit(b"1")
        self.submit(b"22", b"4444", b"55", b"666")
        flight = self.said.pop()
        assert isinstance(flight, Flight)
        self.answer(flight)
        question, batch = self.said
        assert isinstance(question, Question)
        assert isinstance(batch, Flight)
        return question, batch


def test_a_question_goes_right_before_a_batch_and_is_about_those_left_behind() -> None:
    """A lone request is never asked about; the next batch is formed by what was said."""
    stage = Stage()

    question, batch = stage.busy()
    assert stage.dispatcher.goal is not None
    for size in (1, 2):
        stage.dispatcher.goal.learn(size, 0.01, length=10)

    assert [job.request.id for job in batch.jobs] == ["22", "55"]
    assert [job.request.id for job in question.jobs] == ["4444", "666"]
    assert question.number == batch.number
    assert stage.dispatcher.is_asked("w")
    stage.dispatcher.told_lengths("w", question.number, 0.0001, [10, 10])
    assert not stage.dispatcher.is_asked("w")
    stage.answer(batch)
    last = stage.said[-1]
    assert isinstance(last, Flight)
    assert [job.request.id for job in last.jobs] == ["4444", "666"]


@pytest.mark.parametrize(("number", "seconds", "lengths"), [(0, 0.0, [1]), (2, -1.0, [1]), (2, 0.0, [1, 1, 1])])
def test_lengths_that_nobody_asked_for_are_a_broken_frame(number: int, seconds: float, lengths: list[int]) -> None:
    """Of another batch, of a time that is none, too many."""
    stage = Stage()
    stage.busy()

    with pytest.raises(BadFrame):
        stage.dispatcher.told_lengths("w", number, seconds, lengths)
    with pytest.raises(BadFrame):
        stage.dispatcher.told_lengths("other", 2, 0.0, [1])


def test_a_batch_answered_before_the_question_is_a_broken_frame() -> None:
    """No honest worker does that."""
    stage = Stage()
    _, batch = stage.busy()

    with pytest.raises(BadFrame, match="before the lengths"):
        stage.answer(batch)


@pytest.mark.parametrize("may_retry", [True, False])
def test_a_batch_behind_a_deadly_question_is_innocent(may_retry: bool) -> None:
    """It goes back to the head of the queue, whether the worker died or was ended for taking too long."""
    stage = Stage()
    question, batch = stage.busy()

    stage.dispatcher.died("w", 1, WorkerDied("exit"), may_retry=may_retry, now=0.2)
    stage.said.clear()
    stage.dispatcher.open_lane("w", 0.3)

    (again,) = [said for said in stage.said if isinstance(said, Flight)]
    assert isinstance(again, Flight)
    assert again.jobs == batch.jobs
    assert not any(told.ends for letter, told in stage.told.items() if letter != "1")
    assert all(job.deaths == 0 for job in batch.jobs)
    assert all(not job.length_digest for job in question.jobs)


# ------------------------------------------------------------------------------------------- real workers

LENGTHS = """
    import json, os, time

    class Texts:
        def initialize(self, context):
            pass

        def length_of(self, row):
            body = bytes(row["body"])
            with open("asked", "a") as file:
                file.write(body.decode() + "\\n")
            kind, _, number = body.decode().partition(" ")
            if kind == "die" or os.path.exists("deadly"):
                os._exit(9)
            if kind == "hang":
                time.sleep(60)
            if kind == "bad":
                raise ValueError("no text")
            return int(number)

        def handle(self, rows, context):
            with open("calls", "a") as file:
                file.write(json.dumps([bytes(row["body"]).decode() for row in rows]) + "\\n")
            time.sleep(0.03)
            return [bytes(row["body"]) for row in rows]
"""
GOAL = {"batch_size": 4, "batch_policy": "goal", "latency_goal_s": 1.0, "padding_budget": 0.2}


async def ask_all(running: RunningPool, bodies: Sequence[bytes]) -> list[bytes]:
    """Send all of them at once, and wait for all answers."""
    sent = [running.send(body) for body in bodies]
    answers = [await one.told(20.0) for one in sent]
    assert all(isinstance(answer, Answer) for answer in answers), answers
    return [bytes(answer.body) for answer in answers if isinstance(answer, Answer)]


@pytest.mark.anyio
@pytest.mark.parametrize("start", ["fork", "fresh"])
async def test_a_handlers_length_of_forms_batches_of_one_length(tmp_path: Path, start: str) -> None:
    """Their bytes are as many; describe shows what was asked and what it cost."""
    async with RunningPool(tmp_path, LENGTHS, start=start, **GOAL) as running:
        await running.start()
        assert running.pool.dispatcher.asked_lengths is not None
        running.pool.dispatcher.asked_lengths.earn(100.0)
        bodies = [b"text%d %d" % (10 + number, 100 if number % 2 else 900) for number in range(40)]

        assert await ask_all(running, bodies[:1]) == bodies[:1]
        assert not running.file("asked").exists()
        assert await ask_all(running, bodies) == bodies
        described = running.pool.described["goal"]["lengths"]
        asked = running.file("asked").read_text().splitlines()

        assert described["from"] == "handler"
        assert described["asked"] == len(asked) == running.metrics.lengths["handler"] > 10
        assert 0 < described["askedSeconds"] == pytest.approx(running.metrics.length_seconds, abs=1e-5)
        assert len(set(asked)) == len(asked)
        late = running.calls()[-6:]
        assert all(len({text.split(" ")[1] for text in json.loads(line)}) == 1 for line in late), late


@pytest.mark.anyio
async def test_an_input_that_is_deadly_to_ask_about_costs_one_worker_and_no_request(tmp_path: Path) -> None:
    """It is answered as any other: only asking kills. One that cannot be asked about is guessed."""
    async with RunningPool(tmp_path, LENGTHS, **GOAL) as running:
        await running.start()
        assert running.pool.dispatcher.asked_lengths is not None
        running.pool.dispatcher.asked_lengths.earn(100.0)
        bodies = [b"text%d %d" % (number, number) for number in range(6)] + [b"die 1", b"bad 1"] * 2

        assert await ask_all(running, bodies) == bodies
        await until(lambda: running.pool.ready_workers == 1, "the worker is back")

        assert running.metrics.worker_deaths == {"exit": 1}
        assert running.metrics.retried == 0
        assert running.metrics.errors == {}


@pytest.mark.anyio
async def test_a_length_of_that_hangs_is_ended_by_the_response_limit(tmp_path: Path) -> None:
    """And the death says where; the batch behind it is run by the next worker."""
    async with RunningPool(tmp_path, LENGTHS, response_timeout_s=0.5, **GOAL) as running:
        await running.start()
        assert running.pool.dispatcher.asked_lengths is not None
        running.pool.dispatcher.asked_lengths.earn(100.0)
        bodies = [b"text%d %d" % (number, number) for number in range(6)] + [b"hang 1"]

        assert await ask_all(running, bodies) == bodies

        assert running.metrics.worker_deaths == {"response_timeout": 1}
        assert running.pool.last_death is not None
        assert "length_of" in running.pool.last_death.detail


@pytest.mark.anyio
async def test_a_length_of_that_always_kills_is_asked_no_more(tmp_path: Path) -> None:
    """After a few workers; the requests are answered all the same, and describe says so."""
    async with RunningPool(tmp_path, LENGTHS, **GOAL) as running:
        await running.start()
        running.file("deadly").touch()
        assert running.pool.dispatcher.asked_lengths is not None
        running.pool.dispatcher.asked_lengths.earn(100.0)
        bodies = [b"text%d %d" % (number, number) for number in range(60)]

        assert await ask_all(running, bodies) == bodies

        assert running.metrics.worker_deaths == {"exit": MAX_DEATHS}
        assert "in a row" in running.pool.described["goal"]["lengths"]["stopped"]


@pytest.mark.anyio
async def test_describe_says_the_rule_and_the_padding_that_are_in_force(tmp_path: Path) -> None:
    """What is tuned has to be known; without a rule of the configuration neither is said."""
    with_rule = RunningPool(tmp_path, length_from="body_bytes", **GOAL)
    async with with_rule as running, RunningPool(tmp_path, **GOAL) as without:
        described = running.pool.described["goal"]

        assert (described["lengthFrom"], described["paddingBudget"]) == ("body_bytes", 0.2)
        assert "paddingBudget" not in without.pool.described["goal"]


@pytest.mark.anyio
async def test_a_handler_that_cannot_be_asked_is_told_of_in_warnings(tmp_path: Path) -> None:
    """Where the configuration counts on it."""
    async with RunningPool(tmp_path, length_from="handler", **GOAL) as running:
        await running.start()

        assert running.pool.warnings == ["lengthFrom: handler is not used: it has no length_of(row)"]
        assert "lengths" not in running.pool.described["goal"]
