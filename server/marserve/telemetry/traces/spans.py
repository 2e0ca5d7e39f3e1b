"""A timeline as spans, with OpenTelemetry's names where it has some. Pure, but for new random ids.

A request is one span, each of its stages a child. What it had done by others (the nodes of a workflow, models that its
handler called) are children with stages of their own. A batch is a trace of its own, linked to its requests, and each
of those to the batch. Moments are seconds on the server's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from marserve.telemetry.happenings import Happening
from marserve.telemetry.timeline import STAGES, BatchTimes, Timeline, seconds_by_stage
from marserve.telemetry.trace_context import Trace, new_span_id, own_trace

Value = str | int | float | bool
# The segments of a path after which a name of the client's comes; it must not be in the name of a span.
_NAMED_AFTER: Final[Mapping[str, str]] = {
    "predictions": "{model_name}",
    "explanations": "{model_name}",
    "models": "{model_name}",
    "versions": "{model_version}",
    "wfpredict": "{workflow_name}",
}
GRPC: Final = "gRPC "
NODE: Final = "node "
CALL: Final = "call "
# The longest path that is kept of a request.
MAX_PATH: Final = 256


class Span(msgspec.Struct):
    """One span. `error` is the class of a failure, empty without one. `links` are (trace id, span id)."""

    name: str
    trace: Trace
    span_id: str
    parent_id: str
    began: float
    ended: float
    kind: Literal["server", "internal"] = "internal"
    attributes: dict[str, Value] = {}
    links: Sequence[tuple[str, str]] = ()
    events: Sequence[tuple[str, float]] = ()
    error: str = ""


class EndedRequest(NamedTuple):
    """A request whose spans are sent, the requests that it made, and those of its batches that are not yet sent."""

    timeline: Timeline
    parts: Sequence[Timeline]
    batches: Sequence[tuple[BatchTimes, str, str]]


Item = EndedRequest | Happening


def spans_of(item: Item) -> list[Span]:
    """All spans of a request that was kept, or the one of something else that the server did."""
    if isinstance(item, Happening):
        return [_of_happening(item)]
    end = item.timeline.written_at
    spans = list(_of_request(item.timeline, item.parts, end))
    for batch, model, version in item.batches:
        spans += _of_batch(batch, model, version)
    return spans


def count_spans(item: Item) -> int:
    """About how many spans that are, without making them; those of authors are left out."""
    if isinstance(item, Happening):
        return 1
    stages = sum(sum(map(bool, seconds_by_stage(each))) for each in (item.timeline, *item.parts))
    return 1 + len(item.parts) + stages + len(item.batches)


def batches_of(timeline: Timeline, parts: Sequence[Timeline]) -> list[tuple[BatchTimes, str, str]]:
    """The batches of several requests in which these were, each once over all calls; it gets its trace here."""
    found = []
    for each in (timeline, *parts):
        for batch in (each.first, each.last):
            if batch is not None and batch.size > 1 and batch.landed_at and batch.trace is None:
                batch.trace = own_trace("batch")
                found.append((batch, each.model, each.version))
        if each is not timeline and each.parts:
            found += batches_of(each, each.parts)
    return found


def _of_request(timeline: Timeline, parts: Sequence[Timeline], end: float) -> Iterator[Span]:
    trace = timeline.trace
    if trace is None:
        return
    ended = timeline.written_at or max(timeline.began, end)  # a part that nobody waited for
    error = timeline.error if timeline.has_failed else ""
    if timeline.has_failed and not error:
        error = str(timeline.status)
    name, attributes = _named(trace.what, timeline)
    yield Span(
        name,
        trace,
        trace.span_id,
        trace.parent_id,
        timeline.began,
        ended,
        "internal" if trace.what.startswith((NODE, CALL)) else "server",
        attributes,
        events=(("first_piece", timeline.first_piece_at),) if timeline.first_piece_at else (),
        error=error,
    )
    if timeline.written_at:
        yield from _of_stages(timeline, trace)
    for part in parts:
        yield from _of_request(part, part.parts or (), ended)


def _named(what: str, timeline: Timeline) -> tuple[str, dict[str, Value]]:
    """The name and the attributes of a request's span."""
    attributes: dict[str, Value] = {"marserve.request.id": timeline.id}
    if timeline.client_id:
        attributes["marserve.request.client_id"] = timeline.client_id
    if timeline.model and not timeline.version:
        attributes["marserve.workflow.name"] = timeline.model
    elif timeline.model:
        attributes["marserve.model.name"] = timeline.model
        attributes["marserve.model.version"] = timeline.version
    if timeline.moved_from:
        attributes["marserve.moved_from"] = timeline.moved_from
    if timeline.runs > 1:
        attributes["marserve.runs"] = timeline.runs
    if timeline.error:
        # A client's mistake is no error of the server's span.
        attributes["error.type" if timeline.has_failed else "marserve.cause"] = timeline.error
    if what.startswith((NODE, CALL)):
        return what, attributes
    attributes["marserve.request.bytes"] = timeline.bytes_in
    attributes["marserve.response.bytes"] = timeline.bytes_out
    if what.startswith(GRPC):
        path = what[len(GRPC) :].lstrip("/")
        service, _, method = path.rpartition("/")
        attributes.update({"rpc.system": "grpc", "rpc.service": service, "rpc.method": method})
        return path, attributes
    method, _, rest = what.partition(" ")
    path = rest.rpartition(" ")[0].partition("?")[0]
    route = route_of(path)
    attributes.update(
        {
            "http.request.method": method,
            "http.route": route,
            "url.path": path[:MAX_PATH],
            "http.response.status_code": timeline.status,
        }
    )
    return f"{method} {route}", attributes


