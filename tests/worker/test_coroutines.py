"""Tests for a worker that runs many batches at once, as its server sees it: a process, its messages and its page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from marserve.messages import (
    Batch,
    Batches,
    Cancel,
    Hello,
    Item,
    Loaded,
    Metrics,
    Raised,
    Results,
    Stop,
    pack_head,
)
from marserve.option_values import Sample
from support.model_folders import write_model
from support.worker_process import WorkerUnderTest

HANDLER = """
    import asyncio, sys
    from marserve_handlers.context import send_intermediate_predict_response

    gates = {}

    def gate(name):
        return gates.setdefault(name, asyncio.Event())

    async def handle(rows, context):
        words = [bytes(row["body"]).decode() for row in rows]
        verb, _, name = words[0].partition(" ")
        if verb == "open":
            gate(name).set()
        elif verb == "wait":
            await gate(name).wait()
            context.metrics.add_counter("waited", 1)
        elif verb == "exit":
            sys.exit(7)
        elif verb == "crooked":
            send_intermediate_predict_response(["one", "too", "many"], context.request_ids, "", 200, context)
        elif verb == "plain":
            return words[0]
        return words
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[WorkerUnderTest]:
    """A worker that has loaded the handler."""
    with WorkerUnderTest() as worker:
        assert isinstance(worker.hear()[0], Hello)
        worker.tell(write_model(tmp_path, HANDLER, is_concurrent=True, warm_up=[Sample(body=b"warm")]))
        loaded = worker.hear()[0]
        assert isinstance(loaded, Loaded)
        assert not loaded.warnings
        assert loaded.warm_up_s > 0
        yield worker


def hear_until(worker: WorkerUnderTest, kind: type[Any]) -> tuple[Any, list[bytes]]:
    """The next message of this kind."""
    while True:
        message, bodies = worker.hear()
        if isinstance(message, kind):
            return message, bodies


def test_batches_end_in_any_order_and_the_page_counts_them(worker: WorkerUnderTest) -> None:
    """It says which began last as long as one runs."""
    worker.batch(1, b"wait a")
    worker.batch(2, b"wait b")
    worker.batch(3, b"open b")
    ended = [hear_until(worker, Results) for _ in range(2)]
    while_one_runs = worker.page.running[0], worker.page.finished
    worker.batch(4, b"open a")
    ended += [hear_until(worker, Results) for _ in range(2)]

    assert sorted(message.number for message, _ in ended[:2]) == [2, 3]
    assert sorted(message.number for message, _ in ended[2:]) == [1, 4]
    assert {message.number: bodies for message, bodies in ended}[1] == [b"wait a"]
    assert while_one_runs == (3, 2)
    assert (worker.page.running[0], worker.page.finished) == (0, 4)


def test_batches_of_one_frame_are_run_side_by_side(worker: WorkerUnderTest) -> None:
    """The first can only end after the second has."""
    items = [[Item(f"r{number}", [("body", None)], pack_head([], []), None)] for number in (1, 2)]
    worker.tell(Batches([Batch(1, items[0]), Batch(2, items[1])]), [b"wait a", b"open a"])

    ended = {hear_until(worker, Results)[0].number for _ in range(2)}

    assert ended == {1, 2}


def test_what_is_measured_is_laid_to_its_own_request(worker: WorkerUnderTest) -> None:
    """Though others began, and ended, meanwhile."""
    items = [
        Item("slow", [("body", None)], pack_head([], []), None),
        Item("quick", [("body", None)], pack_head([], []), None),
    ]
    worker.tell(Batch(1, items[:1]), [b"wait a"])
    worker.tell(Batch(2, items[1:]), [b"open a"])

    metrics, _ = hear_until(worker, Metrics)

    assert [(value.name, value.request_ids) for value in metrics.values] == [("waited", "slow")]


def test_a_cancelled_batch_is_interrupted_and_answered(worker: WorkerUnderTest) -> None:
    """Only when nobody waits for any of its items; one that is unknown is nobody's."""
    worker.batch(1, b"wait a", b"more")
    worker.batch(2, b"open b")
    hear_until(worker, Results)

    worker.tell(Cancel(1, 1))
    worker.tell(Cancel(9, 0))
    worker.tell(Cancel(1, 0))
    message, _ = hear_until(worker, Raised)

    assert message.number == 1


def test_what_is_no_list_fails_the_batch(worker: WorkerUnderTest) -> None:
    """As in any worker; so do pieces that are not one a row."""
    worker.batch(1, b"plain")
    worker.batch(2, b"crooked")

    messages = {message.number: message for message, _ in (hear_until(worker, Raised) for _ in range(2))}

    assert messages[1].message == "Invalid model predict output"
    assert "ValueError" in messages[2].traceback


def test_stop_waits_for_what_runs(worker: WorkerUnderTest) -> None:
    """Then the process ends with status 0."""
    worker.batch(1, b"wait a")
    worker.batch(2, b"open b")
    hear_until(worker, Results)
    worker.batch(3, b"open a")
    worker.tell(Stop())

    ended = {hear_until(worker, Results)[0].number for _ in range(2)}
    status, _, _ = worker.end()

    assert ended == {1, 3}
    assert status == 0


def test_a_handler_that_ends_the_process_ends_it_with_its_status(worker: WorkerUnderTest) -> None:
    """As in any worker."""
    worker.batch(1, b"exit")

    status, _, _ = worker.end()

    assert status == 7


def test_the_end_of_the_connection_is_the_end_of_the_worker(worker: WorkerUnderTest) -> None:
    """Whatever runs."""
    worker.batch(1, b"wait a")

    worker.connection.close()
    status, _, err = worker.end()

    assert status == 0
    assert "Traceback" not in err


def test_a_coroutine_of_a_model_that_does_not_say_so_is_told_what_to_set(tmp_path: Path) -> None:
    """Its answer is no list, and the log says why."""
    with WorkerUnderTest() as worker:
        worker.hear()
        worker.tell(write_model(tmp_path, HANDLER))
        worker.hear()
        worker.batch(1, b"hello")
        message, _ = worker.hear()

    assert isinstance(message, Raised)
    assert "asyncCommunication" in message.traceback
