"""Real workers whose handlers know something of requests between calls, or run many at once."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from marserve.errors import HandlerFailed, MarserveError, SequenceGone, WorkerDied
from marserve.messages import Answer, Part, Request
from marserve.pool.options import SequenceOptions
from support.processes import until
from support.running_pool import RunningPool, Sent

pytestmark = pytest.mark.anyio

TOTALS = """
    import os

    class Totals:
        def initialize(self, context):
            self.totals = {}

        def handle(self, rows, context):
            answers = []
            for index, row in enumerate(rows):
                name = context.get_sequence_id(index)
                word = bytes(row["body"]).decode()
                if word == "die":
                    os.abort()
                self.totals[name] = self.totals.get(name, "") + word
                answers.append(f"{os.getpid()} {self.totals[name]}")
            return answers
"""

COUNTDOWN = """
    import os, pathlib, time

    class Countdown:
        def initialize(self, context):
            self.left = {}
            self.log = pathlib.Path("steps")

        def handle(self, rows, context):
            answers, criteria = [], []
            with self.log.open("a") as log:
                log.write(",".join("new" if row else "old" for row in rows) + "\\n")
            for index, row in enumerate(rows):
                name = context.get_request_id(index)
                word = bytes(row["body"]).decode() if row else ""
                if word == "die":
                    os.abort()
                if word == "raise":
                    raise ValueError("as asked")
                if word == "crooked":
                    criteria.append(lambda answer: 1 / 0)
                    answers.append("x")
                    continue
                if name not in self.left:
                    self.left[name] = int(word)
                self.left[name] -= 1
                while word == "1000" and not pathlib.Path("go").exists():
                    time.sleep(0.01)
                answers.append(f"{self.left[name]};")
                criteria.append(lambda answer, name=name: self.left[name] <= 0)
            if any(answer == "999;" for answer in answers):
                time.sleep(0.01)
            context.stopping_criteria = criteria
            return answers
"""

SLEEPER = """
    import asyncio, os
    from marserve_handlers.context import send_intermediate_predict_response

    class Sleeper:
        def initialize(self, context):
            self.gate = None
            self.cancelled = 0

        async def handle(self, rows, context):
            if self.gate is None:
                self.gate = asyncio.Event()
            context.metrics.add_counter("runs", 1)
            words = [bytes(row["body"]).decode() for row in rows]
            if words == ["open"]:
                self.gate.set()
            elif words == ["wait"]:
                await self.gate.wait()
            elif words == ["stream"]:
                send_intermediate_predict_response(["a;"], context.request_ids, "", 200, context)
                await self.gate.wait()
            elif words == ["file"]:
                while not os.path.exists("go"):
                    await asyncio.sleep(0.01)
            elif words == ["for ever"]:
                send_intermediate_predict_response(["a;"], context.request_ids, "", 200, context)
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    self.cancelled += 1
                    raise
            elif words == ["die"]:
                os.abort()
            elif words == ["raise"]:
                raise ValueError("as asked")
            elif words == ["cancelled"]:
                return [str(self.cancelled)]
            context.set_response_header(0, "x-words", ",".join(words))
            return [f"{word} by {context.get_request_id(index)}" for index, word in enumerate(words)]
