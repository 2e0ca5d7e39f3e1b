"""`POST /requests/{id}/replay`: a kept request is run again, with those that were in its batch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Query
from pydantic import WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from marserve.answers.management import (
    LeftOut,
    RecordedStage,
    ReplayedAnswer,
    ReplayedBatch,
    ReplayedRequest,
    ReplayedTime,
)
from marserve.api.errors import ErrorRules, error_status
from marserve.api.parameters import read_strictly
from marserve.api.request_ids import check_id
from marserve.api.rest.application import PrettyJson
from marserve.api.rest.late_routes import new_router
from marserve.api.rest.schemas import error_answers
from marserve.errors import CannotReplay, MarserveError, RequestUnknown
from marserve.messages import Answer
from marserve.registry.models import Registry
from marserve.telemetry.kept_requests import KeptAnswer, KeptRequest, KeptRequests, Replayed, answer_of, failure_of
from marserve.telemetry.recorder import Recorder, of_id
from marserve.telemetry.timeline import STAGES, Timeline, seconds_by_stage

MOST_TIMES: Final = 100
# After this time no further run is begun.
RUNS_FOR_S: Final = 60.0
MAX_MESSAGE: Final = 500

Compared = Literal["equal", "different", "unknown"]

_Version = Annotated[str | None, Query(description="the version that runs it, or a label; without: the one that did")]
_Times = Annotated[
    Annotated[str | None, WithJsonSchema({"type": "integer", "minimum": 1, "maximum": MOST_TIMES, "default": 1})],
    Query(description="how often; after a minute no further run is begun"),
]


def replay_router(
    registry: Registry, keeper: KeptRequests | None, recorder: Recorder | None, rules: ErrorRules
) -> APIRouter:
    """The route. `rules` say which status a failure has."""
    router = new_router(PrettyJson)
    runs: list[str] = []  # the id that is run now: one at a time, as each run holds a worker

    @router.post(
        "/requests/{request_id}/replay",
        operation_id="replayRequest",
        summary="Run a kept request again, in one batch with those that were in its batch, and compare",
        responses={200: {"model": ReplayedRequest}, **error_answers(400, 404, 409, 503)},
    )
    async def replay_request(
        request: Request, request_id: str, version: _Version = None, times: _Times = None
    ) -> Response:
        check_id(request_id)
        given = read_strictly(request.query_params, ("version", "times"))
        wanted, count = given.text("version") or None, given.up_to("times", 1, MOST_TIMES)
        kept = _find(request_id, keeper, recorder)
        mates = [] if keeper is None else keeper.batch_of(kept)
        if runs:
            raise CannotReplay(f"Request {runs[0]} is being run again now, one at a time: try again when that is over.")
        runs.append(request_id)
        try:
            return PrettyJson(
                await _replay(registry, kept, mates, wanted, count, lambda each: error_status(each, rules))
            )
        finally:
            runs.clear()

    return router


def _find(request_id: str, keeper: KeptRequests | None, recorder: Recorder | None) -> KeptRequest:
    """The kept request of this id, which can be run. Raises RequestUnknown and CannotReplay."""
    kept = None if keeper is None else keeper.find(request_id)
    if kept is None:
        known = [] if recorder is None else of_id(request_id, recorder)
        if not known:
            raise RequestUnknown(request_id, 0 if recorder is None else recorder.capacity)
        if keeper is None:
            raise CannotReplay(
                f"Request {request_id} is recorded, but no bodies are kept: start the server with replay_sample=1, or "
                "a smaller share of the batches."
            )
        if known[0].last is None:
            raise CannotReplay(f"Request {request_id} was with no worker, so there is nothing to run again.")
        raise CannotReplay(
            f"The body of request {request_id} is not kept: of all batches {keeper.share:.3g} are (replay_sample), and "
            f"the oldest leave when replay_size is full; {len(keeper)} requests are kept now."
        )
    if kept.is_inner:
        raise CannotReplay(
            f"Request {request_id} was a workflow's, or called by a handler, and is not kept by itself: what it did "
            f"last was a request to {kept.model} {kept.version}."
        )
    if kept.request is None:
        raise CannotReplay(f"Request {request_id} cannot be run again: {kept.why_not}.")
    return kept


async def _replay(
    registry: Registry,
    kept: KeptRequest,
    mates: Sequence[KeptRequest],
    wanted: str | None,
    count: int,
    status_of: Callable[[MarserveError], int],
) -> ReplayedRequest:
    """Run it so often, and say what came of it."""
    batch = [each for each in mates if each.request is not None]
    requests = [each.request for each in batch if each.request is not None]
    place = next(index for index, each in enumerate(batch) if each is kept)
    began = time.monotonic()
    ran: list[ReplayedTime] = []
    name = ""
    while len(ran) < count and (not ran or time.monotonic() - began < RUNS_FOR_S):
        asked_at = time.monotonic()
        name, replayed = await registry.replay(kept.model, wanted or kept.version, requests)
        # Hashing large answers takes a while.
        answers = await asyncio.to_thread(lambda ended: [_facts(each, status_of) for each in ended], replayed.ended)
        ran.append(_time(kept, name, asked_at, replayed, answers, batch, place))
    first = kept.timeline
    missing = [LeftOut(id=each.id, why=each.why_not) for each in mates if each.request is None]
    left_out = kept.batch.size - len(mates)
    found = {each.answer.compared for each in ran}
    return ReplayedRequest(
        id=kept.id,
        model=kept.model,
        version=name,
        answer="different" if "different" in found else "unknown" if "unknown" in found else "equal",
        first=ReplayedTime(
            version=kept.version,
            worker=_worker(kept.batch.worker, kept.model, kept.version),
            wall_ms=_ms(first.wall_s),
            stages=_stages(first),
            first_of_worker=kept.batch.is_first,
            answer=_told(kept.answer, kept.answer.status or first.status),
        ),
        times=ran,
        batch=ReplayedBatch(
            size=kept.batch.size,
            ran=[each.id for each in batch],
            missing=missing,
            unknown=max(0, left_out),
        ),
        headers_left_out=list(kept.left_out) or None,
        asked_times=count if len(ran) < count else None,
    )


def _facts(ended: Answer | MarserveError, status_of: Callable[[MarserveError], int]) -> tuple[KeptAnswer, int, str]:
    if isinstance(ended, Answer):
        return answer_of(ended), ended.status, ""
    return failure_of(ended), status_of(ended), ended.message[:MAX_MESSAGE]


def _compared(first: KeptAnswer, again: KeptAnswer) -> Compared:
    if (first.status, first.size, first.error) != (again.status, again.size, again.error):
        return "different"
    if not first.digest:
        return "unknown"
    return "equal" if first.digest == again.digest else "different"


def _time(
    kept: KeptRequest,
    version: str,
    asked_at: float,
    replayed: Replayed,
    answers: Sequence[tuple[KeptAnswer, int, str]],
    batch: Sequence[KeptRequest],
    place: int,
) -> ReplayedTime:
    timeline = Timeline(kept.id, asked_at, admitted_at=asked_at)
    timeline.left_in(replayed.times)
    own, status, message = answers[place]
    timeline.end(replayed.times.landed_at, status, own.size, own.error)
    differing = [
        each.id
        for index, each in enumerate(batch)
        if index != place and _compared(each.answer, answers[index][0]) == "different"
    ]
    return ReplayedTime(
        version=version,
        worker=_worker(replayed.times.worker, kept.model, version),
        wall_ms=_ms(timeline.wall_s),
        stages=_stages(timeline),
        first_of_worker=replayed.times.is_first,
        answer=_told(own, status, _compared(kept.answer, own), message),
        mates_different=differing or None,
    )


def _told(answer: KeptAnswer, status: int, compared: Compared | None = None, message: str = "") -> ReplayedAnswer:
    return ReplayedAnswer(
        compared=compared,
        status=status,
        bytes=answer.size,
        sha256=None if answer.error else answer.digest or None,
        error=answer.error or None,
        message=message or None,
    )


def _worker(key: str, model: str, version: str) -> str:
    return f"W-{key.partition('/')[0]}-{model}_{version}"


def _stages(timeline: Timeline) -> list[RecordedStage]:
    return [
        RecordedStage(name=name, ms=_ms(seconds))
        for name, seconds in zip(STAGES, seconds_by_stage(timeline), strict=True)
    ]


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
