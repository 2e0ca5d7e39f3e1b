"""Certificates with real workers: at load, on demand, in service; and per-item errors, warm-up and live batch sizes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from marserve.errors import BadInput, Draining, HandlerFailed, NoWorker, WorkerDied
from marserve.messages import SHARED_TENSORS, Answer, Part
from marserve.option_values import Sample
from marserve.pool.checks.certifier import read_samples
from support.processes import until
from support.running_pool import RunningPool

pytestmark = pytest.mark.anyio

# Answers each body in capitals; what goes wrong with batches is up to files beside it.
CAPITALS = """
    import os, sys, time
    from marserve_handlers.errors import PredictionException

    calls = 0

    def note(rows):
        with open("calls", "a") as file:
            file.write(f"{os.getpid()} {[bytes(row['body']).decode() for row in rows]}\\n")

    def handle(rows, context):
        global calls
        if rows is None:
            return None
        note(rows)
        calls += 1
        bodies = [bytes(row["body"]).decode() for row in rows]
        if os.path.exists("die") and len(rows) > 1:
            os._exit(9)
        if os.path.exists("hang") and len(rows) > 1:
            time.sleep(60)
        if os.path.exists("slow"):
            time.sleep(0.02)
        answers = []
        for body in bodies:
            if body == "bad":
                answers.append(PredictionException("this one is bad", 422))
            elif body == "cold":
                raise ValueError("cold")
            elif body == "odd":
                answers.append(ValueError("an author's mistake"))
            else:
                answers.append(body.upper())
        if os.path.exists("swap"):
            answers.reverse()
        return answers
"""
SAMPLES = (Sample(body=b"one"), Sample(body=b"two"), Sample(body=b"three"))


def pool_of(folder: Path, **options: Any) -> RunningPool:
    """A pool whose handler answers in capitals."""
    return RunningPool(folder, CAPITALS, **{"samples": SAMPLES, "batch_check": "refuse", **options})


async def settled(running: RunningPool) -> dict[str, Any]:
    """What describe says of batching when no check is on its way."""
    await until(lambda: "isChecking" not in running.pool.described["batching"], "the check is done")
    described: dict[str, Any] = running.pool.described["batching"]
    return described


def parts(*bodies: bytes) -> list[list[Part]]:
    """Inputs for a check on demand."""
    return [[Part("body", body)] for body in bodies]


@pytest.mark.parametrize("start", ["fork", "fresh"])
async def test_a_right_handler_wins_its_certificate_at_load_and_gets_batches(tmp_path: Path, start: str) -> None:
    """Forked or not; requests wait for nothing but the check."""
    async with pool_of(tmp_path, start=start, batch_size=4) as running:
        await running.start()
        described = await settled(running)

        assert described["certificate"] == "passed"
        assert described["largestBatch"] == 4
        assert described["answersCompared"] > 0
        assert running.metrics.batch_checks == {"passed": 1}
        running.file("slow").touch()
        before = len(running.calls())
        sent = [running.send(b"x%d" % index) for index in range(9)]
        answers = [await each.told() for each in sent]

    assert [bytes(answer.body) for answer in answers] == [b"X%d" % index for index in range(9)]
    assert len(running.calls()) - before < 9


async def test_a_handler_that_swaps_answers_is_never_given_a_batch(tmp_path: Path) -> None:
    """The version serves one by one, and says why."""
    async with pool_of(tmp_path, batch_size=4) as running:
        running.file("swap").touch()
        await running.start()
        described = await settled(running)

        assert described["certificate"] == "failed"
        assert described["largestBatch"] == 1
        assert "the answer of item" in described["differences"][0]["seen"]
        assert running.metrics.batch_checks == {"failed": 1}
        before = len(running.calls())
        sent = [running.send(b"x%d" % index) for index in range(6)]
        answers = [await each.told() for each in sent]

    assert [bytes(answer.body) for answer in answers] == [b"X%d" % index for index in range(6)]
    assert len(running.calls()) - before == 6


async def test_with_warn_the_difference_is_told_and_batches_go_on(tmp_path: Path) -> None:
    """The operator's word."""
    async with pool_of(tmp_path, batch_size=4, batch_check="warn") as running:
        running.file("swap").touch()
        await running.start()
        described = await settled(running)

    assert (described["certificate"], described["largestBatch"]) == ("failed", 4)


async def test_a_check_that_kills_workers_is_an_outcome(tmp_path: Path) -> None:
    """After the second worker; requests are served one by one meanwhile and afterwards."""
    async with pool_of(tmp_path, batch_size=4) as running:
        running.file("die").touch()
        await running.start()
        described = await settled(running)
        answer = await running.ask_body(b"hello")

    assert described["certificate"] == "failed"
    assert described["reason"] == "2 workers ended during the check, the last one: exit"
    assert answer == b"HELLO"


