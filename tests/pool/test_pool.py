"""Tests for a pool with real worker processes: it serves, it survives what workers do, and nothing is left of it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from marserve.errors import (
    DeadlinePassed,
    Draining,
    FingerprintRefused,
    HandlerFailed,
    LoadFailed,
    NoWorker,
    WorkerDied,
)
from marserve.messages import Answer
from marserve.pool.worker_end.cause_of_death import Cause
from support.model_folders import write_model
from support.processes import descendants, living, until, until_blocking
from support.running_pool import RunningPool, worker_environment

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes by way of /proc"),
]

STARTS = ["fork", "fresh"]


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """As the server runs: on uvloop."""
    return "asyncio", {"use_uvloop": True}


# ------------------------------------------------------------------------------------------- the ordinary


@pytest.mark.parametrize("start", STARTS)
async def test_a_pool_answers(tmp_path: Path, start: str) -> None:
    """Its workers forked from a template, or in interpreters of their own."""
    async with RunningPool(tmp_path, start=start, workers=2) as running:
        await running.start()

        answers = await asyncio.gather(*[running.ask(b"hello %d" % number) for number in range(50)])

        assert answers == [Answer(b"hello %d" % number) for number in range(50)]


@pytest.mark.parametrize("start", STARTS)
async def test_a_worker_logs_at_its_models_level_from_its_load_on(tmp_path: Path, start: str) -> None:
    """One that is forked from a template that has loaded the model has its own level, too."""
    source = """
    import logging
    def handle(data, context):
        logging.getLogger("mine").debug("asked" if data else "loaded")
        return [b"" for _ in data or ()]
    """
    async with RunningPool(tmp_path, source, start=start) as running:
        running.launchers.levels.set("debug", "m")
        await running.start()
        running.launchers.levels.set("info")
        await running.ask(b"in between")
        running.launchers.levels.set("debug")
        await running.ask(b"last")
        await until(lambda: "asked" in running.log.texts, "the last line")

        assert running.log.texts == ["loaded", "asked"]


async def test_a_pool_answers_on_asyncios_own_loop_too(tmp_path: Path) -> None:
    """uvloop is not everywhere; pipes, sockets and pidfds must do without it."""
    source = textwrap.dedent(
        """
        import asyncio, os, sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[1])
        from support.running_pool import RunningPool

        async def main():
            assert type(asyncio.get_running_loop()).__module__.startswith("asyncio")
            for start in ("fork", "fresh"):
                async with RunningPool(Path(sys.argv[2]) / start, start=start) as running:
                    await running.start()
                    assert await running.ask_body(b"hello") == b"hello"

        asyncio.run(main())
        """
    )

    tests = str(Path(__file__).parents[1])
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-X", "dev", "-W", "error", "-c", source, tests, str(tmp_path)],
        env=dict(worker_environment()),
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr


@pytest.mark.parametrize("start", STARTS)
async def test_what_workers_print_and_log_arrives_with_its_level(tmp_path: Path, start: str) -> None:
    """And with model, version and worker."""
    async with RunningPool(tmp_path, start=start) as running:
        await running.start()
        [view] = running.pool.workers()

        await running.ask(b"say something")
        awaited = {"printed something", "complained something", "logged something"}
        await until(lambda: awaited <= set(running.log.texts), "its lines")
        await until(lambda: any("warned something" in text for text in running.log.texts), "its warning")

        said = {line.text: line for line in running.log.lines}
        speaker = "template" if start == "fork" else view.id
        assert said["initialising m"][:4] == ("m", "1.0", speaker, "stdout")
        assert said["printed something"][:5] == ("m", "1.0", view.id, "stdout", "INFO")
        assert said["complained something"][:5] == ("m", "1.0", view.id, "stderr", "WARNING")
        assert said["logged something"][:5] == ("m", "1.0", view.id, "stdout", "ERROR")
        assert any("warned something" in line.text and line.level == "WARNING" for line in running.log.lines)


@pytest.mark.parametrize(("start", "how"), [("fork", "forked, model loaded"), ("fresh", "fresh")])
async def test_describe_sees_the_workers(tmp_path: Path, start: str, how: str) -> None:
    """Ids that count up, states, processes, memory, and how they came to life."""
    before = time.time()
    async with RunningPool(tmp_path, start=start, workers=2) as running:
        running.pool.start()
        loading = running.pool.workers()
        await running.pool.wait_until_ready()

        views = running.pool.workers()

        assert [view.status for view in loading] == ["LOADING", "LOADING"]
        assert [view.id for view in views] == ["9000", "9001"]
        assert [view.status for view in views] == ["READY", "READY"]
        assert len({view.pid for view in views} & living([view.pid for view in views])) == 2
        assert all(before <= view.started_at <= time.time() for view in views)
        assert all(view.memory_bytes > 1_000_000 and view.load_s > 0 for view in views)
        assert [view.how_started for view in views] == [how, how]
        assert [view.last_death for view in views] == [None, None]
        assert running.pool.ready_workers == 2
        assert running.pool.is_healthy
        gauges = running.metrics.read_gauges()
        assert gauges.workers == {"ready": 2, "loading": 0, "failed": 0, "stopping": 0}
        assert set(gauges.load_s) == {"W-9000-m_1.0", "W-9001-m_1.0"}
        assert (gauges.oldest_s, gauges.busy_ratio) == (0.0, 0.0)


async def test_ready_workers_are_counted_by_what_their_model_runs_on(tmp_path: Path) -> None:
    """As handlers say at the load; those that say nothing are not among them."""
    saying = """
        def handle(data, context):
            context.computes_on = "onnx-int8"
            return data and [b"" for _ in data]
        """
    for source, computing in ((saying, {"onnx-int8": 2}), ("def handle(data, context):\n    return data\n", {})):
        async with RunningPool(tmp_path, source, workers=2) as running:
            running.pool.start()
            assert running.metrics.read_gauges().computing == {}  # none is ready
            await running.pool.wait_until_ready()

            assert running.metrics.read_gauges().computing == computing


async def test_the_bytes_of_inputs_and_answers_are_counted(tmp_path: Path) -> None:
    """And how long workers were busy, by the sample of the start."""
    async with RunningPool(tmp_path) as running:
        running.pool.start()
        assert await running.ask_body(b"twelve bytes") == b"twelve bytes"
        metrics = running.metrics

        assert (metrics.input_bytes, metrics.answer_bytes) == (12, 12)
        busy_ratio = metrics.read_gauges().busy_ratio
        assert busy_ratio is not None
        assert 0 < busy_ratio < 1


async def test_a_request_sent_before_the_workers_are_ready_is_answered(tmp_path: Path) -> None:
    """It waits for them."""
    async with RunningPool(tmp_path) as running:
        running.pool.start()

        assert await running.ask_body(b"early") == b"early"


async def test_with_the_fixed_policy_a_request_sent_early_waits_its_delay_and_no_longer(tmp_path: Path) -> None:
    """The collecting begins when a worker comes, and somebody must look at the clock for it."""
    async with RunningPool(tmp_path, batch_size=8, batch_policy="fixed", max_batch_delay_s=0.02) as running:
        running.pool.start()

        assert await running.ask_body(b"early") == b"early"


async def test_a_batch_sent_ahead_is_answered_in_its_turn(tmp_path: Path) -> None:
    """Everything comes back to whom it belongs to, thousands of times."""
    async with RunningPool(tmp_path, batch_size=4, queue_size=1000) as running:
        await running.start()
        await running.ask(b"teach")  # now the worker is known to be quick

        sent = [running.send(b"%d" % number) for number in range(500)]
        bodies = [(await one.told()).body for one in sent]  # type: ignore[union-attr]

        assert bodies == [b"%d" % number for number in range(500)]
        sizes = running.metrics.batch_sizes
        assert sizes.sum == 501


async def test_an_answer_carries_what_the_handler_set(tmp_path: Path) -> None:
    """Status, reason and headers, each for its own item."""
    async with RunningPool(tmp_path, batch_size=2) as running:
        running.pool.start()

        told, plain = [await sent.told() for sent in (running.send(b"status 418"), running.send(b"plain"))]

        assert told == Answer(b"418", 418, "As told", [("X-Told", "418")])
        assert plain == Answer(b"plain")


async def test_answers_that_cannot_be_sent_fail_alone(tmp_path: Path) -> None:
    """One is too large, one is no JSON; their mates are fine."""
    async with RunningPool(tmp_path, batch_size=4, load={"max_answer_bytes": 1000}) as running:
        running.pool.start()

        sent = [running.send(body) for body in (b"large 1001", b"unserialisable", b"large 1000", b"fine")]
        ends = [await one.told() for one in sent]

        assert isinstance(ends[0], HandlerFailed)
        assert "max_response_size" in ends[0].message
        assert isinstance(ends[1], HandlerFailed)
        assert ends[1].message == "Unsupported model output data type."
        assert [end.body for end in ends[2:]] == [b"x" * 1000, b"fine"]  # type: ignore[union-attr]
        assert len(running.calls()) == 1


async def test_megabytes_travel_both_ways(tmp_path: Path) -> None:
    """A whole batch of them, larger than any buffer."""
    async with RunningPool(tmp_path, ECHO_BYTES, batch_size=4, load={"max_answer_bytes": 20_000_000}) as running:
        running.pool.start()
        bodies = [bytes([number]) * 5_000_000 for number in range(4)]

        sent = [running.send(body) for body in bodies]
        ends = [await one.told(30.0) for one in sent]

        assert [end.body == body for end, body in zip(ends, bodies, strict=True)] == [True] * 4  # type: ignore[union-attr]


ECHO_BYTES = """
def handle(data, context):
    return [row["body"] for row in data] if data else None