"""


def sequences_of(folder: Path, **more: Any) -> RunningPool:
    """A pool of a handler that keeps a text for each sequence."""
    options = SequenceOptions(max_idle_s=60.0, queue_size=10, most=10)
    return RunningPool(folder, TOTALS, sequences=options, batch_size=4, **more)


def say(running: RunningPool, name: str, word: str) -> Sent:
    """Send a request of a sequence."""
    sent = Sent()
    headers = [(b"ts_request_sequence_id", name.encode())]
    request = Request(f"{name}-{word}", [Part("body", word.encode())], headers)
    sent.job = running.pool.submit(request, sent)
    return sent


async def text_of(sent: Sent) -> tuple[int, str]:
    """Which worker answered, and what it knew."""
    told = await sent.told()
    assert isinstance(told, Answer), told
    pid, _, text = bytes(told.body).decode().partition(" ")
    return int(pid), text


async def steps_of(running: RunningPool) -> list[str]:
    """What the countdown was called with, step by step."""
    return running.file("steps").read_text().split()


# ------------------------------------------------------------------------------------------- sequences


async def test_sequences_have_one_worker_each_and_their_order(tmp_path: Path) -> None:
    """Two workers, three conversations, all sent at once."""
    async with sequences_of(tmp_path, workers=2) as running:
        await running.start()

        sent = {name: [say(running, name, word) for word in "123"] for name in "abc"}
        told = {name: [await text_of(each) for each in line] for name, line in sent.items()}

    for line in told.values():
        assert [text for _, text in line] == ["1", "12", "123"]
        assert len({pid for pid, _ in line}) == 1


async def test_a_dead_worker_s_sequences_are_refused_and_another_s_go_on(tmp_path: Path) -> None:
    """Nobody is answered by a worker that does not know what was said before."""
    async with sequences_of(tmp_path, workers=2) as running:
        await running.start()
        homes = {name: (await text_of(say(running, name, "1")))[0] for name in "ab"}
        assert homes["a"] != homes["b"]

        os.kill(homes["a"], signal.SIGKILL)
        await until(lambda: homes["a"] not in running.pids, "the worker gone")
        await until(lambda: running.pool.ready_workers == 2, "another in its place")
        with pytest.raises(SequenceGone):
            say(running, "a", "2")
        stays = await text_of(say(running, "b", "2"))
        described = running.pool.described["sequences"]
        gauge = running.metrics.read_gauges().sequences

    assert stays == (homes["b"], "12")
    assert described == {"living": 1, "most": 10, "lost": 1}
    assert gauge == 1


async def test_scaling_down_waits_for_sequences_to_end(tmp_path: Path) -> None:
    """The worker is there until then, and gone after."""
    options = SequenceOptions(max_idle_s=1.0, queue_size=10, most=10)
    async with RunningPool(tmp_path, TOTALS, sequences=options, workers=2) as running:
        await running.start()
        homes = {name: (await text_of(say(running, name, "1")))[0] for name in "ab"}

        running.pool.scale(1, 1)
        told = {name: await text_of(say(running, name, "2")) for name in "ab"}
        await running.pool.wait_until_scaled_down()

    assert told == {name: (homes[name], "12") for name in "ab"}


# ------------------------------------------------------------------------------------------- steps


async def test_requests_of_different_lengths_share_steps_and_are_each_answered_whole(tmp_path: Path) -> None:
    """Inputs come once; a piece a step."""
    async with RunningPool(tmp_path, COUNTDOWN, continuous_batching=True, batch_size=2, load=CONTINUOUS) as running:
        await running.start()

        sent = [running.send(word) for word in (b"2", b"3", b"1")]
        for each in sent:
            await each.told()
        steps = await steps_of(running)

    assert [b"".join(bytes(piece.body) for piece in each.pieces) for each in sent] == [b"1;0;", b"2;1;0;", b""]
    assert sent[2].body == b"0;"
    assert steps[0] == "new"
    assert "old,new" in steps


CONTINUOUS = {"is_continuous": True}


async def test_a_death_in_mid_stream_fails_who_has_streamed_and_runs_the_others_again(tmp_path: Path) -> None:
    """The deadly one joins again by itself, and is done for at its second death."""
    async with RunningPool(tmp_path, COUNTDOWN, continuous_batching=True, batch_size=4, load=CONTINUOUS) as running:
        await running.start()
        streams = running.send(b"100000000")
        await streams.piece()

        deadly = running.send(b"die")
        ends = [await streams.told(30), await deadly.told(30)]
        after = await running.ask_body(b"1")

    assert [type(end) for end in ends] == [WorkerDied, WorkerDied]
    assert deadly.job.deaths == 2
    assert after == b"0;"


async def test_who_leaves_is_left_out_and_the_worker_is_free_again(tmp_path: Path) -> None:
    """A stream without an end ends with its client."""
    async with RunningPool(tmp_path, COUNTDOWN, continuous_batching=True, batch_size=2, load=CONTINUOUS) as running:
        await running.start()
        endless = running.send(b"100000000")
        await endless.piece()

        endless.job.cancel()
        body = await running.ask_body(b"1")
        await until(lambda: running.pool.running == 0, "nothing runs")

    assert body == b"0;"
    assert not endless.ends


async def test_criteria_that_raise_fail_the_step(tmp_path: Path) -> None:
    """They are the author's code as much as `handle` is; the worker lives on."""
    async with RunningPool(tmp_path, COUNTDOWN, continuous_batching=True, batch_size=2, load=CONTINUOUS) as running:
        await running.start()

        told = await running.ask(b"crooked")
        raised = await running.ask(b"raise")
        after = await running.ask_body(b"1")
        starts = running.metrics.worker_starts

    assert isinstance(told, HandlerFailed)
    assert isinstance(raised, HandlerFailed)
    assert after == b"0;"
    assert starts == 1


