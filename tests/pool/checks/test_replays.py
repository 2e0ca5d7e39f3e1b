"""Batches that are run again in a real worker."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from marserve.errors import CannotReplay, Draining, HandlerFailed, WorkerDied
from marserve.messages import Answer, Part, Request
from marserve.pool.checks.replays import STREAMS
from marserve.telemetry.timeline import BatchTimes
from support.running_pool import RunningPool

pytestmark = pytest.mark.anyio

SOURCE = """
    import os, time
    from marserve_handlers.context import send_intermediate_predict_response
    from marserve_handlers.errors import PredictionException

    def handle(rows, context):
        if rows is None:
            return None
        bodies = [bytes(row["body"]).decode() for row in rows]
        if "die" in bodies:
            os._exit(3)
        if "raise" in bodies:
            raise ValueError("no")
        if "hang" in bodies:
            time.sleep(60)
        if "stream" in bodies:
            send_intermediate_predict_response(["p"] * len(rows), context.request_ids, "ok", 200, context)
        return [PredictionException("bad", 422) if each == "bad" else f"{each}{len(rows)}" for each in bodies]
"""


def asked(*bodies: str) -> list[Request]:
    """Kept requests with these bodies."""
    return [Request(f"r-{number}", [Part("body", body.encode())]) for number, body in enumerate(bodies)]


async def test_a_batch_runs_as_one_though_it_is_larger_than_the_versions(tmp_path: Path) -> None:
    """And stands in no count."""
    async with RunningPool(tmp_path, SOURCE, batch_size=2) as running:
        await running.start()

        ran = await running.pool.replay(asked("a", "b", "bad"))

        assert [bytes(each.body) for each in ran.ended if isinstance(each, Answer)] == [b"a3", b"b3"]
        assert isinstance(ran.ended[2], HandlerFailed)
        assert (ran.ended[2].message, ran.ended[2].code) == ("bad", 422)
        times = ran.times
        assert (times.size, times.is_first) == (3, True)
        assert times.work is not None
        assert times.sent_at <= times.work.began <= times.landed_at
        assert (running.metrics.requests, dict(running.metrics.answers), running.metrics.busy_seconds) == (0, {}, 0.0)
        assert await running.ask_body(b"x") == b"x1"


async def test_a_batch_that_raises_is_not_run_in_halves(tmp_path: Path) -> None:
    """What was run the first time is run again, and no more."""
    async with RunningPool(tmp_path, SOURCE, batch_size=2) as running:
        await running.start()

        ran = await running.pool.replay(asked("a", "raise"))

        assert [type(each) for each in ran.ended] == [HandlerFailed, HandlerFailed]
        assert await running.ask_body(b"x") == b"x1"


async def test_a_stream_is_said_to_be_one(tmp_path: Path) -> None:
    """The worker serves on."""
    async with RunningPool(tmp_path, SOURCE) as running:
        await running.start()

        ran = await running.pool.replay(asked("stream"))

        assert [str(each) for each in ran.ended] == [STREAMS]
        assert await running.ask_body(b"x") == b"x1"


@pytest.mark.parametrize(("body", "cause"), [("die", "exit"), ("hang", "response_timeout")])
async def test_a_worker_that_ends_is_an_outcome(tmp_path: Path, body: str, cause: str) -> None:
    """Another one takes its place, and the next batch may run again there."""
    async with RunningPool(tmp_path, SOURCE, response_timeout_s=0.5) as running:
        await running.start()

        ran = await running.pool.replay(asked(body))
        again = await running.pool.replay(asked("a")) if running.pool.ready_workers else None
        answer = await running.ask_body(b"x")

        assert [(type(each), each.cause) for each in ran.ended if not isinstance(each, Answer)] == [(WorkerDied, cause)]
        assert again is None or isinstance(again.ended[0], Answer)
        assert answer == b"x1"


async def test_requests_wait_behind_it_and_it_behind_requests(tmp_path: Path) -> None:
    """With one worker, several at once."""
    async with RunningPool(tmp_path, SOURCE) as running:
        await running.start()

        sent = [running.send(b"a") for _ in range(5)]
        ran = await asyncio.gather(*(running.pool.replay(asked("b")) for _ in range(3)))
        answers = [await each.told() for each in sent]

        assert [bytes(answer.body) for answer in answers] == [b"a1"] * 5
        assert [bytes(each.ended[0].body) for each in ran if isinstance(each.ended[0], Answer)] == [b"b1"] * 3
        assert len({(each.times.worker, each.times.sent_at) for each in ran}) == 3
        assert all(isinstance(each.times, BatchTimes) for each in ran)


async def test_a_version_that_runs_calls_side_by_side_runs_none_again(tmp_path: Path) -> None:
    """Its workers cannot be lent."""
    source = "async def handle(data, context):\n    return data"
    async with RunningPool(tmp_path, source, is_concurrent=True) as running:
        await running.start()

        with pytest.raises(CannotReplay, match="calls side by side"):
            await running.pool.replay(asked("a"))


async def test_a_pool_without_workers_and_one_that_stops_run_none_again(tmp_path: Path) -> None:
    """Each says so."""
    async with RunningPool(tmp_path, SOURCE, workers=0, most=1) as running:
        running.pool.start()
        with pytest.raises(CannotReplay, match="no worker that has loaded it"):
            await running.pool.replay(asked("a"))
    async with RunningPool(tmp_path / "other", SOURCE) as running:
        await running.start()
        task = asyncio.create_task(running.pool.replay(asked("hang")))
        await asyncio.sleep(0.1)
        await running.pool.stop()
        with pytest.raises(Draining):
            await task