"""


# ------------------------------------------------------------------------------------------- workers that die


@pytest.mark.parametrize("start", STARTS)
async def test_killing_workers_under_load_loses_no_request(tmp_path: Path, start: str) -> None:
    """C1 in small: each answer is the client's own, none is lost, none comes twice."""
    async with RunningPool(tmp_path, ECHO_BYTES, start=start, workers=2, batch_size=8, queue_size=1000) as running:
        await running.start()
        turns = [0] * 32
        is_over = False

        async def client(name: int) -> None:
            while not is_over:
                nonce = b"%d/%d" % (name, turns[name])
                assert await running.ask_body(nonce) == nonce
                turns[name] += 1

        def are_answered_since(before: list[int]) -> bool:
            return all(now > then for now, then in zip(turns, before, strict=True))

        async def killer() -> None:
            nonlocal is_over
            for turn in range(8):
                await until(lambda: running.pool.ready_workers == 2, "both workers are back")
                running.look()
                os.kill(running.pids[turn % 2], signal.SIGKILL)
                await until(lambda deaths=turn + 1: running.metrics.worker_deaths["killed"] == deaths, "its death")  # type: ignore[misc]
                # A request that is in flight at two deaths is taken for their cause.
                await until(lambda before=list(turns): are_answered_since(before), "an answer for each client")  # type: ignore[misc]
            is_over = True

        await asyncio.gather(*[client(name) for name in range(32)], killer())

        assert running.metrics.worker_deaths["killed"] == 8
        assert not running.metrics.errors


