"""Spans made of timelines."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from marserve.messages import Span as AuthorsSpan
from marserve.messages import Work
from marserve.telemetry.happenings import Happening, Kind
from marserve.telemetry.metrics.stages import StageSeconds
from marserve.telemetry.timeline import MOST_PARTS, MOST_TRACES, STAGES, BatchTimes, Timeline
from marserve.telemetry.trace_context import Parent, new_trace, own_trace
from marserve.telemetry.traces.exporter import Exporter
from marserve.telemetry.traces.sampling import Sampling
from marserve.telemetry.traces.spans import EndedRequest, Span, batches_of, count_spans, route_of, spans_of
from marserve.telemetry.traces.tracing import Tracing

VERSION = StageSeconds("digits", "1.0", (1.0,))
PARENT = Parent("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", 1, "a=1")


def request(*, batch: BatchTimes | None = None, began: float = 100.0, what: str = "", **facts: int | str) -> Timeline:
    """A request that has ended, in a batch that has landed."""
    trace = new_trace(PARENT, what or "POST /predictions/digits?x=1 HTTP/1.1", lambda parent, _: 1)
    timeline = Timeline("a", began + 1.003, 10, trace=trace)
    timeline.came_in_pieces(began, began + 0.001)
    timeline.admitted_at = began + 1.01
    timeline.of = VERSION
    batch = batch or BatchTimes("9000/0", 1, began + 1.11)
    timeline.left_in(batch)
    batch.land(began + 2.0, 0.5, Work(began + 1.13, 0.04, 0.08, spans=[AuthorsSpan("tokenise", 0.05, 0.2)]))
    timeline.end(began + 2.1, int(facts.get("status", 200)), 5, str(facts.get("error", "")))
    return timeline


class Nowhere:
    """Sends nothing."""

    def send(self, spans: Sequence[Span]) -> str:
        """Nothing."""
        return ""

    def close(self) -> None:
        """Nothing."""


def spans(timeline: Timeline) -> list[Span]:
    """The spans of a request as the exporter makes them."""
    parts = timeline.parts or ()
    item = EndedRequest(timeline, parts, batches_of(timeline, parts))
    made = spans_of(item)
    assert len({each.span_id for each in made}) == len(made)
    assert all(each.ended >= each.began for each in made)
    return made


def test_each_stage_is_a_child_of_the_request() -> None:
    """One after the other, from the first byte to the last."""
    timeline = request()
    root, *children = spans(timeline)

    assert (root.parent_id, root.trace.trace_id, root.kind) == (PARENT.span_id, PARENT.trace_id, "server")
    stages = [each for each in children if each.name in STAGES]
    assert [each.name for each in stages] == list(STAGES)
    assert all(each.parent_id == root.span_id and each.trace == root.trace for each in stages)
    assert (stages[0].began, stages[-1].ended) == pytest.approx((root.began, root.ended))
    assert all(before.ended == pytest.approx(after.began) for before, after in pairwise(stages))
    assert len([root, *stages]) == count_spans(EndedRequest(timeline, (), ()))


def test_a_request_has_open_telemetrys_attributes() -> None:
    """And its name has nothing that a client chooses."""
    root = spans(request())[0]

    assert root.name == "POST /predictions/{model_name}"
    assert root.attributes == {
        "marserve.request.id": "a",
        "marserve.model.name": "digits",
        "marserve.model.version": "1.0",
        "marserve.request.bytes": 10,
        "marserve.response.bytes": 5,
        "http.request.method": "POST",
        "http.route": "/predictions/{model_name}",
        "url.path": "/predictions/digits",
        "http.response.status_code": 200,
    }


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/predictions/a", "/predictions/{model_name}"),
        ("/predictions/a/1.0", "/predictions/{model_name}/{model_version}"),
        ("/explanations/a", "/explanations/{model_name}"),
        ("/v1/models/a:predict", "/v1/models/{model_name}:predict"),
        ("/v2/models/a/versions/1.0/infer", "/v2/models/{model_name}/versions/{model_version}/infer"),
        ("/v2/models/models/infer", "/v2/models/{model_name}/infer"),
        ("/wfpredict/w", "/wfpredict/{workflow_name}"),
        ("/invocations", "/invocations"),
        ("/models/a/invoke", "/models/{model_name}/invoke"),
        ("/predictions/predictions/b", "/predictions/{model_name}/{model_version}"),
        ("", ""),
    ],
)
def test_a_route_has_the_names_of_its_parameters(path: str, route: str) -> None:
    """So that a collector groups by it."""
    assert route_of(path) == route


def test_a_very_long_line_is_kept_in_part() -> None:
    """A client may send 8 KiB of it, and the recorder keeps thousands."""
    taken = Tracing(Exporter(Nowhere()), Sampling(1.0)).begin((), f"GET /predictions/{'x' * 5000} HTTP/1.1")
    assert len(taken.what) < 300
    root = spans(request(what=taken.what))[0]
    assert (root.name, len(str(root.attributes["url.path"]))) == ("GET /predictions/{model_name}", 252)


def test_a_call_over_grpc_is_named_as_its_method() -> None:
    """As the conventions have it."""
    root = spans(request(what="gRPC /org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"))[0]

    assert root.name == "org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"
    assert root.attributes["rpc.system"] == "grpc"
    assert root.attributes["rpc.method"] == "Predictions"


def test_a_handlers_span_is_there_however_short_its_time() -> None:
    """Spans of its author's, in other services too, stand below it."""
    timeline = request(batch=BatchTimes("9000/0", 1, 101.11, free_at=102.0))
    handle = next(each for each in spans(timeline) if each.name == "handle")
    assert (handle.ended - handle.began, handle.span_id) == (0.0, handle.trace.handle_id)