# ------------------------------------------------------------------------------------------- many at once

CONCURRENT = {"is_concurrent": True}


def side_by_side(folder: Path, **more: Any) -> RunningPool:
    """A pool whose worker runs many batches at once."""
    return RunningPool(folder, SLEEPER, is_concurrent=True, load=CONCURRENT, **more)


async def test_a_coroutine_that_waits_keeps_nobody_waiting(tmp_path: Path) -> None:
    """The first two can only end after the third has; each answer is its own request's."""
    async with side_by_side(tmp_path) as running:
        await running.start()

        waiting = [running.send(b"wait") for _ in range(2)]
        opened = await running.ask(b"open")
        told = [await each.told() for each in waiting]

    answers = [end for end in [*told, opened] if isinstance(end, Answer)]
    assert [answer.body for answer in answers] == [b"wait by r0", b"wait by r1", b"open by r2"]
    assert [dict(answer.headers)["x-words"] for answer in answers] == ["wait", "wait", "open"]


async def test_streams_run_side_by_side_as_well(tmp_path: Path) -> None:
    """A piece goes out while its handler waits."""
    async with side_by_side(tmp_path) as running:
        await running.start()
        streams = [running.send(b"stream") for _ in range(2)]
        for each in streams:
            await each.piece()

        await running.ask(b"open")
        for each in streams:
            await each.told()

    assert [[bytes(piece.body) for piece in each.pieces] for each in streams] == [
        [b"a;", b"stream by r0"],
        [b"a;", b"stream by r1"],
    ]


async def test_whoever_leaves_has_the_handler_interrupted(tmp_path: Path) -> None:
    """Its coroutine is cancelled, and may tidy up."""
    async with side_by_side(tmp_path) as running:
        await running.start()
        gone = running.send(b"for ever")
        await gone.piece()

        gone.job.cancel()
        at_once = running.send(b"for ever")
        at_once.job.cancel()
        await until(lambda: running.pool.running == 0, "nothing runs")
        told = await running.ask_body(b"cancelled")

    assert told in (b"1", b"2")  # the second may have begun before it heard
    assert not gone.ends
    assert not at_once.ends


async def test_a_death_has_everybody_run_once_more_but_who_has_streamed(tmp_path: Path) -> None:
    """The deadly one ends at its second death; who was with it has another try."""
    async with side_by_side(tmp_path) as running:
        await running.start()
        streamed = running.send(b"stream")
        await streamed.piece()

        deadly = running.send(b"die")
        ends: list[Answer | MarserveError] = [await streamed.told(30), await deadly.told(30)]
        after = await running.ask(b"open")

    assert [type(end) for end in ends] == [WorkerDied, WorkerDied]
    assert deadly.job.deaths == 2
    assert isinstance(after, Answer)


async def test_one_past_the_response_limit_fails_and_the_others_are_run_again(tmp_path: Path) -> None:
    """The limit is each batch's own; TorchServe has none here."""
    async with side_by_side(tmp_path, response_timeout_s=1.0) as running:
        await running.start()
        overdue = running.send(b"for ever")
        await asyncio.sleep(0.5)
        young = running.send(b"wait")
        first = await overdue.told(30)
        await running.pool.wait_until_ready()
        opened = await running.ask(b"open", timeout_s=30)
        second = await young.told(30)

    assert isinstance(first, WorkerDied)
    assert first.cause == "response_timeout"
    assert isinstance(opened, Answer)
    assert isinstance(second, Answer)
    assert second.body == b"wait by r1"


async def test_a_handler_that_raises_fails_by_itself(tmp_path: Path) -> None:
    """The loop goes on, and what runs beside it."""
    async with side_by_side(tmp_path) as running:
        await running.start()
        waits = running.send(b"wait")

        told = await running.ask(b"raise")
        await running.ask(b"open")
        other = await waits.told()

    assert isinstance(told, HandlerFailed)
    assert isinstance(other, Answer)


async def test_a_worker_that_is_scaled_down_ends_what_it_runs_first(tmp_path: Path) -> None:
    """Both have their answers, and one worker is left."""
    async with side_by_side(tmp_path, workers=2) as running:
        await running.start()
        waiting = [running.send(b"file") for _ in range(2)]

        running.pool.scale(1, 1)
        running.file("go").touch()
        told = [await each.told() for each in waiting]
        await running.pool.wait_until_scaled_down()

    assert all(isinstance(end, Answer) for end in told)