async def test_a_deadly_item_costs_two_workers_and_its_mates_nothing(tmp_path: Path) -> None:
    """C3 and C4: fifteen answers, one error, and the body is refused from then on."""
    async with RunningPool(tmp_path, batch_size=16, workers=2) as running:
        running.pool.start()

        sent = [running.send(b"exit 7" if number == 5 else b"%d" % number) for number in range(16)]
        ends = [await one.told() for one in sent]

        died = ends.pop(5)
        assert isinstance(died, WorkerDied)
        assert (died.message, died.cause) == ("Worker died.", "exit")
        assert [end.body for end in ends] == [b"%d" % number for number in range(16) if number != 5]  # type: ignore[union-attr]
        await until(lambda: running.metrics.worker_deaths["exit"] == 2, "two deaths")
        with pytest.raises(FingerprintRefused):
            running.send(b"exit 7")
        assert await running.ask_body(b"alive") == b"alive"
        death = running.pool.last_death
        assert death is not None
        assert (death.cause, "exit status 7" in death.detail) == ("exit", True)


@pytest.mark.parametrize(("body", "cause"), [(b"segfault", "signal"), (b"exit 0", "exit")])
async def test_a_death_has_its_cause(tmp_path: Path, body: bytes, cause: str) -> None:
    """In the client's error, in describe, and in the counters."""
    async with RunningPool(tmp_path, retry_on_worker_death=False) as running:
        await running.start()

        end = await running.ask(body)

        assert isinstance(end, WorkerDied)
        assert end.cause == cause
        await until(lambda: running.pool.ready_workers == 1, "its replacement")
        assert dict(running.metrics.worker_deaths) == {cause: 1}
        assert running.metrics.retried == 0
        [view] = running.pool.workers()
        assert (view.restarts, view.last_death is not None) == (1, True)
        assert len(running.calls()) == 1


async def test_a_worker_that_exits_by_sysexit_dies_with_its_status(tmp_path: Path) -> None:
    """Even with a thread of its own still running."""
    source = """
    import sys, threading, time
    def handle(data, context):
        if data and bytes(data[0]["body"]) == b"leave":
            threading.Thread(target=time.sleep, args=(60,)).start()
            sys.exit(3)
        return ["here"] if data else None
    """
    async with RunningPool(tmp_path, source, retry_on_worker_death=False) as running:
        await running.start()

        end = await running.ask(b"leave")

        assert isinstance(end, WorkerDied)
        assert running.pool.last_death is not None
        assert "exit status 3" in running.pool.last_death.detail
        assert await running.ask_body(b"") == b"here"


@pytest.mark.parametrize("start", STARTS)
async def test_a_killed_workers_replacement_answers_soon(tmp_path: Path, start: str) -> None:
    """It is started without a pause; the promise in milliseconds is the long test's."""
    async with RunningPool(tmp_path, start=start) as running:
        await running.start()
        [pid] = running.pids
        pauses = set()

        def is_replaced() -> bool:
            [view] = running.pool.workers()
            pauses.add(view.next_start_at)
            return view.status == "READY" and view.pid != pid

        os.kill(pid, signal.SIGKILL)
        await until(is_replaced, "its replacement")

        assert pauses == {None}
        assert await running.ask_body(b"x") == b"x"


@pytest.mark.long
async def test_a_killed_forked_workers_replacement_answers_within_200_ms(tmp_path: Path) -> None:
    """The promise exactly; the median of ten."""
    async with RunningPool(tmp_path, start="fork") as running:
        await running.start()
        took = []
        for _ in range(10):
            [pid] = running.pids
            began = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            await until(lambda pid=pid: running.pids != [pid], "the death is seen")  # type: ignore[misc]
            await running.ask(b"x")
            took.append(time.monotonic() - began)

        assert sorted(took)[5] < 0.2


@pytest.mark.parametrize("start", STARTS)
async def test_many_deaths_leave_no_descriptor_open(tmp_path: Path, start: str) -> None:
    """Sockets, pipes, pages, pidfds: a pool that replaces workers for months must not run out."""
    async with RunningPool(tmp_path, start=start) as running:
        await running.start()
        before = len(running.left_open())

        for _ in range(10 if start == "fork" else 3):
            [pid] = running.pids
            os.kill(pid, signal.SIGKILL)
            await until(lambda pid=pid: running.pids not in ([], [pid]), "a replacement")  # type: ignore[misc]
            await running.ask(b"x")

        await until(lambda: len(running.left_open()) <= before, f"as many as before, but {running.left_open()}")
        assert len(running.pool.lives.by_key) == 1


