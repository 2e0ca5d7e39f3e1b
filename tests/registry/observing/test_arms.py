"""Arms: what is counted of a version's requests, and what another version answers in its place."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from marserve.errors import BadInput, DeadlinePassed, HandlerFailed, MarserveError, NoWorker, WorkerDied
from marserve.messages import Answer, Load, Request, Thrown
from marserve.pool.options import PoolOptions
from marserve.registry.observing.arms import LATENCY_BOUNDS, Arm, ArmReceiver
from marserve.telemetry.timeline import timed
from support.fake_pool import Behaviour, FakePool
from support.receivers import Told

pytestmark = pytest.mark.anyio


class Clock:
    """Seconds that the test passes."""

    now = 100.0

    def __call__(self) -> float:
        """The time."""
        return self.now


def pool(version: str, **behaviour: Any) -> FakePool:
    """A version's pool."""
    made = FakePool(
        PoolOptions("m", version, 1, 1, queue_size=100),
        Load("m", version, "", "h.py", None, None, 1),
        Behaviour(**behaviour),
    )
    made.start()
    return made


def middle_s(latency: tuple[int, ...]) -> float:
    """The upper bound of the one bucket that holds something."""
    (index,) = [place for place, count in enumerate(latency) if count]
    return LATENCY_BOUNDS[index]


async def test_answers_errors_and_rejections_are_told_apart() -> None:
    """By status, and by whose fault an error is."""
    arm, made = Arm(Clock()), pool("1", holds=True)
    clients = [Told() for _ in range(6)]
    for number, client in enumerate(clients):
        arm.submit(made, Request(f"r{number}", []), client)
    jobs = list(made.held)
    jobs[0].answer(Answer(b"", 200))
    jobs[1].answer(Answer(b"", 503))
    jobs[2].answer(Answer(b"", 404))
    jobs[3].fail(HandlerFailed("no", 422))
    jobs[4].fail(DeadlinePassed("queue"))
    jobs[5].fail(BadInput("no"))

    seen = arm.seen()

    assert (seen.requests, seen.errors, seen.rejections) == (6, 2, 3)
    assert arm.ended == {"answered": 1, "rejected": 3, "failed": 2}
    assert all(client.end is not None for client in clients)


@pytest.mark.parametrize("is_last", [True, False])
async def test_a_stream_that_says_that_it_failed_is_an_error(is_last: bool) -> None:
    """In its last piece, or before, where its batch goes on."""
    arm, made = Arm(Clock()), pool("1", holds=True)
    for number in range(2):
        arm.submit(made, Request(f"r{number}", []), Told())
    for job in made.held:
        job.receiver.on_piece(Answer(b"first"), False)
    failed = Answer(b"error", thrown=Thrown("ValueError", "no", "trace"))

    made.held[0].receiver.on_piece(failed, is_last)
    for job in made.held[is_last:]:
        job.receiver.on_piece(Answer(b""), True)

    assert (arm.seen().requests, arm.seen().errors) == (2, 1)


async def test_latency_is_from_arrival_to_the_end_and_what_runs_counts_with_its_age() -> None:
    """So a version that answers nothing is slow, not silent."""
    clock = Clock()
    arm, made = Arm(clock), pool("1", holds=True)
    arm.submit(made, Request("r", []), Told())
    clock.now += 0.5

    running = arm.seen()
    clock.now += 0.5
    made.held[0].answer(Answer(b""))
    clock.now += 100
    ended = arm.seen()

    assert middle_s(running.latency) == pytest.approx(0.5, rel=0.05)
    assert middle_s(ended.latency) == pytest.approx(1.0, rel=0.05)
    assert (running.requests, ended.requests) == (1, 1)


async def test_a_new_window_counts_nothing_of_the_one_before() -> None:
    """Requests that were begun in it end in neither."""
    arm, made = Arm(Clock()), pool("1", holds=True)
    arm.submit(made, Request("r", []), Told())
    arm.restart()
    made.held[0].fail(WorkerDied("crash"))

    assert (arm.seen().requests, arm.seen().errors) == (0, 0)


async def test_a_client_that_has_left_is_not_counted() -> None:
    """Once nobody holds its request any more."""
    arm, made = Arm(Clock()), pool("1", holds=True)
    arm.submit(made, Request("r", []), Told()).cancel()
    gc.collect()

    assert arm.seen().requests == 0


async def test_what_the_version_does_not_take_is_an_error_of_its() -> None:
    """And told to the client, where nobody rescues it."""
    made = pool("1")
    made.scale(0, 0)
    arm = Arm(Clock())

    with pytest.raises(NoWorker):
        arm.submit(made, Request("r", []), Told())

    assert (arm.seen().requests, arm.seen().errors) == (1, 1)


@pytest.mark.parametrize(
    ("error", "is_rescued"), [(WorkerDied("crash"), True), (HandlerFailed(), False), (BadInput("no"), False)]
)
async def test_a_request_whose_worker_died_is_answered_by_the_other_version(
    error: MarserveError, is_rescued: bool
) -> None:
    """What a handler raised is the candidate's own answer; either way it counts."""
    serves, dies = pool("1"), pool("2", holds=True)
    arm, client = Arm(Clock(), serves.submit), Told()
    arm.submit(dies, Request("r", []), client)

    dies.held[0].fail(error)

    assert (client.body == b"m 1") is is_rescued
    assert (client.end is error) is not is_rescued
    assert arm.seen().requests == 1


async def test_a_request_that_finds_no_worker_is_answered_by_the_other_version() -> None:
    """At once; where that cannot either, the client hears the first error."""
    serves, dead = pool("1"), pool("2")
    dead.scale(0, 0)
    arm, client = Arm(Clock(), serves.submit), Told()

    arm.submit(dead, Request("r", []), client)

    assert client.body == b"m 1"
    assert arm.seen().errors == 1
    serves.scale(0, 0)
    with pytest.raises(NoWorker):
        arm.submit(dead, Request("r", []), Told())


async def test_a_rescued_request_is_cancelled_where_it_is_and_one_that_was_cancelled_is_not_rescued() -> None:
    """The surface has one job, whoever runs it."""
    serves, dies = pool("1", holds=True), pool("2", holds=True)
    arm, client = Arm(Clock(), serves.submit), Told()
    job = arm.submit(dies, Request("r", []), client)
    dies.held[0].fail(WorkerDied("crash"))
    assert len(serves.held) == 1

    job.cancel()

    assert serves.held == []
    assert client.end is None
    other = arm.submit(dies, Request("s", []), Told())
    running = dies.held[0]
    other.cancel()
    running.receiver.on_error(WorkerDied("crash"))
    assert serves.held == []


async def test_a_stream_that_has_begun_is_not_begun_again_elsewhere() -> None:
    """Half an answer is out."""
    serves, dies = pool("1"), pool("2", holds=True)
    arm, client = Arm(Clock(), serves.submit), Told()
    arm.submit(dies, Request("r", []), client)
    dies.held[0].receiver.on_piece(Answer(b"half"), False)

    dies.held[0].fail(WorkerDied("crash"))

    assert isinstance(client.end, WorkerDied)


def test_who_receives_for_an_arm_is_timed_as_the_job_it_stands_for() -> None:
    """A request that is slow, or fails, gets its timeline from these."""
    request = Request("r", [])
    receiver = ArmReceiver(request, Told(), Arm(Clock()), 0.5)

    accepted = timed(receiver)

    assert accepted is not None
    assert (accepted.request, accepted.arrived, accepted.times) == (request, 0.5, None)
