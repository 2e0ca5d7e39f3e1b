"""Tests for calls that handlers make of other models: what is handed on, what is refused, what comes back."""

from __future__ import annotations

from typing import Any, cast

import pytest

from marserve.errors import DeadlinePassed, HandlerFailed, MarserveError, ModelNotFound, NoWorker, OutOfMemory
from marserve.messages import Answer, Called, Receiver, Request, Returned
from marserve.registry.data_plane import DataPlane
from marserve.registry.model_calls import MOST_DEPTH, ModelCalls
from marserve.telemetry.timeline import Timeline
from marserve.telemetry.trace_context import own_trace


class Stage:
    """Calls with a data plane of the test's, which keeps requests and receivers, or raises."""

    def __init__(self, error: MarserveError | None = None) -> None:
        self.error = error
        self.submitted: list[tuple[str, str | None, Request, Receiver]] = []
        self.replies: list[tuple[Returned, bytes]] = []
        self.calls = ModelCalls()
        self.calls.open(cast("DataPlane", self))

    def submit(self, model: str, version: str | None, request: Request, receiver: Receiver) -> Any:
        """As the data plane."""
        if self.error is not None:
            raise self.error
        self.submitted.append((model, version, request, receiver))

    def call(self, caller: str, model: str, request: Request | None = None, **members: Any) -> None:
        """A handler of `caller` calls `model`."""
        message = Called(1, 0, 5, model, members.pop("version", None), "text/plain", [("x-a", "ü")])
        request = request or Request("id", [], **members)
        self.calls.take(caller, request, message, b"body", 100.0, 10.0, lambda *reply: self.replies.append(reply))


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ModelNotFound("b"), 404),
        (NoWorker("b"), 503),
        (HandlerFailed("bad", 418), 418),
        (HandlerFailed(), 500),
        (DeadlinePassed("queue"), 504),
        (OutOfMemory("none left"), 507),
    ],
)
def test_a_refusal_is_the_callers_to_hear(error: MarserveError, status: int) -> None:
    """With a status that it may pass on, and the words that a client would get."""
    stage = Stage(error)

    stage.call("a", "b")

    assert stage.replies == [(Returned(5, status, [], error.message), b"")]


def test_a_model_does_not_wait_for_itself() -> None:
    """Directly, or through others that wait now."""
    stage = Stage()

    stage.call("a", "a")
    stage.call("a", "b")
    stage.call("b", "c")
    stage.call("c", "a")

    assert [(reply.status, reply.failure) for reply, _ in stage.replies] == [
        (508, "a is not called by a: it would wait for itself."),
        (508, "a is not called by c: it would wait for itself."),
    ]


def test_an_ended_call_holds_up_no_other() -> None:
    """However it ended."""
    stage = Stage()
    stage.call("a", "b")
    stage.call("a", "b")

    for _, _, _, receiver in stage.submitted:
        receiver.on_error(NoWorker("b"))
    stage.call("b", "a")

    assert [model for model, *_ in stage.submitted] == ["b", "b", "a"]


def test_chains_have_an_end() -> None:
    """Of different models, each called by the last."""
    stage = Stage()

    stage.call("a", "b", depth=MOST_DEPTH)

    assert stage.replies[0][0].failure == f"b is not called: {MOST_DEPTH} models wait already."


def test_the_call_is_a_request_in_the_callers_name() -> None:
    """Its id, its priority, its deadline or the caller's limit, whichever is sooner; accepted while draining."""
    stage = Stage()

    stage.call("a", "b", version="2.0", deadline=105.0, priority=3, client_id="c")
    stage.call("a", "b", deadline=200.0)
    stage.call("a", "b")

    (_, version, request, _), *others = stage.submitted
    assert (version, request.id, request.client_id, request.priority, request.depth) == ("2.0", "id", "c", 3, 1)
    assert (request.is_inner, request.names_version, request.deadline) == (True, True, 105.0)
    assert request.key
    assert (request.parts[0].body, request.parts[0].content_type) == (b"body", "text/plain")
    assert request.headers == [(b"x-a", "ü".encode("latin-1"))]
    assert [each[2].deadline for each in others] == [109.0, 109.0]


def test_the_answer_comes_whole() -> None:
    """Of a stream with all its pieces; only the first one's status and headers count."""
    stage = Stage()
    stage.call("a", "b")
    receiver = stage.submitted[0][3]

    receiver.on_piece(Answer(b"one ", 201, "", [("x", "y")]), False)
    receiver.on_piece(Answer(b"two"), True)

    assert stage.replies == [(Returned(5, 201, [("x", "y")]), b"one two")]


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01".encode()


def test_a_call_carries_the_trace_on_and_no_other_header() -> None:
    """Of what came with the caller's request; what the author names wins."""
    stage = Stage()
    lines = [(b"Traceparent", PARENT), (b"X-A", b"no"), (b"baggage", b"k=v"), (b"authorization", b"no")]
    stage.call("a", "b", Request("id", [], lines))

    [(_, _, inner, _)] = stage.submitted
    assert inner.headers == [(b"x-a", "ü".encode("latin-1")), (b"traceparent", PARENT), (b"baggage", b"k=v")]
    assert inner.timeline is None


def test_a_call_of_a_traced_request_is_a_part_of_it() -> None:
    """Below the handler's span, and it ends with its answer."""
    timeline = Timeline("id", 100.0, trace=own_trace("x"))
    assert timeline.trace is not None
    stage = Stage()
    stage.call("a", "b", Request("id", [], timeline=timeline))
    stage.call("a", "c", Request("id", [], timeline=timeline))

    [(_, _, inner, receiver), (_, _, _, other)] = stage.submitted
    receiver.on_answer(Answer(b"abc"))
    other.on_error(NoWorker("c"))
    [part, failed] = timeline.parts or []
    assert inner.timeline is part
    assert part.trace is not None
    assert (part.trace.what, part.trace.parent_id) == ("call b", timeline.trace.handle_id)
    assert inner.headers[-1] == (b"traceparent", timeline.trace.for_handler)
    assert (part.status, part.bytes_out, part.written_at > 0) == (200, 3, True)
    assert (failed.status, failed.error) == (503, "no_worker")


def test_a_call_within_a_span_of_the_authors_own_stands_below_that() -> None:
    """If it is one of the same trace."""
    timeline = Timeline("id", 100.0, trace=own_trace("x"))
    assert timeline.trace is not None
    for trace_id, expected in ((timeline.trace.trace_id, "1" * 16), (TRACE, timeline.trace.handle_id)):
        stage = Stage()
        message = Called(1, 0, 5, "b", None, None, [("traceparent", f"00-{trace_id}-{'1' * 16}-01")])
        request = Request("id", [], timeline=timeline)
        stage.calls.take("a", request, message, b"", 100.0, 10.0, lambda *reply: None)
        inner = stage.submitted[0][2].timeline
        assert inner.trace.parent_id == expected