async def test_a_workers_death_between_two_batches_is_seen(tmp_path: Path) -> None:
    """It had nothing to answer, so nobody else would notice."""
    async with RunningPool(tmp_path) as running:
        await running.start()
        [pid] = running.pids

        os.kill(pid, signal.SIGKILL)
        await until(lambda: running.pids not in ([], [pid]), "a replacement")

        assert await running.ask_body(b"x") == b"x"


async def test_a_template_that_dies_takes_its_workers_and_the_pool_comes_back(tmp_path: Path) -> None:
    """A new template loads the model; what was running is run again."""
    async with RunningPool(tmp_path, start="fork", workers=2) as running:
        await running.start()
        pids = running.pids
        [template] = running.look() - set(pids)
        waiting = running.send(b"touch started finish")
        await until(running.file("started").exists, "it runs")

        os.kill(template, signal.SIGKILL)
        await until(lambda: not living(pids), "its workers are gone")
        running.file("finish").touch()

        assert (await waiting.told()).body == b"saw finish"  # type: ignore[union-attr]
        await until(lambda: running.pool.ready_workers == 2, "two new workers")


# ------------------------------------------------------------------------------------------- handlers that raise


async def test_a_raising_item_fails_alone_and_its_traceback_is_logged(tmp_path: Path) -> None:
    """Under the request's id; the client sees nothing of it."""
    async with RunningPool(tmp_path, batch_size=8) as running:
        running.pool.start()

        sent = [running.send(b"raise hell" if number == 2 else b"%d" % number) for number in range(8)]
        ends = [await one.told() for one in sent]

        failed = ends.pop(2)
        assert isinstance(failed, HandlerFailed)
        assert (failed.message, failed.code) == ("Prediction failed", None)
        assert all(isinstance(end, Answer) for end in ends)
        errors = [line.text for line in running.log.lines if line.level == "ERROR"]
        assert errors[0].startswith(f"Request {sent[2].job.request.id}:")
        assert errors[-1] == "ValueError: told to raise hell"
        assert not running.metrics.worker_deaths


async def test_a_handler_of_another_length_fails_each_item_that_it_cannot_answer(tmp_path: Path) -> None:
    """It answers one whatever it is sent: alone, everybody is served."""
    source = """
    def handle(data, context):
        return [bytes(data[0]["body"])] if data else None
    """
    async with RunningPool(tmp_path, source, batch_size=4) as running:
        running.pool.start()

        sent = [running.send(b"%d" % number) for number in range(4)]

        assert [(await one.told()).body for one in sent] == [b"0", b"1", b"2", b"3"]  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------------- limits


async def check_hang(tmp_path: Path, body: bytes, *, limit_s: float, late_s: float) -> None:
    """C5: `Worker died.` at the limit, at most `late_s` more, the worker replaced, the others untouched."""
    async with RunningPool(tmp_path, HANGS, workers=2, response_timeout_s=limit_s) as running:
        await running.start()

        began = time.monotonic()
        hanging = running.send(body)
        others = [await running.ask_body(b"%d" % number) for number in range(20)]
        end = await hanging.told()
        took = time.monotonic() - began

        assert isinstance(end, WorkerDied)
        assert (end.cause, str(end)) == ("response_timeout", "Worker died.")
        assert limit_s <= took <= limit_s + late_s
        assert others == [b"%d" % number for number in range(20)]
        await until(lambda: running.pool.ready_workers == 2, "its replacement")
        assert running.metrics.retried == 0
        assert running.file("hangs").read_text() == "x"
        assert dict(running.metrics.worker_deaths) == {"response_timeout": 1}


HANGING = [b"sleep 30", b"spin", b"lock"]


@pytest.mark.parametrize("body", HANGING)
async def test_a_hanging_handler_is_ended_at_the_limit_and_never_run_again(tmp_path: Path, body: bytes) -> None:
    """C5, at three times its figure."""
    await check_hang(tmp_path, body, limit_s=1.0, late_s=1.5)


@pytest.mark.long
@pytest.mark.parametrize("body", HANGING)
async def test_a_hanging_handler_is_ended_within_half_a_second_of_the_limit(tmp_path: Path, body: bytes) -> None:
    """C5, the figure."""
    await check_hang(tmp_path, body, limit_s=3.0, late_s=0.5)


HANGS = """
import threading, time
lock = threading.Lock()
def handle(data, context):
    if data is None:
        return None
    body = bytes(data[0]["body"])
    if body in (b"sleep 30", b"spin", b"lock"):
        with open("hangs", "a") as file:
            file.write("x")
    if body == b"sleep 30":
        time.sleep(30)
    if body == b"lock":
        lock.acquire()
        lock.acquire()
    while body == b"spin":
        pass
    return [body]
"""


async def test_the_limit_runs_for_each_batch_by_itself(tmp_path: Path) -> None:
    """Six batches of 0.3 s in a row break no limit of a second, whichever was sent ahead when."""
    async with RunningPool(tmp_path, response_timeout_s=1.0, max_batch_delay_s=0.0) as running:
        await running.start()
        running.pool.dispatcher.lanes.by_key[
            next(iter(running.pool.lives.by_key))
        ].mean_run_s = 0.001  # believed to be quick

        ends = await asyncio.gather(*[running.ask(b"sleep 0.3 %d" % number) for number in range(6)])

        assert all(isinstance(end, Answer) for end in ends), ends
        assert not running.metrics.worker_deaths


