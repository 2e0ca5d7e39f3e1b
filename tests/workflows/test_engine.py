"""The engine of a workflow, over a data plane that answers when the test says so."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.errors import (
    BadDag,
    BadInput,
    DeadlinePassed,
    Draining,
    FingerprintRefused,
    HandlerFailed,
    MarserveError,
    ModelNotFound,
    NodeFailed,
    NoWorker,
    QueueFull,
    WaitTooLong,
    WorkerDied,
    WorkflowBusy,
)
from marserve.messages import Answer, Part, Request
from marserve.workflows.dag import Dag
from marserve.workflows.engine import SHORT_LEAVES_BYTES, Engine, Execution, RunnableNode
from support.fake_data_plane import FakeDataPlane
from support.receivers import Waiting

CHAIN = {"a": ["b"], "b": ["c"]}
DIAMOND = {"a": ["b", "c"], "b": ["d"], "c": ["d"]}
FORK = {"a": ["b", "c"]}


def engine_of(
    plane: FakeDataPlane,
    edges: dict[str, list[str]],
    *,
    retries: int = 0,
    timeout_s: float = 30.0,
    most_running: int = 100,
) -> Engine:
    """An engine whose node `a` is version 1.0 of the model `w__a`, and so on."""
    dag = Dag(edges)
    nodes = {node: RunnableNode(f"w__{node}", "1.0", retries, timeout_s) for node in dag.nodes}
    return Engine("w", dag, nodes, plane, most_running=most_running, max_answer_bytes=1000)


def request(body: bytes = b"in", **more: object) -> Request:
    """A client's request."""
    return Request("id-1", [Part("body", body, "text/plain")], [(b"X-One", b"1")], **more)  # type: ignore[arg-type]


async def told(receiver: Waiting) -> Answer | MarserveError:
    """Its end."""
    return await receiver.told()


@pytest.mark.anyio
async def test_each_node_gets_its_parents_answer_as_the_one_parameter_body() -> None:
    """The start node gets what the client sent; the leaf's bytes are the answer, as JSON by its type."""
    plane, receiver = FakeDataPlane(), Waiting()
    engine_of(plane, CHAIN).submit(request(), receiver)

    (await plane.wait_for(1)).answer(b"one", status=201, x_own="2")
    (await plane.wait_for(2)).answer(b"two")
    (await plane.wait_for(3)).answer(b"three")

    assert [job.model for job in plane.submitted] == ["w__a", "w__b", "w__c"]
    assert plane.submitted[0].request.parts == [Part("body", b"in", "text/plain")]
    assert plane.submitted[1].request.parts == [Part("body", b"one", None)]
    assert await told(receiver) == Answer(b"three", headers=[("content-type", "application/json")])


@pytest.mark.anyio
async def test_one_id_one_deadline_one_priority_and_the_clients_headers_go_through_all_nodes() -> None:
    """Every node's request is the client's in all but its parts, and marked as a part of it."""
    plane, receiver = FakeDataPlane(echoes_all=True), Waiting()
    deadline = time.monotonic() + 60
    engine_of(plane, DIAMOND).submit(request(deadline=deadline, priority=2), receiver)

    assert len(plane.submitted) == 4
    for job in plane.submitted:
        given = job.request
        assert (given.id, given.deadline, given.priority, given.headers, given.is_inner, job.version) == (
            "id-1",
            deadline,
            2,
            [(b"X-One", b"1")],
            True,
            "1.0",
        )
    assert len({job.request.key for job in plane.submitted} - {0}) == 4  # what tells them apart


@pytest.mark.anyio
async def test_a_node_with_several_parents_gets_one_parameter_for_each_by_name() -> None:
    """It begins when the last has answered."""
    plane, receiver = FakeDataPlane(), Waiting()
    engine_of(plane, DIAMOND).submit(request(), receiver)
    (await plane.wait_for(1)).answer(b"x")
    _, b, c = plane.submitted

    c.answer(b"from c")
    assert len(plane.submitted) == 3
    b.answer(b"from b")

    assert plane.submitted[3].request.parts == [Part("b", b"from b", None), Part("c", b"from c", None)]
    plane.submitted[3].answer(b"end")
    assert receiver.body == b"end"


