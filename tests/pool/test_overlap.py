"""What becomes of requests whose batch is preprocessed beside the one that computes (`overlapPreprocess`)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from marserve.errors import DeadlinePassed, HandlerFailed, WorkerDied
from marserve.messages import Answer
from marserve.option_values import Sample
from support.processes import until
from support.running_pool import RunningPool

pytestmark = pytest.mark.anyio

# Words of a body: `wait` computes until the file `go` is there; `raise`, `die`, `exit` and `hang` do so in preprocess.
SOURCE = """
import contextvars, os, sys, time
from marserve_handlers.base import BaseHandler
from marserve_handlers.context import send_intermediate_predict_response

SET = contextvars.ContextVar("SET")

def note(line):
    with open("calls", "a") as calls:
        calls.write(line + "\\n")

class Handler(BaseHandler):
    def initialize(self, context):
        self.context = self.other_name = context
        SET.set("for every thread")

    def preprocess(self, data):
        words = [bytes(row["body"]).decode() for row in data]
        assert SET.get() == "for every thread"
        print("preprocesses", *words)
        with self.context.span("reads"):
            note("pre " + " ".join(words))
        for index, word in enumerate(words):
            self.other_name.request_processor[index].add_response_property("read", word)
            if word == "raise":
                raise ValueError("no number")
            if word == "die":
                os._exit(3)
            if word == "exit":
                sys.exit(4)
            if word == "hang":
                time.sleep(60)
            if word == "piece":
                send_intermediate_predict_response(["early"] * len(data), None, "", 200, self.context)
        return [(word, self.context.get_request_id(index)) for index, word in enumerate(words)]

    def inference(self, rows):
        note("inf " + " ".join(word for word, _ in rows))
        for word, _ in rows:
            if word.startswith("stream"):
                send_intermediate_predict_response([word] * len(rows), None, "", 200, self.context)
            if word.startswith("wait") or word == "stream wait":
                while not os.path.exists("go"):
                    time.sleep(0.002)
        return rows

    def postprocess(self, rows):
        ids = [self.context.get_request_id(index) for index in range(len(rows))]
        return [f"{word} {read_as} {answered_as}" for (word, read_as), answered_as in zip(rows, ids)]