async def test_a_stopped_worker_is_replaced_at_the_limit(tmp_path: Path) -> None:
    """C9: it neither runs nor dies by itself; what it never began counts as begun."""
    async with RunningPool(tmp_path, workers=1, response_timeout_s=1.0) as running:
        await running.start()
        [pid] = running.pids
        os.kill(pid, signal.SIGSTOP)

        end = await running.ask(b"x")

        assert isinstance(end, WorkerDied)
        assert end.cause == "response_timeout"
        assert await running.ask_body(b"y") == b"y"
        assert not living([pid])


@pytest.mark.parametrize("start", STARTS)
async def test_a_load_that_takes_too_long_is_ended(tmp_path: Path, start: str) -> None:
    """`startupTimeout`; nothing of it is left, and the reason is kept."""
    source = """
    import time
    time.sleep(60)
    """
    async with RunningPool(tmp_path, source, start=start, startup_timeout_s=0.5) as running:
        began = time.monotonic()

        with pytest.raises(LoadFailed, match=r"Failed to start workers for model m version: 1\.0") as caught:
            await running.start()

        assert 0.5 <= time.monotonic() - began < 5.0
        assert "startupTimeout, 0.5 s" in caught.value.reason
        assert running.pool.last_death is not None
        assert running.pool.last_death.cause == Cause.STARTUP_TIMEOUT


async def test_a_template_that_is_given_up_does_not_cost_the_other_slots(tmp_path: Path) -> None:
    """One began to wait for it later; when the first gives it up, the second tries again like everybody else."""
    source = """
    import os, time
    if not os.path.exists("mended"):
        time.sleep(60)
    def handle(data, context):
        return ["mended"] if data else None
    """
    async with RunningPool(tmp_path, source, start="fork", startup_timeout_s=3.0) as running:
        running.pool.start()
        await asyncio.sleep(0.3)
        running.pool.scale(2, 2)
        with pytest.raises(LoadFailed):
            await running.pool.wait_until_ready()

        running.file("mended").touch()
        await until(lambda: running.pool.ready_workers == 2, "both slots recover", timeout_s=60.0)

        assert await running.ask_body(b"x") == b"mended"


# ------------------------------------------------------------------------------------------- loads that fail


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(
    ("source", "cause", "said"),
    [
        ("import no_such_module_anywhere", Cause.MISSING_MODULE, "no_such_module_anywhere"),
        ("def handle(data, context:\n", Cause.LOAD_FAILED, "SyntaxError"),
        ("raise MemoryError", Cause.OUT_OF_MEMORY, "MemoryError"),
        ("open('no/such/file')", Cause.MISSING_FILE, "no/such/file"),
        ("raise KeyboardInterrupt", Cause.LOAD_FAILED, "KeyboardInterrupt"),
        ("class A: pass\nclass B: pass\n", Cause.LOAD_FAILED, "Expected only one class"),
        ("import handler_two", Cause.MISSING_MODULE, "handler_two"),
    ],
    ids=["missing module", "syntax", "memory", "missing file", "interrupt", "two classes", "its own module"],
)
async def test_a_load_that_raises_is_told_with_its_cause_and_traceback(
    tmp_path: Path, start: str, source: str, cause: Cause, said: str
) -> None:
    """To whoever registers, and kept for describe."""
    async with RunningPool(tmp_path, source, start=start) as running:
        with pytest.raises(LoadFailed) as caught:
            await running.start()

        assert caught.value.out_of_memory == (cause is Cause.OUT_OF_MEMORY)
        assert said in caught.value.reason
        death = running.pool.last_death
        assert death is not None
        assert death.cause == cause
        assert "Traceback" in death.traceback
        assert said.partition("/")[0] in death.traceback


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(
    ("source", "cause", "said"),
    [
        ("import sys; sys.exit(3)", Cause.EXIT, "exit status 3"),
        ("import os; os._exit(5)", Cause.EXIT, "exit status 5"),
        ("import os; os.kill(os.getpid(), 11)", Cause.SIGNAL, "SIGSEGV"),
        ("import sys; print('my last words', flush=True); sys.exit(1)", Cause.EXIT, "my last words"),
    ],
    ids=["sys.exit", "os._exit", "segfault", "last words"],
)
async def test_a_load_that_ends_the_process_is_told_with_its_end_and_last_words(
    tmp_path: Path, start: str, source: str, cause: Cause, said: str
) -> None:
    """There is no traceback to show."""
    async with RunningPool(tmp_path, source, start=start) as running:
        with pytest.raises(LoadFailed) as caught:
            await running.start()

        assert said in caught.value.reason
        assert running.pool.last_death is not None
        assert running.pool.last_death.cause == cause


@pytest.mark.parametrize("start", STARTS)
async def test_a_failed_load_is_tried_again_and_recovers(tmp_path: Path, start: str) -> None:
    """Once more at once; requests wait meanwhile."""
    source = """
    import os
    if not os.path.exists("second"):
        open("second", "w").close()
        raise RuntimeError("not yet")
    def handle(data, context):
        return ["recovered"] if data else None
    """
    async with RunningPool(tmp_path, source, start=start) as running:
        running.pool.start()

        assert await running.ask_body(b"") == b"recovered"

        [view] = running.pool.workers()
        assert view.restarts == 1
        assert view.last_death is not None