@pytest.mark.anyio
@pytest.mark.parametrize("leaf", [b'{"b": 1.50}', b"[1]"])
async def test_long_leaves_are_joined_by_a_thread(monkeypatch: pytest.MonkeyPatch, leaf: bytes) -> None:
    """To the same answer, or the same error, and with nothing left when the client goes meanwhile."""
    plane, threads = FakeDataPlane(), []
    engine = engine_of(plane, FORK)
    join = Execution._join

    def noted(*given: Any) -> bytes:
        threads.append(threading.get_ident())
        return join(*given)

    monkeypatch.setattr(Execution, "_join", noted)
    told_of = []
    for length in (10, SHORT_LEAVES_BYTES):
        receiver = Waiting()
        engine.submit(request(), receiver)
        (await plane.wait_for(len(plane.submitted))).answer(b"one")
        plane.submitted[-2].answer(leaf + b" " * length)
        plane.submitted[-1].answer(b'{"c": "two"}')
        told_of.append(await told(receiver))
    gone = Waiting()
    execution = engine.submit(request(), gone)
    plane.submitted[-1].answer(b"one")
    plane.submitted[-2].answer(leaf + b" " * SHORT_LEAVES_BYTES)
    plane.submitted[-1].answer(b'{"c": "two"}')
    execution.cancel()
    await asyncio.to_thread(lambda: None)

    short, long = told_of
    assert type(short) is type(long)
    if isinstance(short, Answer) and isinstance(long, Answer):
        assert short.body == long.body
    assert threads[0] == threading.get_ident()
    assert threading.get_ident() not in threads[1:]
    assert engine.running == 0


@pytest.mark.anyio
async def test_several_leaves_are_one_object_with_their_numbers_as_they_were_written() -> None:
    """Each leaf's JSON object is a member."""
    plane, receiver = FakeDataPlane(), Waiting()
    engine_of(plane, FORK).submit(request(), receiver)
    (await plane.wait_for(1)).answer(b"x")
    plane.submitted[1].answer(b'{"n": 1.50}')
    plane.submitted[2].answer(b'{"m":[2, 3e0]}')

    assert receiver.body is not None
    assert json.loads(receiver.body) == {"b": {"n": 1.5}, "c": {"m": [2, 3.0]}}
    assert b"1.50" in receiver.body
    assert b"3e0" in receiver.body


@pytest.mark.parametrize("body", [b"[1]", b"1", b"text", b"", b"\xff", b"{"])
@pytest.mark.anyio
async def test_a_leaf_among_several_that_answers_no_object_fails_the_request(body: bytes) -> None:
    """There is no name to give it otherwise."""
    plane, receiver = FakeDataPlane(), Waiting()
    engine_of(plane, FORK).submit(request(), receiver)
    (await plane.wait_for(1)).answer(b"x")
    plane.submitted[1].answer(body)
    plane.submitted[2].answer(b"{}")

    end = await told(receiver)
    assert isinstance(end, NodeFailed)
    assert (end.node, end.cause, end.message) == ("b", "not_json", "Error executing b")


@pytest.mark.anyio
async def test_a_failed_node_is_tried_again_with_the_same_input() -> None:
    """Up to `retry-attempts` more times."""
    plane, receiver = FakeDataPlane(), Waiting()
    engine_of(plane, CHAIN, retries=2).submit(request(), receiver)
    (await plane.wait_for(1)).answer(b"one")
    (await plane.wait_for(2)).fail(WorkerDied("killed"))
    (await plane.wait_for(3)).fail(HandlerFailed())

    (await plane.wait_for(4)).answer(b"two")
    (await plane.wait_for(5)).answer(b"three")

    assert [job.model for job in plane.submitted] == ["w__a", "w__b", "w__b", "w__b", "w__c"]
    assert [job.body for job in plane.submitted[1:4]] == [b"one"] * 3
    assert receiver.body == b"three"