async def test_a_check_that_hangs_is_ended_by_the_response_limit(tmp_path: Path) -> None:
    """As a batch that hangs."""
    async with pool_of(tmp_path, batch_size=4, response_timeout_s=0.3) as running:
        running.file("hang").touch()
        await running.start()
        described = await settled(running)

    assert described["reason"] == "2 workers ended during the check, the last one: response_timeout"


async def test_a_check_on_demand_reports_and_refuses(tmp_path: Path) -> None:
    """With inputs of the caller's; a later one can win the certificate back."""
    async with pool_of(tmp_path, batch_size=4, samples=()) as running:
        await running.start()
        assert (await running.pool.check(parts(b"a", b"b")))["passed"]

        running.file("swap").touch()
        report = await running.pool.check(parts(b"a", b"b"))
        assert not report["passed"]
        assert report["certificate"] == "failed"
        assert running.pool.described["batching"]["largestBatch"] == 1

        running.file("swap").unlink()
        assert (await running.pool.check(parts(b"a", b"b")))["passed"]
        assert running.pool.described["batching"]["largestBatch"] == 4


async def test_checks_asked_for_together_run_one_after_the_other(tmp_path: Path) -> None:
    """And requests are answered between them."""
    async with pool_of(tmp_path, batch_size=2, samples=()) as running:
        await running.start()

        reports = asyncio.gather(*(running.pool.check(parts(b"a", b"b")) for _ in range(4)))
        bodies = [await running.ask_body(b"x%d" % index) for index in range(5)]

        assert [report["passed"] for report in await reports] == [True] * 4
        assert bodies == [b"X%d" % index for index in range(5)]


async def test_what_cannot_be_checked_is_refused_with_a_reason(tmp_path: Path) -> None:
    """No samples, no worker, a worker that dies, a server that stops."""
    async with pool_of(tmp_path, batch_size=4, samples=()) as running:
        with pytest.raises(NoWorker):
            await running.pool.check(parts(b"a"))
        await running.start()
        with pytest.raises(BadInput, match="nothing to check with"):
            await running.pool.check()
        running.file("die").touch()
        with pytest.raises(WorkerDied):
            await running.pool.check(parts(b"a", b"b"))
        running.file("die").unlink()
        await until(lambda: running.pool.ready_workers == 1, "the worker is back")
        running.file("hang").touch()
        waiting = asyncio.create_task(running.pool.check(parts(b"a", b"b")))
        await until(lambda: running.calls()[-1].endswith("['a', 'b']"), "the check is under way")
        await running.pool.stop()
        with pytest.raises((Draining, WorkerDied)):
            await waiting
        with pytest.raises(Draining):
            await running.pool.check(parts(b"a"))


async def test_a_check_waits_only_so_long_for_a_worker(tmp_path: Path) -> None:
    """And leaves nothing behind that would be checked later."""
    async with pool_of(tmp_path, batch_size=4, samples=(), startup_timeout_s=30.0) as running:
        await running.start()
        running.file("slow").touch()
        waiting = [asyncio.create_task(running.pool.check(parts(b"a", b"b"))) for _ in range(3)]
        await until(lambda: len(running.calls()) > 2, "the first check is under way")

        for task in waiting[1:]:
            task.cancel()
        await asyncio.wait(waiting)
        calls = len(running.calls())

        assert waiting[0].result()["passed"]
        assert await running.ask_body(b"x") == b"X"
        assert len(running.calls()) == calls + 1


async def test_a_version_without_workers_cannot_be_checked(tmp_path: Path) -> None:
    """Not even one that a request would wake."""
    async with pool_of(tmp_path, workers=0, batch_size=4, idle_timeout_s=5.0) as running:
        running.pool.start()

        with pytest.raises(NoWorker):
            await running.pool.check()


async def test_a_stop_does_not_wait_for_a_check(tmp_path: Path) -> None:
    """A check is nobody's request: the drain is over at once."""
    async with pool_of(tmp_path, batch_size=4) as running:
        running.file("hang").touch()
        await running.start()
        await until(lambda: len(running.calls()) > 3, "the check is under way")

        assert await running.pool.drain(5.0) == 0


async def test_missing_samples_refuse_batches_with_a_sentence(tmp_path: Path) -> None:
    """The archive does not hold what its configuration names."""
    async with pool_of(tmp_path, batch_size=4, samples=(Sample(file="none.bin"),)) as running:
        await running.start()
        described = await settled(running)

    assert described["largestBatch"] == 1
    assert described["reason"] == "The sample 'none.bin' of the archive cannot be read: No such file or directory."