async def test_a_slot_that_gave_up_is_told_so_and_scaling_tries_again(tmp_path: Path) -> None:
    """Requests are refused meanwhile, and those that waited are told; then the cause is gone."""
    source = """
    import os
    if not os.path.exists("mended"):
        raise RuntimeError("broken")
    def handle(data, context):
        return ["mended"] if data else None
    """
    async with RunningPool(tmp_path, source, max_retry_timeout_s=0.0) as running:
        running.pool.start()
        waiting = running.send(b"early")

        told = await waiting.told()
        assert isinstance(told, NoWorker)
        assert "its workers ended, the last one by load_failed" in told.message
        assert "sequence" not in told.message
        assert not running.pool.is_healthy
        assert running.metrics.read_gauges().workers["failed"] == 1
        assert [view.status for view in running.pool.workers()] == ["UNLOADING"]
        with pytest.raises(NoWorker, match="has no worker to serve inference request: its workers ended"):
            running.send(b"refused")

        running.file("mended").touch()
        running.pool.scale(1, 1)
        assert await running.pool.wait_until_ready()
        assert running.pool.is_healthy
        assert await running.ask_body(b"x") == b"mended"


async def test_waiting_for_workers_ends_with_the_first_failure(tmp_path: Path) -> None:
    """And not with those that happened before."""
    source = """
    import os, time
    if not os.path.exists("mended"):
        raise RuntimeError("broken")
    def handle(data, context): return data
    """
    async with RunningPool(tmp_path, source, max_retry_timeout_s=0.0) as running:
        with pytest.raises(LoadFailed, match=r"Failed to start workers"):
            await running.start()
        running.file("mended").touch()
        running.pool.scale(1, 1)

        assert await running.pool.wait_until_ready()


# ------------------------------------------------------------------------------------------- scaling


@pytest.mark.parametrize("start", STARTS)
async def test_scaling_up_and_down(tmp_path: Path, start: str) -> None:
    """Workers come and go; those that are left keep their ids."""
    async with RunningPool(tmp_path, start=start) as running:
        await running.start()
        [first] = running.pids

        running.pool.scale(3, 3)
        assert await running.pool.wait_until_ready()
        three = running.pids
        running.look()
        running.pool.scale(1, 1)
        await running.pool.wait_until_scaled_down()

        assert (len(set(three)), three[0]) == (3, first)
        assert running.pids == [first]
        assert living(three) == {first}
        assert await running.ask_body(b"pid") == b"%d" % first
        assert not running.metrics.worker_deaths


async def test_between_minimum_and_maximum_nothing_changes(tmp_path: Path) -> None:
    """TorchServe's rule: fewer than the minimum, more than the maximum, or as it is."""
    async with RunningPool(tmp_path, workers=2) as running:
        await running.start()
        pids = running.pids

        running.pool.scale(1, 3)

        assert running.pids == pids
        assert (running.pool.minimum, running.pool.maximum) == (1, 3)


async def test_scaling_down_lets_a_running_batch_end(tmp_path: Path) -> None:
    """Nothing is lost, and nothing is run twice."""
    async with RunningPool(tmp_path, workers=2) as running:
        await running.start()
        both = [running.send(b"touch started%d finish" % number) for number in range(2)]
        await until(lambda: all(running.file(f"started{number}").exists() for number in range(2)), "both run")
        running.look()

        running.pool.scale(1, 1)
        after = running.send(b"after")
        running.file("finish").touch()

        assert [(await sent.told()).body for sent in both] == [b"saw finish"] * 2  # type: ignore[union-attr]
        assert (await after.told()).body == b"after"  # type: ignore[union-attr]
        await running.pool.wait_until_scaled_down()
        assert len(living(running.look())) == 2  # one worker and the template
        assert len(running.calls()) == 3


async def test_scaling_to_nothing_lets_the_running_end_and_refuses_the_rest(tmp_path: Path) -> None:
    """What waits could wait for ever."""
    async with RunningPool(tmp_path) as running:
        await running.start()
        runs = running.send(b"touch started finish")
        await until(running.file("started").exists, "it runs")
        waits = running.send(b"waits")

        running.pool.scale(0, 0)

        assert isinstance(waits.end, NoWorker)
        with pytest.raises(NoWorker):
            running.send(b"late")
        running.file("finish").touch()
        assert (await runs.told()).body == b"saw finish"  # type: ignore[union-attr]
        await running.pool.wait_until_scaled_down()
        assert running.pool.workers() == []
        assert running.pool.is_healthy
        running.pool.scale(1, 1)
        assert await running.pool.wait_until_ready()
        assert await running.ask_body(b"again") == b"again"


async def test_scaling_to_nothing_while_a_batch_raises_tells_its_mates(tmp_path: Path) -> None:
    """They cannot be run by themselves any more."""
    async with RunningPool(tmp_path, batch_size=2) as running:
        running.pool.start()
        sent = [running.send(b"touch started finish"), running.send(b"raise")]
        await until(running.file("started").exists, "it runs")

        running.pool.scale(0, 0)
        running.file("finish").touch()

        assert [type(await one.told()) for one in sent] == [NoWorker, NoWorker]


async def test_scaling_down_while_workers_load_does_not_wait_for_them(tmp_path: Path) -> None:
    """Nobody needs them."""
    source = """
    import time
    time.sleep(60)
    """
    for start in STARTS:
        async with RunningPool(tmp_path / start, source, start=start) as running:
            running.pool.start()
            await until(running.look, "a process")

            running.pool.scale(0, 0)
            began = time.monotonic()
            await running.pool.wait_until_scaled_down()

            assert time.monotonic() - began < 6.0
            assert running.pool.workers() == []