@pytest.mark.anyio
async def test_a_node_that_fails_each_time_fails_the_request_with_its_name() -> None:
    """In TorchServe's words, with the last cause."""
    plane, receiver = FakeDataPlane(), Waiting()
    engine = engine_of(plane, CHAIN, retries=1)
    engine.submit(request(), receiver)
    (await plane.wait_for(1)).fail(HandlerFailed())
    (await plane.wait_for(2)).fail(WorkerDied("killed"))

    end = await told(receiver)
    assert isinstance(end, NodeFailed)
    assert (end.message, end.cause) == ("Error executing a", "killed")
    assert (len(plane.submitted), engine.running) == (2, 0)


@pytest.mark.anyio
async def test_a_node_that_does_not_answer_in_time_is_cancelled_and_tried_again() -> None:
    """Each attempt has its time-out: no request waits for ever, whatever a model does."""
    plane, receiver = FakeDataPlane(), Waiting()
    engine = engine_of(plane, CHAIN, retries=1, timeout_s=0.05)
    engine.submit(request(), receiver)

    end = await told(receiver)

    assert isinstance(end, NodeFailed)
    assert end.cause == "node_timeout"
    assert [(job.model, job.is_cancelled) for job in plane.submitted] == [("w__a", True), ("w__a", True)]
    assert engine.running == 0


@pytest.mark.anyio
@pytest.mark.parametrize(("keeps", "cause"), [(True, "worker_busy"), (False, "node_timeout")])
async def test_a_retry_that_only_waited_behind_the_attempt_before_says_so(
    keeps: bool, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator can tell a model that is too slow from a second attempt that never began."""
    plane, receiver = FakeDataPlane(), Waiting()
    engine_of(plane, {"a": []}, retries=2, timeout_s=0.02).submit(request(), receiver)
    first = await plane.wait_for(1)
    first.keeps_the_only_worker = keeps

    end = await told(receiver)

    assert isinstance(end, NodeFailed)
    assert (end.message, end.cause) == ("Error executing a", cause)
    told_of = [number for number in (2, 3) if f"attempt {number} at node a never began" in caplog.text]
    assert told_of == ([2, 3] if keeps else [])
    assert [job.receiver.timed_out for job in plane.submitted] == [None] * 3  # type: ignore[attr-defined]


@pytest.mark.anyio
async def test_an_answer_that_comes_after_its_time_out_is_thrown_away() -> None:
    """The other attempt's answer counts, once."""
    plane, receiver = FakeDataPlane(), Waiting()
    engine_of(plane, {"a": []}, retries=1, timeout_s=0.05).submit(request(), receiver)
    first = await plane.wait_for(1)
    second = await plane.wait_for(2)

    first.answer(b"late")
    second.answer(b"in time")
    second.fail(WorkerDied("killed"))

    assert receiver.body == b"in time"


@pytest.mark.anyio
async def test_a_client_that_goes_takes_every_running_node_with_it() -> None:
    """They are cancelled, nothing further begins, nobody is told."""
    plane, receiver = FakeDataPlane(), Waiting()
    engine = engine_of(plane, DIAMOND, retries=3, timeout_s=0.05)
    execution = engine.submit(request(), receiver)
    (await plane.wait_for(1)).answer(b"x")

    execution.cancel()
    execution.cancel()
    plane.submitted[1].answer(b"nobody waits")
    await asyncio.sleep(0.1)  # past the time-out of an attempt that must not be there

    assert [job.is_cancelled for job in plane.submitted] == [False, True, True]
    assert (receiver.ends, engine.running) == ([], 0)


@pytest.mark.anyio
async def test_the_failure_of_one_branch_cancels_the_others() -> None:
    """Nobody needs their answers any more."""
    plane, receiver = FakeDataPlane(), Waiting()
    engine_of(plane, DIAMOND).submit(request(), receiver)
    (await plane.wait_for(1)).answer(b"x")

    plane.submitted[1].fail(HandlerFailed())

    assert plane.submitted[2].is_cancelled
    assert isinstance(await told(receiver), NodeFailed)


@pytest.mark.anyio
async def test_a_workflow_with_as_many_requests_as_it_may_have_refuses_the_next_at_once() -> None:
    """The bound at the door is what bounds every hand-off behind it; a place that is free again is given."""
    plane = FakeDataPlane()
    engine = engine_of(plane, CHAIN, most_running=2)
    executions = [engine.submit(request(), Waiting()) for _ in range(2)]

    with pytest.raises(WorkflowBusy) as caught:
        engine.submit(request(), Waiting())
    assert (caught.value.cause, caught.value.retry_after_s) == ("queue_full", 1.0)
    executions[0].cancel()
    engine.submit(request(), Waiting())


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (QueueFull("w__b", retry_after_s=7.0), WorkflowBusy),
        (WaitTooLong(5.0, 1.0), WaitTooLong),
        (Draining(), Draining),
        (NoWorker("w__b"), NodeFailed),
        (ModelNotFound("w__b"), NodeFailed),
    ],
)
@pytest.mark.anyio
async def test_what_another_attempt_cannot_better_is_told_at_once(
    error: MarserveError, expected: type[MarserveError]
) -> None:
    """One node's overload is the client's refusal; a node without workers, or unregistered, is an error."""
    plane, receiver = FakeDataPlane(errors={"w__b": error}), Waiting()
    engine_of(plane, CHAIN, retries=5).submit(request(), receiver)
    (await plane.wait_for(1)).answer(b"x")

    end = await told(receiver)

    assert type(end) is expected
    assert len(plane.submitted) == 2
    if isinstance(end, WorkflowBusy):
        assert (end.node, end.retry_after_s) == ("b", 7.0)


