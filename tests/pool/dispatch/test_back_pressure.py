"""Slow readers of streams: their worker is not read from until they have caught up, left, or been told their end."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from marserve.errors import WorkerDied
from marserve.messages import Part, Raised, Request, Result
from marserve.pool.dispatch.dispatcher import Dispatcher
from marserve.pool.dispatch.jobs import Flight, Job
from marserve.pool.options import PoolOptions
from marserve.telemetry.metrics.counts import VersionMetrics
from support.processes import until
from support.receivers import Told
from support.running_pool import RunningPool

OK = Result(200, "", [])


class Stage:
    """A dispatcher with two workers; `log` is whom it had held and resumed."""

    def __init__(self) -> None:
        self.dispatcher = Dispatcher(PoolOptions("m", "1", 2, 2, batch_size=2), VersionMetrics("m", "1"), self)
        self.dispatcher.living_slots = 2
        self.log: list[str] = []
        self.flights: dict[str, Flight] = {}

    def send(self, key: str, flight: Flight) -> None:
        """A flight leaves."""
        self.flights[key] = flight

    def mark_cancelled(self, key: str, number: int, index: int) -> None:
        """A running item is no longer wanted."""

    def hold(self, key: str) -> None:
        """A worker is not read any more."""
        self.log.append(f"hold {key}")

    def resume(self, key: str) -> None:
        """It is read again."""
        self.log.append(f"resume {key}")

    def lane_emptied(self, key: str) -> None:
        """A closed worker is done."""

    def all_ended(self) -> None:
        """The last job left."""

    def run_two(self, *, deadline: float | None = None) -> list[Job]:
        """A batch of two that worker `w` streams to."""
        jobs = [
            self.dispatcher.submit(Request(f"r{number}", [Part("body", b"")], deadline=deadline), Told(), 0.0)
            for number in range(2)
        ]
        self.dispatcher.open_lane("w", 0.0)
        self.dispatcher.piece("w", 1, [OK, OK], [b"p", b"p"], 0.1)
        return jobs

    def end(self) -> None:
        """The batch ends."""
        self.dispatcher.finished("w", 1, 0.1, [OK, OK], [b"e", b"e"], 0.2)


def test_a_worker_is_held_while_one_of_its_clients_does_not_keep_up() -> None:
    """From the first that cannot until the last that can again; saying it twice changes nothing."""
    stage = Stage()
    first, second = stage.run_two()

    for step in (first.hold, first.hold, second.hold, first.resume, first.resume, second.resume, second.resume):
        step()

    assert stage.log == ["hold w", "resume w"]


@pytest.mark.parametrize("how", ["cancel", "deadline", "end"])
def test_whoever_ends_holds_nobody_any_more(how: str) -> None:
    """By leaving, by its deadline, or with its last piece, which was under way when it was held."""
    stage = Stage()
    first, _ = stage.run_two(deadline=1.0 if how == "deadline" else None)
    first.hold()

    if how == "cancel":
        first.cancel()
    elif how == "deadline":
        stage.dispatcher.pump(1.0)
    else:
        stage.end()

    assert stage.log == ["hold w", "resume w"]
    first.hold()
    first.resume()
    assert stage.log == ["hold w", "resume w"]


@pytest.mark.parametrize("how", ["answered", "raised"])
def test_a_held_worker_that_was_retired_is_read_again_when_its_stream_ends(how: str) -> None:
    """Its last pieces and its result came at once; that it ends must still be read."""
    stage = Stage()
    first, _ = stage.run_two()
    first.hold()
    assert not stage.dispatcher.close_lane("w")

    if how == "answered":
        stage.end()
    else:
        stage.dispatcher.raised("w", Raised(1, 0.1, "handler", "Prediction failed", 503, ""), 0.2)

    assert stage.log == ["hold w", "resume w"]


def test_a_worker_that_died_while_it_was_held_is_not_resumed() -> None:
    """There is nobody to read from."""
    stage = Stage()
    first, second = stage.run_two()
    first.hold()
    second.hold()

    stage.dispatcher.died("w", 1, WorkerDied("killed"), may_retry=True, now=0.2)
    first.resume()

    assert stage.log == ["hold w"]
    assert stage.dispatcher.is_empty


def test_what_waits_can_hold_nobody() -> None:
    """Only a running request is streamed to."""
    stage = Stage()
    job = stage.dispatcher.submit(Request("r", [Part("body", b"")]), Told(), 0.0)

    job.hold()
    job.resume()

    assert stage.log == []


STREAM = """
from marserve_handlers.context import send_intermediate_predict_response

def handle(rows, context):
    if rows is None:
        return None
    for number in range(300):
        send_intermediate_predict_response([b"p" * 10_000] * len(rows), None, "", 200, context)
    return [b"end"] * len(rows)
"""


@pytest.mark.anyio
async def test_a_held_worker_waits_and_is_not_ended_for_it(tmp_path: Path) -> None:
    """Though far longer than its response time-out; then every piece comes."""
    async with RunningPool(tmp_path, STREAM, response_timeout_s=0.3) as running:
        await running.start()
        sent = running.send(b"x")
        await sent.piece()

        sent.job.hold()
        before = -1
        while before != len(sent.pieces):  # what was under way comes to rest
            before = len(sent.pieces)
            await asyncio.sleep(1.0)  # the time itself is what is tested
        sent.job.resume()
        await sent.told()

        assert 0 < before < 200
        assert len(sent.pieces) == 301
        assert running.pool.metrics.worker_deaths == {}


@pytest.mark.anyio
async def test_a_held_worker_that_is_killed_is_noticed(tmp_path: Path) -> None:
    """Nothing is read from it, and yet its end is seen and its client told."""
    async with RunningPool(tmp_path, STREAM) as running:
        await running.start()
        sent = running.send(b"x")
        await sent.piece()
        sent.job.hold()

        os.kill(running.pids[0], signal.SIGKILL)
        told = await sent.told()

        assert isinstance(told, WorkerDied)
        await until(lambda: running.pool.ready_workers == 1, "the worker is back")


@pytest.mark.anyio
async def test_a_pool_stops_while_a_worker_is_held(tmp_path: Path) -> None:
    """The client is told; nothing is left."""
    async with RunningPool(tmp_path, STREAM) as running:
        await running.start()
        sent = running.send(b"x")
        await sent.piece()
        sent.job.hold()

        await running.pool.stop()

        assert sent.end is not None