async def test_who_waits_for_workers_hears_that_the_pool_was_scaled_meanwhile(tmp_path: Path) -> None:
    """It can no longer be as they wished."""
    async with RunningPool(tmp_path, "import time; time.sleep(60)") as running:
        running.pool.start()
        waiting = asyncio.ensure_future(running.pool.wait_until_ready())
        await asyncio.sleep(0)

        running.pool.scale(0, 0)

        assert await asyncio.wait_for(waiting, 5.0) is False


# ------------------------------------------------------------------------------------------- deadlines and cancels


async def test_a_cancelled_running_job_is_seen_by_its_handler(tmp_path: Path) -> None:
    """Through its context, so that it may stop working in vain."""
    async with RunningPool(tmp_path) as running:
        await running.start()
        sent = running.send(b"until_cancelled")
        await until(running.file("working").exists, "it runs")

        sent.job.cancel()
        await until(running.file("noticed").exists, "the handler noticed")

        assert await running.ask_body(b"next") == b"next"
        assert sent.ends == []


async def test_expired_items_never_reach_the_handler(tmp_path: Path) -> None:
    """D3: neither those that expired in the queue nor those that did on the wire."""
    async with RunningPool(tmp_path, batch_size=4, max_batch_delay_s=0.0) as running:
        await running.start()
        await running.ask(b"teach")
        busy = running.send(b"touch started finish")
        await until(running.file("started").exists, "it runs")

        deadline = time.monotonic() + 0.1
        late = [running.send(b"late %d" % number, deadline=deadline) for number in range(8)]
        ends = [await sent.told() for sent in late]
        ended = time.monotonic()
        running.file("finish").touch()
        await busy.told()
        await running.ask(b"last")

        assert all(isinstance(end, DeadlinePassed) for end in ends)
        assert deadline <= ended < deadline + 1.0
        assert not any("late" in call for call in running.calls())
        assert running.metrics.expired == 8


async def test_a_deadline_ends_a_running_request_while_its_worker_goes_on(tmp_path: Path) -> None:
    """The client hears at once; the answer is thrown away; the worker is none the worse."""
    async with RunningPool(tmp_path) as running:
        await running.start()
        [pid] = running.pids
        sent = running.send(b"touch started finish", deadline=time.monotonic() + 0.1)

        end = await sent.told()
        running.file("finish").touch()

        assert isinstance(end, DeadlinePassed)
        assert end.where == "worker"
        assert await running.ask_body(b"pid") == b"%d" % pid
        assert len(sent.ends) == 1


async def test_pieces_of_a_stream_arrive_in_order_while_the_handler_runs(tmp_path: Path) -> None:
    """The last one ends the stream; all items of the batch stream in step."""
    source = """
    import os, time
    from marserve_handlers.context import send_intermediate_predict_response
    def handle(data, context):
        if data is None:
            return None
        for turn in range(3):
            pieces = [f"{bytes(row['body']).decode()}{turn} " for row in data]
            send_intermediate_predict_response(pieces, context.request_ids, "", 200, context)
        while not os.path.exists("finish"):
            time.sleep(0.002)
        return ["end" for row in data]
    """
    async with RunningPool(tmp_path, source, batch_size=2) as running:
        running.pool.start()
        one, two = running.send(b"a"), running.send(b"b")
        await until(lambda: len(two.pieces) == 3, "three pieces while it runs")
        early = [piece.body for piece in one.pieces]
        running.file("finish").touch()

        assert (await one.told()).body == (await two.told()).body == b"end"  # type: ignore[union-attr]
        assert early == [b"a0 ", b"a1 ", b"a2 "]
        assert [piece.body for piece in two.pieces] == [b"b0 ", b"b1 ", b"b2 ", b"end"]
        assert [dict(piece.headers)["ts_stream_next"] for piece in two.pieces] == ["true", "true", "true", "false"]


async def test_a_stream_that_keeps_sending_is_within_its_limit(tmp_path: Path) -> None:
    """`responseTimeout` begins anew with each piece, and ends a stream that stalls; nothing of it is run again."""
    source = """
    import time
    from marserve_handlers.context import send_intermediate_predict_response
    def handle(data, context):
        if data is None:
            return None
        for turn in range(6):
            time.sleep(0.2)
            send_intermediate_predict_response([str(turn)], context.request_ids, "", 200, context)
        if bytes(data[0]["body"]) == b"stall":
            time.sleep(30)
        return ["end"]
    """
    async with RunningPool(tmp_path, source, response_timeout_s=1.0) as running:
        await running.start()

        fine, stalled = await running.ask(b"fine"), running.send(b"stall")
        end = await stalled.told()

        assert isinstance(fine, Answer)
        assert isinstance(end, WorkerDied)
        assert len(stalled.pieces) == 6
        assert running.metrics.retried == 0


# ------------------------------------------------------------------------------------------- the end