@pytest.mark.anyio
async def test_a_node_without_workers_is_told_in_torchserves_words(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They name the node's model, and no version."""
    plane, receiver = FakeDataPlane(errors={"w__a": NoWorker("w__a", "1.0")}), Waiting()
    engine_of(plane, CHAIN, retries=5).submit(request(), receiver)

    end = await told(receiver)

    assert isinstance(end, NodeFailed)
    assert end.message.startswith('Model "w__a" has no worker to serve inference request.')
    assert "request id-1: attempt 1 at node a failed (no_worker" in caplog.text


@pytest.mark.anyio
async def test_a_request_that_killed_its_workers_is_an_error_and_one_like_it_is_refused() -> None:
    """What is refused for its likeness was not run at all, so it may come again."""
    refused = FingerprintRefused("w__a", 7.0)
    plane, killer, like_it = FakeDataPlane(), Waiting(), Waiting()
    engine = engine_of(plane, CHAIN, retries=5)
    engine.submit(request(), killer)
    (await plane.wait_for(1)).fail(WorkerDied("killed"))
    (await plane.wait_for(2)).fail(refused)
    assert isinstance(await told(killer), NodeFailed)

    plane.errors["w__a"] = refused
    engine.submit(request(), like_it)

    assert await told(like_it) is refused


@pytest.mark.anyio
async def test_the_clients_deadline_ends_the_request_and_a_models_own_does_not() -> None:
    """A model may have a limit of its own (clientTimeoutInMills), after which another attempt may do better."""
    plane, late, early = FakeDataPlane(), Waiting(), Waiting()
    engine = engine_of(plane, {"a": []}, retries=1)
    engine.submit(request(deadline=time.monotonic() - 1), late)
    plane.submitted[0].fail(DeadlinePassed("queue"))
    assert isinstance(late.end, DeadlinePassed)

    engine.submit(request(deadline=time.monotonic() + 60), early)
    plane.submitted[1].fail(DeadlinePassed("worker"))
    (await plane.wait_for(3)).answer(b"y")
    assert early.body == b"y"


@pytest.mark.anyio
async def test_a_stream_reaches_the_next_node_whole_and_within_bounds() -> None:
    """Pieces are put together; more than an answer may have fails the node."""
    plane, receiver, other = FakeDataPlane(), Waiting(), Waiting()
    engine = engine_of(plane, CHAIN)
    engine.submit(request(), receiver)
    first = await plane.wait_for(1)
    first.piece(b"one ")
    first.piece(b"two", last=True)
    assert plane.submitted[1].body == b"one two"
    plane.submitted[1].fail(HandlerFailed())

    engine.submit(request(), other)
    endless = plane.submitted[2]
    endless.piece(b"x" * 600)
    endless.piece(b"x" * 600)

    assert endless.is_cancelled
    end = await told(other)
    assert isinstance(end, NodeFailed)
    assert end.cause == "too_large"


@pytest.mark.anyio
async def test_waiting_until_idle_counts_what_is_left_and_giving_up_tells_its_clients() -> None:
    """For the end of a workflow, and of the server."""
    plane, receiver = FakeDataPlane(), Waiting()
    engine = engine_of(plane, CHAIN)
    assert await engine.wait_until_idle(0.0) == 0
    engine.submit(request(), receiver)

    assert await engine.wait_until_idle(0.01) == 1
    engine.give_up()

    assert isinstance(await told(receiver), Draining)
    assert plane.submitted[0].is_cancelled
    assert await engine.wait_until_idle(1.0) == 0


@pytest.mark.anyio
async def test_an_error_that_is_the_requests_own_is_a_failed_node_too() -> None:
    """As TorchServe answers it: 500, `Error executing …`."""
    plane, receiver = FakeDataPlane(errors={"w__a": BadInput("no")}), Waiting()
    engine_of(plane, CHAIN).submit(request(), receiver)

    assert isinstance(await told(receiver), NodeFailed)


@given(st.data())
def test_every_request_ends_once_and_leaves_nothing_behind(data: st.DataObject) -> None:
    """Whatever the graph is, whatever the nodes do and in which order, and whenever the client goes."""
    asyncio.run(_play(data))


async def _play(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 6))
    pairs = [(a, b) for a in range(size) for b in range(a + 1, size)]
    edges: dict[str, list[str]] = {f"n{a}": [] for a in range(size)}
    for a, b in data.draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []:
        edges[f"n{a}"].append(f"n{b}")
    try:
        plane = FakeDataPlane()
        engine = engine_of(plane, edges, retries=data.draw(st.integers(0, 2)))
    except BadDag:
        return
    receiver = Waiting()
    execution = engine.submit(request(), receiver)
    has_gone = False
    ended: set[int] = set()

    while True:
        await asyncio.sleep(0)
        open_jobs = [index for index, job in enumerate(plane.submitted) if index not in ended and not job.is_cancelled]
        if not open_jobs:
            break
        index = data.draw(st.sampled_from(open_jobs))
        what = data.draw(st.sampled_from(["answer", "answer", "answer", "answer", "fail", "full", "go"]))
        if what == "go":
            has_gone = True
            execution.cancel()
            continue
        ended.add(index)
        if what == "answer":
            plane.submitted[index].answer(b'{"a": 1}')
        else:
            plane.submitted[index].fail(WorkerDied("killed") if what == "fail" else QueueFull("m"))

    assert len(receiver.ends) == (0 if has_gone else 1)
    assert engine.running == 0
    if isinstance(receiver.end, Answer):
        assert {job.model for job in plane.submitted} == {f"w__{node}" for node in engine.dag.nodes}