def test_authors_spans_stand_below_the_handlers_time() -> None:
    """Which has the id that the handler was given."""
    made = spans(request())
    handle = next(each for each in made if each.name == "handle")
    named = next(each for each in made if each.name == "tokenise")

    assert handle.span_id == handle.trace.handle_id
    assert (named.parent_id, named.began, named.ended) == (handle.span_id, pytest.approx(101.18), pytest.approx(101.38))
    assert handle.attributes == {"marserve.worker": "W-9000-digits_1.0", "marserve.batch.size": 1}


def test_a_batch_is_a_span_of_its_own_that_is_linked_to_its_requests() -> None:
    """It is made once, whichever of its requests is kept, and each of those is linked to it."""
    batch = BatchTimes("9000/0", 3, 101.11)
    requests = [request(batch=batch) for _ in range(3)]
    first, second, _ = [spans(each) for each in requests]

    [one] = [each for each in first if each.name == "batch digits"]
    assert list(one.links) == [(each.trace.trace_id, each.trace.span_id) for each in requests if each.trace]
    assert one.attributes["marserve.batch.size"] == 3
    assert one.trace.trace_id != PARENT.trace_id
    assert not [each for each in second if each.name == "batch digits"]
    for made in (first, second):
        handle = next(each for each in made if each.name == "handle")
        assert list(handle.links) == [(one.trace.trace_id, one.span_id)]


def test_a_request_with_several_instances_in_a_batch_is_linked_once() -> None:
    """They are cut of one request."""
    batch = BatchTimes("9000/0", 2, 101.11)
    timeline = request(batch=batch)
    timeline.left_in(batch)
    [one] = [each for each in spans(timeline) if each.name == "batch digits"]
    assert len(one.links) == 1


def test_a_batch_knows_so_many_of_its_requests() -> None:
    """As many links as OpenTelemetry keeps."""
    batch = BatchTimes("9000/0", 1000, 101.11)
    for _ in range(1000):
        request(batch=batch)
    assert len(batch.traces or ()) == MOST_TRACES


def test_a_failed_request_says_of_what() -> None:
    """A client's mistake is no failure of the server's."""
    root = spans(request(status=503, error="queue_full"))[0]
    assert (root.error, root.attributes["error.type"]) == ("queue_full", "queue_full")
    root = spans(request(status=400, error="bad_input"))[0]
    assert (root.error, root.attributes["marserve.cause"]) == ("", "bad_input")
    assert "error.type" not in root.attributes


def test_a_refused_request_has_the_stages_that_it_reached() -> None:
    """And no batch."""
    timeline = Timeline("a", 100.0, trace=own_trace("POST /predictions/x HTTP/1.1"))
    timeline.end(100.5, 404, 0, "unknown")
    assert [each.name for each in spans(timeline)] == ["POST /predictions/{model_name}", "admit"]


def test_nodes_of_a_workflow_are_children_with_stages_and_calls_stand_below_the_handler() -> None:
    """However deep."""
    whole = Timeline("a", 100.0, trace=own_trace("POST /wfpredict/w HTTP/1.1"))
    node = whole.part("node pre", 100.1)
    assert node is not None
    assert node.trace is not None
    call = node.part("call other", 100.2, node.trace.handle_id)
    assert call is not None
    left = whole.part("node slow", 100.3)
    call.end(100.4, 200, 1)
    node.end(100.5, 200, 1)
    whole.end(101.0, 200, 1)
    made = {each.name: each for each in spans(whole)}

    root = made["POST /wfpredict/{workflow_name}"]
    assert made["node pre"].parent_id == root.span_id
    assert made["call other"].parent_id == node.trace.handle_id
    assert left is not None
    assert made["node slow"].ended == 101.0, "one that nobody waited for ends with the whole"
    assert len({each.trace.trace_id for each in made.values()}) == 1


def test_a_request_is_followed_to_so_many_others() -> None:
    """A handler may make thousands of calls."""
    whole = Timeline("a", 100.0, trace=own_trace("x"))
    assert [whole.part("call x", 100.0) is None for _ in range(MOST_PARTS + 1)] == [False] * MOST_PARTS + [True]
    whole.end(101.0, 200, 1)
    assert whole.part("call x", 102.0) is None
    part = Timeline("a", 100.0).part("call x", 100.0)
    assert part is not None
    assert (part.what, part.trace) == ("call x", None), "no traces are kept"


def test_a_stream_says_when_its_first_piece_came() -> None:
    """As an event."""
    timeline = request()
    timeline.first_piece_at = 101.5
    assert list(spans(timeline)[0].events) == [("first_piece", 101.5)]


@pytest.mark.parametrize(
    ("kind", "model", "name"),
    [
        ("load", "digits", "load digits"),
        ("eviction", "digits", "eviction digits"),
        ("rollback", "digits", "rollback digits"),
        ("download", "", "download"),
    ],
)
def test_what_was_done_for_a_model_is_a_trace_of_its_own(kind: Kind, model: str, name: str) -> None:
    """With what was done, to which model, where one is known by then."""
    [span] = spans_of(Happening(kind, 1.0, 3.0, model, "1.0" if model else "", "what was done"))

    assert (span.name, span.began, span.ended, span.parent_id) == (name, 1.0, 3.0, "")
    assert span.attributes["marserve.what"] == "what was done"
    assert span.attributes.get("marserve.model.name", "") == model
