"""Single requests on the management API: what the recorder knows of them, and why they took so long."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Annotated, Final, Literal, NamedTuple, get_args

from fastapi import APIRouter, Query
from pydantic import WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from marserve.answers.management import (
    ListedRequest,
    OtherRequest,
    RecordedBatch,
    RecordedPart,
    RecordedRequest,
    RecordedRequests,
    RecordedSpan,
    RecordedStage,
)
from marserve.api.parameters import read_strictly
from marserve.api.request_ids import check_id
from marserve.api.rest.application import PrettyJson
from marserve.api.rest.late_routes import new_router
from marserve.api.rest.schemas import Flag, error_answers
from marserve.errors import BadInput, RequestUnknown
from marserve.telemetry.explanation import CAUSES, Cause, Evidence, explain
from marserve.telemetry.happenings import Happening, Happenings
from marserve.telemetry.recorder import Recorder, of_id
from marserve.telemetry.timeline import STAGES, Timeline, parts_of, seconds_by_stage

DEFAULT_LIMIT: Final = 50
Order = Literal["slowest", "newest"]
ORDERS: Final[tuple[Order, ...]] = get_args(Order)
MOST_LISTED: Final = 1000
# Of a batch and of a repeated id at most so many others are named.
MOST_NAMED: Final = 100
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)(ms|s|m)?", re.ASCII).fullmatch
_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, None: 0.001}

_Slower = Annotated[str | None, Query(description="slower than this: `250ms`, `1.5s`; a number alone is milliseconds")]
_OfCause = Annotated[
    Annotated[str | None, WithJsonSchema({"enum": list(CAUSES)})],
    Query(description="most of whose time has this cause"),
]
_Limit = Annotated[
    Annotated[str | None, WithJsonSchema({"type": "integer", "minimum": 1, "maximum": MOST_LISTED, "default": 50})],
    Query(description="how many requests at most, the first of the order"),
]
_Ordered = Annotated[
    Annotated[str | None, WithJsonSchema({"enum": list(ORDERS), "default": "slowest"})],
    Query(description="which come first, and are listed if there are more than `limit`"),
]


def requests_router(recorder: Recorder, happenings: Happenings) -> APIRouter:
    """The routes."""
    router = new_router(PrettyJson)
    # One after the other: many at once would hold their evidence in memory at once, and keep the loop from its turns.
    turn = asyncio.Lock()

    @router.get(
        "/requests",
        operation_id="listRequests",
        summary="The slowest, or the newest, of the recorded requests, each with the cause of most of its time",
        responses={200: {"model": RecordedRequests}, **error_answers(400)},
    )
    async def list_requests(
        request: Request,
        model: Annotated[str | None, Query(description="requests of this model")] = None,
        slower_than: _Slower = None,
        cause: _OfCause = None,
        failed: Annotated[
            Flag, Query(description="only those that failed by the server's or the handler's fault")
        ] = None,
        previous: Annotated[
            Flag, Query(description="those of the server before, from its `flight_recorder_file`")
        ] = None,
        order: _Ordered = None,
        limit: _Limit = None,
    ) -> Response:
        wanted = read_wanted(request.query_params)
        async with turn:
            if wanted.previous:
                known, meanwhile = await asyncio.to_thread(recorder.previous), []
            else:
                known, meanwhile = list(recorder), list(happenings)
            return await asyncio.to_thread(lambda: PrettyJson(_listed(known, meanwhile, wanted)))

    @router.get(
        "/requests/{request_id}",
        operation_id="explainRequest",
        summary="One request from its first byte to its last, and why it took so long",
        responses={200: {"model": RecordedRequest}, **error_answers(400, 404)},
    )
    async def explain_request(request_id: str) -> Response:
        check_id(request_id)
        async with turn:
            known, meanwhile = list(recorder), list(happenings)
            found = of_id(request_id, known)
            if not found and await asyncio.to_thread(recorder.may_have_previous, request_id):
                known, meanwhile = (await asyncio.to_thread(recorder.previous))[::-1], []
                found = of_id(request_id, known)
            if not found:
                raise RequestUnknown(request_id, recorder.capacity)
            return await asyncio.to_thread(lambda: PrettyJson(_explained(found, known, meanwhile)))

    return router


class Wanted(NamedTuple):
    """Which requests a list shall have."""

    model: str | None
    slower_than_s: float
    cause: Cause | None
    only_failed: bool
    previous: bool
    order: Order
    limit: int


def read_wanted(values: Mapping[str, str]) -> Wanted:
    """Read the query of a list. Raises BadInput."""
    given = read_strictly(values, ("model", "slower_than", "cause", "failed", "previous", "order", "limit"))
    limit = given.up_to("limit", DEFAULT_LIMIT, MOST_LISTED)
    word = given.text("cause")
    cause = next((each for each in CAUSES if each == word), None)
    if word and cause is None:
        raise BadInput(f"cause is {word[:100]!r}; it is one of {', '.join(CAUSES)}.")
    word = given.text("order") or "slowest"
    order = next((each for each in ORDERS if each == word), None)
    if order is None:
        raise BadInput(f"order is {word[:100]!r}; it is one of {', '.join(ORDERS)}.")
    slower = given.text("slower_than")
    return Wanted(
        given.text("model") or None,
        read_duration("slower_than", slower) if slower else 0.0,
        cause,
        given.flag("failed", default=False),
        given.flag("previous", default=False),
        order,
        limit,
    )


def read_duration(name: str, word: str) -> float:
    """Seconds in `250ms`, `1.5s`, `2m`; a number alone is milliseconds. Raises BadInput."""
    found = _DURATION(word)
    if found is None:
        raise BadInput(f"{name} is {word[:100]!r}; it must be a time as 250ms, 1.5s or 2m.")
    return float(found[1]) * _UNIT_S[found[2]]


def _listed(known: Sequence[Timeline], meanwhile: Sequence[Happening], wanted: Wanted) -> RecordedRequests:
    evidence = Evidence(known, meanwhile)
    fit = [
        each
        for each in known
        if each.wall_s > wanted.slower_than_s
        and (wanted.model is None or each.model == wanted.model)
        and (each.has_failed or not wanted.only_failed)
    ]
    fit.sort(key=lambda each: -each.began if wanted.order == "newest" else -each.wall_s)
    listed: list[ListedRequest] = []
    # Explaining takes time: of very many only the first are looked at.
    for timeline in fit[: 10 * MOST_LISTED]:
        explanation = explain(timeline, evidence)
        if wanted.cause is not None and explanation.cause != wanted.cause:
            continue
        listed.append(
            ListedRequest(
                id=timeline.id,
                model=timeline.model,
                version=timeline.version,
                status=timeline.status,
                started=_started(timeline),
                wall_ms=_ms(timeline.wall_s),
                cause=explanation.cause,
                why=explanation.why,
                client_id=timeline.client_id or None,
                error=timeline.error or None,
            )
        )
        if len(listed) >= wanted.limit:
            break
    return RecordedRequests(requests=listed, recorded=len(known))


def _explained(found: Sequence[Timeline], known: Sequence[Timeline], meanwhile: Sequence[Happening]) -> RecordedRequest:
    evidence = Evidence(known, meanwhile)
    timeline, last = found[0], found[0].last
    explanation = explain(timeline, evidence)
    batch, spans = None, None
    if last is not None and last.worker:
        members = [each for each in evidence.members(last) if each is not timeline]
        batch = RecordedBatch(
            size=last.size,
            mates=[each.id for each in members[:MOST_NAMED]],
            runs=timeline.runs,
            first_of_worker=last.is_first,
            handler_ms=_ms(last.handler_s),
            padding=_padding([timeline.bytes_in, *(each.bytes_in for each in members)], last.size),
        )
        if last.work is not None and last.work.spans:
            spans = [
                RecordedSpan(name=span.name, after_ms=_ms(span.after_s), ms=_ms(span.seconds))
                for span in last.work.spans
            ]
    happened = [
        f"{_before(each.began - timeline.began)}: {each.model + ' ' if each.model else ''}{each.text}"
        for each in evidence.happenings
        if each.went_on(timeline.began, timeline.written_at)
    ]
    return RecordedRequest(
        id=timeline.id,
        client_id=timeline.client_id or None,
        trace_id=None if timeline.trace is None else timeline.trace.trace_id,
        model=timeline.model,
        version=timeline.version,
        worker=_worker(timeline),
        status=timeline.status,
        error=timeline.error or None,
        started=_started(timeline),
        wall_ms=_ms(timeline.wall_s),
        bytes_in=timeline.bytes_in,
        bytes_out=timeline.bytes_out,
        stages=[
            RecordedStage(name=name, ms=_ms(seconds))
            for name, seconds in zip(STAGES, seconds_by_stage(timeline), strict=True)
        ],
        spans=spans,
        parts=[
            _part(part, depth, timeline.began)
            for part, depth in islice((each for each in parts_of(timeline) if each[0].written_at), MOST_NAMED)
        ]
        or None,
        batch=batch,
        first_piece_ms=_ms(timeline.first_piece_at - timeline.began) if timeline.first_piece_at else None,
        moved_from=timeline.moved_from or None,
        remote_worker=True if timeline.has_remote_worker else None,
        cause=explanation.cause,
        why=explanation.why,
        also=list(explanation.also),
        meanwhile=happened[:MOST_NAMED],
        others=[OtherRequest(id=each.id, started=_started(each)) for each in found[1:MOST_NAMED]],
    )


def _part(part: Timeline, depth: int, began: float) -> RecordedPart:
    return RecordedPart(
        name=part.what,
        depth=depth,
        model=part.model,
        version=part.version,
        status=part.status,
        error=part.error or None,
        after_ms=_ms(part.began - began),
        ms=_ms(part.wall_s),
        stages=[
            RecordedStage(name=name, ms=_ms(seconds))
            for name, seconds in zip(STAGES, seconds_by_stage(part), strict=True)
        ],
    )


def _worker(timeline: Timeline) -> str:
    key = "" if timeline.last is None else timeline.last.worker
    return f"W-{key.partition('/')[0]}-{timeline.model}_{timeline.version}" if key else ""


def _padding(sizes: Sequence[int], batch_size: int) -> float | None:
    """The share that is padding if all inputs are padded to the largest; None if not all of the batch are known."""
    if batch_size < 2 or len(sizes) != batch_size or not max(sizes):
        return None
    return round(1 - sum(sizes) / (max(sizes) * batch_size), 3)


def _started(timeline: Timeline) -> str:
    """When its first byte came, by the clock as it is set now."""
    at = time.time() - (time.monotonic() - timeline.began)
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _before(seconds: float) -> str:
    return f"{-seconds * 1000:.0f} ms before its first byte" if seconds < 0 else f"after {seconds * 1000:.0f} ms"