async def test_stopping_drains_what_was_accepted(tmp_path: Path) -> None:
    """New requests are refused; what runs and what waits is answered."""
    async with RunningPool(tmp_path) as running:
        await running.start()
        runs = running.send(b"touch started finish")
        await until(running.file("started").exists, "it runs")
        waits = running.send(b"waits")

        stopping = asyncio.ensure_future(running.pool.stop(drain_s=10.0))
        await asyncio.sleep(0)
        with pytest.raises(Draining):
            running.send(b"late")
        running.file("finish").touch()
        await stopping

        assert (runs.body, waits.body) == (b"saw finish", b"waits")
        assert running.pool.workers() == []


async def test_a_drain_ends_at_its_deadline(tmp_path: Path) -> None:
    """What is left is counted and told."""
    async with RunningPool(tmp_path) as running:
        await running.start()
        runs = running.send(b"sleep 30")
        await until(running.calls, "it runs")
        waits = running.send(b"waits")

        left = await running.pool.drain(0.1)
        await running.pool.stop()

        assert left == 2
        assert isinstance(runs.end, Draining)
        assert isinstance(waits.end, Draining)


async def test_a_drain_ends_when_the_last_client_leaves(tmp_path: Path) -> None:
    """Nobody else would tell it."""
    async with RunningPool(tmp_path, "import time; time.sleep(60)") as running:
        running.pool.start()
        sent = running.send(b"waits")
        draining = asyncio.ensure_future(running.pool.drain(30.0))
        await asyncio.sleep(0)

        sent.job.cancel()

        assert await asyncio.wait_for(draining, 5.0) == 0


async def test_stopping_twice_and_at_once_is_stopping_once(tmp_path: Path) -> None:
    """Whoever asks waits for the end."""
    async with RunningPool(tmp_path, workers=2) as running:
        await running.start()
        running.look()

        await asyncio.gather(running.pool.stop(), running.pool.stop(), running.pool.stop(0.1))
        await running.pool.stop()

        assert not living(running.look())
        with pytest.raises(Draining):
            running.send(b"x")


@pytest.mark.parametrize("start", STARTS)
async def test_stopping_while_workers_start(tmp_path: Path, start: str) -> None:
    """At whatever moment of their start."""
    for delay_s in (0.0, 0.005, 0.02, 0.06, 0.15):
        async with RunningPool(tmp_path / str(delay_s), start=start, workers=2) as running:
            running.pool.start()
            await asyncio.sleep(delay_s)
            running.look()

            await running.pool.stop()

            assert running.pool.workers() == []


async def test_stopping_while_a_slot_waits_for_its_next_try(tmp_path: Path) -> None:
    """It need not wait any longer."""
    async with RunningPool(tmp_path, "raise RuntimeError") as running:
        running.pool.start()
        await until(lambda: running.pool.workers()[0].restarts == 1 and not running.pids, "it waits")

        began = time.monotonic()
        await running.pool.stop()

        assert time.monotonic() - began < 5.0


async def test_stopping_does_not_wait_for_what_a_retired_worker_still_does(tmp_path: Path) -> None:
    """It was to end in its own time; now there is none."""
    async with RunningPool(tmp_path) as running:
        await running.start()
        runs = running.send(b"sleep 60")
        await until(running.calls, "it runs")
        running.look()
        running.pool.scale(0, 0)

        began = time.monotonic()
        await running.pool.stop()

        assert time.monotonic() - began < 10.0
        assert isinstance(runs.end, Draining)


async def test_a_worker_that_will_not_stop_is_killed(tmp_path: Path) -> None:
    """It ignores SIGTERM and sleeps through its orders."""
    source = """
    import signal, time
    def handle(data, context):
        if data is None:
            return None
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open("deaf", "w").close()
        time.sleep(60)
    """
    async with RunningPool(tmp_path, source) as running:
        await running.start()
        running.send(b"x")
        await until(running.file("deaf").exists, "it is deaf")
        running.look()

        await asyncio.wait_for(running.pool.stop(), 10.0)

        assert not living(running.look())


async def test_a_stopped_pool_cannot_be_scaled(tmp_path: Path) -> None:
    """Workers that nobody owns would be left."""
    async with RunningPool(tmp_path) as running:
        await running.start()
        await running.pool.stop()

        running.pool.scale(2, 2)

        assert running.pool.workers() == []
        assert await running.pool.wait_until_ready() is False


def test_workers_and_template_do_not_outlive_a_killed_server(tmp_path: Path) -> None:
    """C10: SIGKILL leaves the server no moment to tell them, busy or idle, forked or fresh."""
    write_model(tmp_path / "model")
    source = textwrap.dedent(
        """
        import asyncio, sys, uvloop
        from pathlib import Path
        sys.path.insert(0, sys.argv[1])
        from support.running_pool import RunningPool

        async def main():
            pools = [RunningPool(Path(sys.argv[2]) / start, start=start, workers=2) for start in ("fork", "fresh")]
            for running in pools:
                await running.__aenter__()
                await running.start()
                running.send(b"sleep 60")
            print("ready", flush=True)
            await asyncio.sleep(60)

        uvloop.run(main())
        """
    )
    server = subprocess.Popen(
        [sys.executable, "-c", source, str(Path(__file__).parents[1]), str(tmp_path)],
        env=dict(worker_environment()),
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None
    with server.stdout:
        assert server.stdout.readline() == b"ready\n"
        below = descendants(server.pid)

        server.kill()
        server.wait()

    assert len(below) == 5
    until_blocking(lambda: not living(below), "they are gone, too", timeout_s=2.0)
