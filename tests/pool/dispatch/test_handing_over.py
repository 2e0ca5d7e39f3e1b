"""Requests that wait for one version are handed to another: which of them, how they end, and what they are not."""

from __future__ import annotations

from typing import Any

from marserve.errors import DeadlinePassed, NoWorker
from marserve.messages import Answer, Part, Request, Result
from marserve.pool.dispatch.dispatcher import Dispatcher
from marserve.pool.dispatch.jobs import Flight
from marserve.pool.dispatch.sequences import SequenceQueue
from marserve.pool.options import PoolOptions
from marserve.telemetry.metrics.counts import VersionMetrics
from support.receivers import Told


class Stage:
    """A version's dispatcher, and what was sent to its workers."""

    def __init__(self, version: str, **options: Any) -> None:
        self.dispatcher = Dispatcher(PoolOptions("m", version, 1, 4, **options), VersionMetrics("m", version), self)
        self.dispatcher.living_slots = 1
        self.flights: list[tuple[str, Flight]] = []

    def send(self, key: str, flight: Flight) -> None:
        """A flight leaves."""
        self.flights.append((key, flight))

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None

    def submit(self, name: str, *, deadline: float | None = None, **more: Any) -> Told:
        """A request arrives."""
        client = Told()
        self.dispatcher.submit(Request(name, [Part("body", b"x")], deadline=deadline, **more), client, 0.0)
        return client

    def answer(self) -> None:
        """The oldest flight is answered."""
        key, flight = self.flights.pop(0)
        results = [Result(200, "", [])] * len(flight.jobs)
        self.dispatcher.finished(key, flight.number, 0.1, results, [b"ok"] * len(flight.jobs), 1.0)


def hand_over(giver: Stage, taker: Stage, now: float = 0.5) -> list[str]:
    """From one to the other; the names of what moved."""
    jobs = giver.dispatcher.withdraw()
    taker.dispatcher.adopt(jobs, now)
    return [job.request.id for job in jobs]


def busy(version: str, **options: Any) -> Stage:
    """A version whose only worker is at something slow."""
    stage = Stage(version, **options)
    stage.dispatcher.open_lane("w", 0.0)
    stage.submit("runs")
    return stage


def test_what_waits_moves_and_what_runs_stays() -> None:
    """In its order; the other version's worker gets it at once."""
    giver, taker = busy("2"), Stage("1")
    clients = [giver.submit(f"r{number}") for number in range(3)]
    taker.dispatcher.open_lane("v", 0.0)

    moved = hand_over(giver, taker)
    for _ in range(3):
        taker.answer()

    assert moved == ["r0", "r1", "r2"]
    assert [client.body for client in clients] == [b"ok"] * 3
    assert (giver.dispatcher.waiting, giver.dispatcher.running) == (0, 1)
    assert taker.dispatcher.metrics.requests == 3


def test_who_named_the_version_or_asked_about_it_stays() -> None:
    """They wanted this one."""
    giver, taker = busy("2"), Stage("1")
    giver.submit("named", names_version=True)
    giver.submit("asks", is_describe=True)
    giver.submit("any")

    assert hand_over(giver, taker) == ["any"]
    assert giver.dispatcher.waiting == 2


def test_what_a_dead_worker_had_moves_too() -> None:
    """It would have been run once more; that is done elsewhere."""
    giver, taker = busy("2"), Stage("1")
    client = giver.submit("waits")
    giver.dispatcher.died("w", 1, NoWorker("m"), may_retry=True, now=0.2)
    taker.dispatcher.open_lane("v", 0.0)

    assert hand_over(giver, taker) == ["runs", "waits"]
    taker.answer()
    taker.answer()
    assert client.body == b"ok"


def test_a_client_that_leaves_afterwards_is_dropped_where_its_request_is() -> None:
    """The job in its hand knows who has it."""
    giver, taker = busy("2"), busy("1")
    client = Told()
    job = giver.dispatcher.submit(Request("r", []), client, 0.0)
    hand_over(giver, taker)

    job.cancel()

    assert (giver.dispatcher.waiting, taker.dispatcher.waiting) == (0, 0)
    assert taker.dispatcher.metrics.cancelled == 1
    assert client.end is None


def test_a_deadline_passes_once_and_where_the_request_is() -> None:
    """The version that gave it away has nothing to do with it any more."""
    giver, taker = busy("2"), busy("1")
    client = giver.submit("r", deadline=1.0)
    hand_over(giver, taker)

    giver.dispatcher.pump(2.0)
    assert client.end is None
    taker.dispatcher.pump(2.0)

    assert isinstance(client.end, DeadlinePassed)
    assert (giver.dispatcher.metrics.expired, taker.dispatcher.metrics.expired) == (0, 1)


def test_a_version_without_workers_that_takes_them_fails_them() -> None:
    """Nobody waits for what cannot come."""
    giver, taker = busy("2"), Stage("1")
    taker.dispatcher.living_slots = 0
    client = giver.submit("r")

    hand_over(giver, taker)

    assert isinstance(client.end, NoWorker)


def test_a_streaming_request_stays() -> None:
    """Half its answer is out."""
    giver, taker = busy("2"), Stage("1")
    key, flight = giver.flights[0]
    giver.dispatcher.piece(key, flight.number, [Result(200, "", [])], [b"1"], 0.1)

    assert hand_over(giver, taker) == []
    assert isinstance(flight.jobs[0].receiver, Told)
    assert flight.jobs[0].receiver.pieces == [Answer(b"1")]


def test_sequences_stay_with_their_worker() -> None:
    """Their state is there."""
    giver = busy("2")
    giver.submit("r")
    object.__setattr__(giver.dispatcher.options, "sequences", SequenceQueue)

    assert giver.dispatcher.withdraw() == []