def test_samples_are_read_from_the_archive_only(tmp_path: Path) -> None:
    """Files and inline bodies, in order; nothing outside, and not too much."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"a")
    (tmp_path / "secret").write_bytes(b"s")

    inputs = read_samples([Sample("text/plain", file="a.txt"), Sample(body=b"b")], folder)

    assert inputs == [[Part("body", b"a", "text/plain")], [Part("body", b"b", None)]]
    with pytest.raises(BadInput, match="outside"):
        read_samples([Sample(file="../secret")], folder)
    with pytest.raises(BadInput, match="more than"):
        read_samples([Sample(body=bytes(65 * 1024 * 1024))], folder)


# ------------------------------------------------------------------------------------------- in service


async def test_served_batches_are_run_again_and_differences_counted(tmp_path: Path) -> None:
    """Item by item, on a worker that is idle, out of what was earned."""
    async with pool_of(tmp_path, batch_size=4, samples=(), batch_check="off", batch_check_sample=1.0) as running:
        await running.start()
        certifier = running.pool.certifier
        certifier.allowance.earn(1000.0)

        async def send_batch(nonce: int) -> None:
            sent = [running.send(b"%d-%d" % (nonce, index)) for index in range(5)]
            for each in sent:
                await each.told()
            await settled(running)

        running.file("slow").touch()
        await send_batch(1)
        assert running.metrics.batch_rechecks >= 1
        assert running.metrics.batch_differences == 0

        running.file("swap").touch()
        await send_batch(2)
        assert running.metrics.batch_differences >= 1
        described = running.pool.described["batching"]["inService"]
        assert described["differingBatches"] >= 1
        assert "in a batch of" in described["lastDifferences"][0]
        assert running.pool.described["batching"]["largestBatch"] == 4
        spent_s = 10.0 - certifier.allowance.left_s
        assert spent_s == pytest.approx(certifier.in_service.seconds, abs=0.05)


async def test_a_request_that_shares_memory_with_its_client_is_not_run_again(tmp_path: Path) -> None:
    """It would read what has changed since, and write into it; its mates are run again without it."""
    async with pool_of(tmp_path, batch_size=4, samples=(), batch_check="off", batch_check_sample=1.0) as running:
        await running.start()
        running.pool.certifier.allowance.earn(1000.0)
        running.file("slow").touch()

        shared = [running.send(b"shared-%d" % index, server_headers=[(SHARED_TENSORS, "{}")]) for index in range(5)]
        for each in shared:
            await each.told()
        await settled(running)
        assert running.metrics.batch_rechecks == 0
        for each in [running.send(b"%d" % index) for index in range(5)]:
            await each.told()
        await settled(running)

        assert running.metrics.batch_rechecks >= 1


async def test_runs_again_take_a_hundredth_of_the_busy_seconds_by_the_counters(tmp_path: Path) -> None:
    """Every batch would be run again if there were time for it; but for the end of the last run the share is kept."""
    async with pool_of(
        tmp_path, batch_size=4, samples=(), batch_check="off", batch_check_sample=1.0, workers=2, queue_size=1000
    ) as running:
        await running.start()
        running.file("slow").touch()

        for number in range(60):
            sent = [running.send(b"%d-%d" % (number, index)) for index in range(16)]
            for each in sent:
                await each.told()
            await settled(running)

        metrics = running.metrics
        assert metrics.batch_rechecks > 0
        assert metrics.busy_seconds > 2.0
        longest_s = 4 * 0.05
        assert 0 < metrics.recheck_seconds <= 0.01 * metrics.busy_seconds + longest_s
        assert metrics.recheck_seconds == pytest.approx(running.pool.certifier.in_service.seconds)
        assert metrics.recheck_seconds <= 0.02 * metrics.busy_seconds + 0.02


async def test_without_an_allowance_nothing_is_run_again(tmp_path: Path) -> None:
    """One per cent of a few milliseconds pays for nothing."""
    async with pool_of(tmp_path, batch_size=4, samples=(), batch_check="off", batch_check_sample=1.0) as running:
        await running.start()
        running.file("slow").touch()

        for each in [running.send(b"%d" % index) for index in range(9)]:
            await each.told()
        await settled(running)

        assert running.metrics.batch_rechecks == 0
        assert len(running.calls()) <= 9


# ------------------------------------------------------------------------------------------- per-item errors


async def test_an_exception_in_the_place_of_an_answer_fails_that_item_alone(tmp_path: Path) -> None:
    """With its own status and words; its mates have their answers, and nothing is run again."""
    async with pool_of(tmp_path, batch_size=4, samples=(), batch_check="off") as running:
        await running.start()
        running.file("slow").touch()
        first = running.send(b"first")

        sent = [running.send(body) for body in (b"a", b"bad", b"b", b"odd")]
        told = [await each.told() for each in (first, *sent)]

    assert [bytes(each.body) for each in told if isinstance(each, Answer)] == [b"FIRST", b"A", b"B"]
    bad, odd = told[2], told[4]
    assert isinstance(bad, HandlerFailed)
    assert isinstance(odd, HandlerFailed)
    assert (bad.code, bad.message) == (422, "this one is bad")
    assert (odd.code, odd.message) == (None, "Prediction failed")
    assert running.metrics.isolated == 0
    assert len(running.calls()) == 2
    assert any("an author's mistake" in line for line in running.log.texts)


# ------------------------------------------------------------------------------------------- warm-up


@pytest.mark.parametrize("start", ["fork", "fresh"])
async def test_each_worker_warms_up_before_it_is_ready(tmp_path: Path, start: str) -> None:
    """Forked ones too; how long it took is told."""
    samples = [Sample(body=b"warm"), Sample(body=b"warmer")]
    load = {"warm_up": samples}
    async with pool_of(
        tmp_path, start=start, workers=2, batch_size=2, samples=(), batch_check="off", load=load
    ) as running:
        await running.start()

        calls = running.calls()
        assert {line.split(" ")[0] for line in calls} == {str(pid) for pid in running.pids}
        for pid in running.pids:
            mine = [line.partition(" ")[2] for line in calls if line.startswith(f"{pid} ")]
            assert mine == ["['warm']", "['warmer']", "['warm', 'warmer']"]
        assert len(running.pool.described["batching"]["warmUpSeconds"]) == 2


async def test_a_warm_up_that_fails_is_a_warning(tmp_path: Path) -> None:
    """The worker serves all the same; of an input that the handler did not answer, swaps are told apart."""
    load = {"warm_up": [Sample(file="none.bin"), Sample(body=b"cold")]}
    async with pool_of(tmp_path, samples=(), batch_check="off", load=load) as running:
        await running.start()

        assert ["none.bin" in warning for warning in running.pool.warnings] == [True, False]
        assert running.pool.warm_up_failure == running.pool.warnings[1]
        assert await running.ask_body(b"hello") == b"HELLO"


# ------------------------------------------------------------------------------------------- live changes


async def test_batch_size_and_delay_change_under_load(tmp_path: Path) -> None:
    """At once, without a restart, and without losing anybody."""
    async with pool_of(tmp_path, batch_size=1, samples=(), batch_check="off", queue_size=1000) as running:
        await running.start()
        pids = running.pids
        running.file("slow").touch()
        sent = []

        for size in (1, 8, 2, 16, 1):
            running.pool.reconfigure(batch_size=size, max_batch_delay_s=0.001 * size)
            sent += [running.send(b"x%d" % index) for index in range(20)]
            await sent[-1].told()
        told = [await each.told() for each in sent]

        assert [bytes(each.body) for each in told] == [b"X%d" % (index % 20) for index in range(100)]
        assert max(len(line.split(" ", 1)[1].split(",")) for line in running.calls()) == 16
        assert running.pids == pids
        assert running.pool.options.max_batch_delay_s == 0.001


async def test_a_larger_batch_size_is_checked_before_it_counts(tmp_path: Path) -> None:
    """Where the model has samples."""
    async with pool_of(tmp_path, batch_size=1) as running:
        await running.start()
        assert running.pool.described["batching"]["certificate"] == "not checked"

        running.file("swap").touch()
        running.pool.reconfigure(batch_size=8)
        assert running.pool.dispatcher.options.batch_size == 1
        described = await settled(running)

        assert described["certificate"] == "failed"
        assert running.pool.dispatcher.options.batch_size == 1
        assert running.pool.options.batch_size == 8


async def test_larger_batches_may_have_larger_answers(tmp_path: Path) -> None:
    """The bound on what a worker may send grows with the batch size."""
    async with pool_of(
        tmp_path, batch_size=1, samples=(), batch_check="off", load={"max_answer_bytes": 1000}
    ) as running:
        await running.start()
        running.file("slow").touch()
        running.pool.reconfigure(batch_size=8)

        sent = [running.send(b"x" * 900) for _ in range(17)]
        told = [await each.told() for each in sent]

        assert all(isinstance(each, Answer) for each in told)
        assert running.pool.last_death is None