def route_of(path: str) -> str:
    """A path with the names that clients choose replaced by what they name."""
    segments: list[str] = []
    before = ""
    for number, segment in enumerate(path.split("/")):
        parameter = _NAMED_AFTER.get(before)
        if parameter is None and number == 3 and segments[1] in ("predictions", "explanations"):
            parameter = "{model_version}"
        verb = segment.rpartition(":")[2] if ":" in segment else ""
        before = "" if parameter else segment
        segments.append(segment if parameter is None else f"{parameter}:{verb}" if verb else parameter)
    return "/".join(segments)[:MAX_PATH]


def _of_stages(timeline: Timeline, trace: Trace) -> Iterator[Span]:
    at = timeline.began
    last = timeline.last
    for stage, seconds in zip(STAGES, seconds_by_stage(timeline), strict=True):
        began, at = at, at + seconds
        if stage == "decode":
            decoded = began
        if stage != "handle" or last is None:
            if seconds > 0.0:
                yield Span(stage, trace, new_span_id(), trace.span_id, began, at)
            continue
        # However short: its author's spans, here and in other services, stand below it.
        link = () if last.trace is None else ((last.trace.trace_id, last.trace.span_id),)
        yield Span(
            stage, trace, trace.handle_id, trace.span_id, began, at, attributes=_of_work(last, timeline), links=link
        )
        begin = decoded if last.work is None or timeline.has_remote_worker else last.work.began or decoded
        yield from _of_author(last, trace, trace.handle_id, begin)


def _of_work(batch: BatchTimes, timeline: Timeline) -> dict[str, Value]:
    """What is known of the worker's part."""
    if not batch.worker:  # a workflow's nodes
        return {}
    attributes: dict[str, Value] = {
        "marserve.worker": f"W-{batch.worker.partition('/')[0]}-{timeline.model}_{timeline.version}",
        "marserve.batch.size": batch.size,
    }
    work = batch.work
    if work is not None:
        for name in ("collected_s", "waited_s", "printed_s"):
            if seconds := getattr(work, name):
                attributes[f"marserve.worker.{name}"] = seconds
    return attributes


def _of_author(batch: BatchTimes, trace: Trace, parent_id: str, begin: float) -> Iterator[Span]:
    """The spans that the handler's author named."""
    work = batch.work
    for each in list(work.spans) if work is not None else ():
        began = begin + each.after_s
        yield Span(each.name, trace, new_span_id(), parent_id, began, began + each.seconds)


def _of_batch(batch: BatchTimes, model: str, version: str) -> Iterator[Span]:
    trace = batch.trace
    if trace is None:
        return
    members = batch.traces or ()
    attributes: dict[str, Value] = {
        "marserve.model.name": model,
        "marserve.model.version": version,
        "marserve.worker": f"W-{batch.worker.partition('/')[0]}-{model}_{version}",
        "marserve.batch.size": batch.size,
        "marserve.handler_s": batch.handler_s,
    }
    yield Span(
        f"batch {model}",
        trace,
        trace.span_id,
        "",
        batch.begins_at,
        max(batch.begins_at, batch.landed_at),
        attributes=attributes,
        # Once each: a request may be in a batch with several of its instances.
        links=list(dict.fromkeys((each.trace_id, each.span_id) for each in members)),
    )
    work = batch.work
    if work is not None and work.began:
        yield from _of_author(batch, trace, trace.span_id, work.began)


def _of_happening(happening: Happening) -> Span:
    trace = own_trace(happening.kind)
    attributes: dict[str, Value] = {"marserve.what": happening.text}
    if happening.model:
        attributes["marserve.model.name"] = happening.model
        attributes["marserve.model.version"] = happening.version
    name = f"{happening.kind} {happening.model}".strip()
    return Span(name, trace, trace.span_id, "", happening.began, happening.ended, attributes=attributes)
