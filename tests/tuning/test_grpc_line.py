"""A load over gRPC, before servers that refuse, stall and are gone."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator

import grpc
import pytest

from marserve.tuning.grpc_line import Call, GrpcTarget, call_once
from marserve.tuning.load import MOST_UNANSWERED, Limit, Reason, Shape, Tally, run
from marserve.tuning.payloads import Payload
from support.grpc_answers import Call as Asked
from support.grpc_answers import GrpcAnswers, Refusal, grpc_answers
from support.scripted_server import Act, scripted

PATH = "/s.Service/Ask"
BODIES = [Payload(b"one"), Payload(b"two"), Payload(b"three")]


@pytest.fixture
def answers() -> Iterator[GrpcAnswers]:
    """A server that answers everything."""
    with grpc_answers() as running:
        yield running


def _target(port: int) -> GrpcTarget:
    return GrpcTarget(f"127.0.0.1:{port}", lambda payload: Call(PATH, payload.body), metadata=(("authorization", "K"),))


def _load(port: int, shape: Shape, limit: Limit, timeout_s: float = 10.0) -> Tally:
    tally = Tally()

    async def work() -> None:
        async with _target(port).line(BODIES, timeout_s) as line:
            await line.load(shape, limit, tally)

    run(work)
    return tally


def test_exactly_as_many_calls_are_sent_as_were_asked_for(answers: GrpcAnswers) -> None:
    """Each payload in turn, with the key and the time that is waited for it as the call's deadline."""
    closed = _load(answers.port, Shape(4), Limit(10))
    opened = _load(answers.port, Shape(rate=500.0), Limit(7))

    assert (closed.sent, closed.answered, closed.failures) == (10, 10, 0)
    assert (opened.sent, opened.answered, len(opened.late)) == (7, 7, 7)
    assert sorted(call.message for call in answers.asked[:10]) == sorted([b"one"] * 4 + [b"two"] * 3 + [b"three"] * 3)
    assert {call.method for call in answers.asked} == {PATH}
    assert all(call.metadata["authorization"] == "K" for call in answers.asked)
    assert all(call.left_s is not None and 5 < call.left_s < 11 for call in answers.asked)


def test_failures_are_counted_by_the_name_of_their_status_and_their_cause(answers: GrpcAnswers) -> None:
    """With what the first of each said; they are answers, so that the server is not given up."""

    def refuse(call: Asked) -> Refusal | None:
        if call.message == b"one":
            return None
        if call.message == b"two":
            return grpc.StatusCode.UNAVAILABLE, "Full.", [("x-marserve-cause", "queue_full")]
        return grpc.StatusCode.INVALID_ARGUMENT, f"wants numbers, {len(answers.asked)}", []

    answers.refuse = refuse

    tally = _load(answers.port, Shape(), Limit(3 * MOST_UNANSWERED))

    assert tally.answered == MOST_UNANSWERED
    assert tally.failed == {
        Reason("UNAVAILABLE", "queue_full"): [MOST_UNANSWERED, "Full."],
        Reason("INVALID_ARGUMENT", "no reason given"): [MOST_UNANSWERED, "wants numbers, 3"],
    }
    assert not tally.gave_up


def test_a_silent_server_is_waited_for_as_long_as_was_asked(answers: GrpcAnswers) -> None:
    """The call counts as one without an answer, unlike one that the server itself calls late."""
    is_over = threading.Event()

    def refuse(call: Asked) -> Refusal | None:
        if call.message == b"one":
            is_over.wait(5)
        return (grpc.StatusCode.DEADLINE_EXCEEDED, "Late.", []) if call.message == b"two" else None

    answers.refuse = refuse

    tally = _load(answers.port, Shape(), Limit(3), timeout_s=0.3)
    is_over.set()

    assert tally.answered == 1
    assert list(tally.failed) == [
        Reason(None, "no answer within 0.3 s"),
        Reason("DEADLINE_EXCEEDED", "no reason given"),
    ]


def test_a_server_that_is_gone_ends_the_load_soon() -> None:
    """It is not hammered: some calls in a row without an answer are enough."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))

        tally = _load(closed.getsockname()[1], Shape(2), Limit(100_000))

    assert tally.answered == 0
    assert MOST_UNANSWERED <= tally.sent <= MOST_UNANSWERED + 2
    assert tally.gave_up == f"{MOST_UNANSWERED} requests in a row got no answer (connection refused)"


def test_a_server_that_dies_midway_leaves_what_was_measured() -> None:
    """Its answers count, then it is given up."""
    with grpc_answers() as dying:

        def refuse(call: Asked) -> Refusal | None:
            if len(dying.asked) == 5:
                threading.Thread(target=dying.stop, daemon=True).start()
                dying.stopped.wait(5)
            return None

        dying.refuse = refuse
        tally = _load(dying.port, Shape(), Limit(1000))

    assert tally.answered == 4
    assert tally.gave_up
    assert Reason(None, "connection refused") in tally.failed


def test_what_is_no_grpc_is_said_so() -> None:
    """As of a port of REST."""
    with scripted(Act((b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n",), True)) as server:
        port = int(server.address.rsplit(":", 1)[1])
        tally = _load(port, Shape(), Limit(1))

    assert list(tally.failed) == [Reason(None, "no gRPC")]


def test_one_call_says_how_it_failed_and_who_said_so(answers: GrpcAnswers) -> None:
    """None for one that was answered."""
    assert call_once(_target(answers.port), BODIES[0], 5.0) is None

    answers.refuse = lambda call: (grpc.StatusCode.NOT_FOUND, "No such model.", [])
    assert call_once(_target(answers.port), BODIES[0], 5.0) == ("Ask", "NOT_FOUND", "No such model.", True)

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        failed = call_once(_target(closed.getsockname()[1]), BODIES[0], 5.0)
    assert failed is not None
    assert (failed.code, failed.is_answer) == ("UNAVAILABLE", False)


def test_ctrl_c_leaves_what_was_seen(answers: GrpcAnswers) -> None:
    """The load ends at once; calls under way count neither as answered nor as failed."""
    tally = Tally()

    def refuse(call: Asked) -> Refusal | None:
        if len(answers.asked) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return None

    answers.refuse = refuse

    async def work() -> None:
        async with _target(answers.port).line(BODIES, 10.0) as line:
            await line.load(Shape(), Limit(100_000), tally)

    with pytest.raises(KeyboardInterrupt):
        run(work)

    assert 4 <= tally.answered <= tally.sent < 1000
    assert tally.failures == 0