"""


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[RunningPool]:
    """A pool of one worker that overlaps."""
    async with overlapping(tmp_path) as pool:
        await pool.start()
        yield pool


def overlapping(folder: Path, **options: Any) -> RunningPool:
    """A pool whose worker overlaps; not started."""
    return RunningPool(folder, SOURCE, load={"overlaps": True}, overlap_preprocess=True, **options)


async def ahead(running: RunningPool, *bodies: bytes, first: bytes = b"wait", begun: bytes = b"") -> list[Any]:
    """Send `first`, which computes until `go`, and then these: wait for the first of them, or `begun`, to be read."""
    sent = [running.send(first)]
    await until(lambda: f"inf {first.decode()}" in running.calls(), "the first to compute")
    sent += [running.send(body) for body in bodies]
    await until(lambda: f"pre {(begun or bodies[0]).decode()}" in running.calls(), "the next one to be preprocessed")
    return sent


def go(running: RunningPool) -> None:
    """What waits goes on."""
    running.file("go").touch()


async def test_the_next_batch_is_preprocessed_while_one_computes(running: RunningPool) -> None:
    """One ahead and no further; each has its own ids, headers and spans, whatever name the context has."""
    first, second, third = await ahead(running, b"second", b"third")
    before = running.calls()
    go(running)
    told = [await sent.told() for sent in (first, second, third)]

    assert before == ["pre wait", "inf wait", "pre second"]
    assert [end.body.decode() for end in told] == ["wait r0 r0", "second r1 r1", "third r2 r2"]
    assert [dict(end.headers)["read"] for end in told] == ["wait", "second", "third"]


async def test_what_preprocess_prints_belongs_to_its_own_requests(running: RunningPool) -> None:
    """And not to the batch that computes."""
    first, second = await ahead(running, b"second")
    go(running)
    await first.told()
    await second.told()

    await until(lambda: "preprocesses second" in str(running.log.lines), "its line")
    [line] = [line for line in running.log.lines if "preprocesses second" in str(line)]
    assert "r1" in str(line)
    assert "r0" not in str(line)


async def test_a_preprocess_that_raises_fails_its_own_requests(tmp_path: Path) -> None:
    """In their turn: the batch before is answered, the mate of the guilty item by itself."""
    async with overlapping(tmp_path, batch_size=2) as running:
        await running.start()
        first, bad, mate = await ahead(running, b"raise", b"mate", begun=b"raise mate")
        go(running)

        ends = [await sent.told() for sent in (first, bad, mate)]

        assert isinstance(ends[0], Answer)
        assert isinstance(ends[1], HandlerFailed)
        assert isinstance(ends[2], Answer)
        assert ends[2].body == b"mate r2 r2"


async def test_a_worker_killed_with_two_batches_costs_no_request(running: RunningPool) -> None:
    """Both run once more, and each is answered once."""
    first, second = await ahead(running, b"second")
    os.kill(running.pids[0], signal.SIGKILL)
    go(running)

    assert [(await sent.told()).body for sent in (first, second)] == [b"wait r0 r0", b"second r1 r1"]


async def test_without_retries_only_the_batch_that_computed_is_lost(tmp_path: Path) -> None:
    """As many as without `overlapPreprocess`."""
    async with overlapping(tmp_path, retry_on_worker_death=False) as running:
        await running.start()
        first, second = await ahead(running, b"second")
        os.kill(running.pids[0], signal.SIGKILL)
        go(running)

        assert isinstance(await first.told(), WorkerDied)
        assert (await second.told()).body == b"second r1 r1"


@pytest.mark.parametrize("word", [b"die", b"exit"])
async def test_a_preprocess_that_ends_its_worker_is_found_out(running: RunningPool, word: bytes) -> None:
    """It runs by itself from then on, so that the batch beside it is answered, and the guilty one alone is not."""
    first, bad = await ahead(running, word)
    go(running)

    assert (await first.told()).body == b"wait r0 r0"
    assert isinstance(await bad.told(), WorkerDied)
    assert await running.ask_body(b"x") == b"x r2 r2"


async def test_a_preprocess_that_ends_an_idle_worker_is_its_requests_fault(running: RunningPool) -> None:
    """The batch has begun, though the main thread could not say so."""
    assert isinstance(await running.ask(b"die"), WorkerDied)
    assert running.metrics.worker_deaths["exit"] == 2  # once more, by itself, and no more


async def test_a_request_cancelled_ahead_is_not_computed(running: RunningPool) -> None:
    """Nor does it hold up the next one."""
    first, second = await ahead(running, b"second")
    second.job.cancel()
    go(running)

    await first.told()
    assert await running.ask_body(b"third") == b"third r2 r2"
    assert "inf second" not in running.calls()


async def test_a_deadline_that_passes_ahead_ends_the_request_at_once(running: RunningPool) -> None:
    """It is not computed."""
    first = running.send(b"wait")
    await until(lambda: "inf wait" in running.calls(), "the first to compute")
    late = running.send(b"late", deadline=time.monotonic() + 0.1)

    assert isinstance(await late.told(), DeadlinePassed)
    go(running)
    await first.told()
    assert await running.ask_body(b"x") == b"x r2 r2"
    assert "inf late" not in running.calls()


async def test_a_preprocess_that_hangs_has_the_time_limit_of_its_own_batch(tmp_path: Path) -> None:
    """It begins with its turn, and the batch before is answered."""
    async with overlapping(tmp_path, response_timeout_s=0.5) as running:
        await running.start()
        first, hanging = await ahead(running, b"hang")
        go(running)

        assert isinstance(await first.told(), Answer)
        end = await hanging.told()
        assert isinstance(end, WorkerDied)
        assert end.cause == "response_timeout"


async def test_a_stream_goes_on_while_the_next_batch_is_preprocessed(running: RunningPool) -> None:
    """Its pieces are its own; pieces from preprocess are refused with the way out."""
    first, early = await ahead(running, b"piece", first=b"stream wait")
    go(running)
    await first.told()
    end = await early.told()

    assert [piece.body for piece in first.pieces] == [b"stream wait", b"stream wait r0 r0"]
    assert isinstance(end, HandlerFailed)
    assert "set overlapPreprocess: false" in str(end.thrown)


@pytest.mark.parametrize("leave", ["scaled down", "drained"])
async def test_a_worker_that_leaves_answers_what_it_was_sent_ahead(running: RunningPool, leave: str) -> None:
    """Its end comes after its batches."""
    first, second = await ahead(running, b"second")
    if leave == "drained":
        running.pool.refuse_new()
    else:
        running.pool.scale(0, 0)
    go(running)

    assert [(await sent.told()).body for sent in (first, second)] == [b"wait r0 r0", b"second r1 r1"]


async def test_a_handler_that_cannot_overlap_serves_serially_and_says_so(tmp_path: Path) -> None:
    """Nothing is sent ahead to it for this."""
    source = (
        SOURCE
        + """
    def handle(self, data, context):
        return super().handle(data, context)
"""
    )
    async with RunningPool(tmp_path, source, load={"overlaps": True}, overlap_preprocess=True) as running:
        await running.start()
        first = running.send(b"wait")
        await until(lambda: "inf wait" in running.calls(), "the first to compute")
        second = running.send(b"second")
        assert running.pool.queued == 1
        go(running)

        assert (await first.told()).body == b"wait r0 r0"
        assert (await second.told()).body == b"second r1 r1"
        [warning] = running.pool.warnings
        assert warning.startswith("overlapPreprocess is not used: the handler has a handle of its own")


async def test_another_model_is_not_called_from_preprocess_but_from_inference(tmp_path: Path) -> None:
    """The way there is open while the thread reads: here it ends at a server without other models."""
    source = """
import asyncio
from marserve_handlers.base import BaseHandler
class Handler(BaseHandler):
    def initialize(self, context):
        self.context = context
    def preprocess(self, data):
        words = [bytes(row["body"]).decode() for row in data]
        if words == ["early"]:
            asyncio.run(self.context.call("other"))
        return words
    def inference(self, words):
        asyncio.run(self.context.call("other"))
    def postprocess(self, data):
        return data
"""
    async with RunningPool(tmp_path, source, load={"overlaps": True}, overlap_preprocess=True) as running:
        await running.start()

        early, late = await running.ask(b"early"), await running.ask(b"late")

        assert isinstance(early, HandlerFailed)
        assert "call another model: do it in inference" in str(early.thrown)
        assert isinstance(late, HandlerFailed)
        assert "do it in inference" not in str(late.thrown)


async def test_samples_warm_up_and_certify_a_worker_that_overlaps(tmp_path: Path) -> None:
    """By calls of the handler alone, in the main thread, before and between batches."""
    sample = Sample(None, body=b"sample")
    source = SOURCE.replace('f"{word} {read_as} {answered_as}"', "word")
    load = {"overlaps": True, "warm_up": [sample], "decode_input": False}
    async with RunningPool(
        tmp_path, source, load=load, overlap_preprocess=True, samples=(sample,), warm_up=True, batch_size=2
    ) as running:
        await running.start()

        verdict = await running.pool.check()
        first, second = await ahead(running, b"second")
        go(running)

        assert verdict["passed"], verdict
        assert [(await sent.told()).body for sent in (first, second)] == [b"wait", b"second"]
