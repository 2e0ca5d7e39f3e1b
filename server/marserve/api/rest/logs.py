"""The logs on the management API: asked for, followed as Server-Sent Events, and their level, changed while it serves.

A follower whose client takes its lines too slowly gets an event that says so, and no more.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Final, Protocol

import msgspec
from fastapi import APIRouter, Query
from pydantic import WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from marserve.answers.management import LoggingLevels, LogLine, LogLines
from marserve.api.parameters import JsonParameters, QueryParameters, read_strictly
from marserve.api.request_ids import MAX_CLIENT_ID
from marserve.api.rest.application import PrettyJson
from marserve.api.rest.hang_up import while_connected
from marserve.api.rest.late_routes import new_router
from marserve.api.rest.schemas import Flag, error_answers
from marserve.api.rest.short_body import read_short_body
from marserve.errors import BadInput, ClientGone
from marserve.telemetry.logs.log_book import Following, LogBook
from marserve.telemetry.logs.records import LEVELS, LOGS, LogName, Record, Wanted

DEFAULT_TAIL: Final = 200
MOST_LINES: Final = 10_000
# A comment so often, so that a connection that is gone is noticed and none in between closes it as idle.
HEARTBEAT_S: Final = 15.0
_LONGEST_BODY: Final = 64 * 1024

_Level = Annotated[
    Annotated[str | None, WithJsonSchema({"enum": list(LEVELS)})], Query(description="the least level of the lines")
]
_Tail = Annotated[
    Annotated[str | None, WithJsonSchema({"type": "integer", "minimum": 0, "maximum": MOST_LINES, "default": 200})],
    Query(description="how many records at most, the newest ones"),
]
_Follow = Annotated[Flag, Query(description="go on with the lines that come, as text/event-stream")]
_Log = Annotated[
    Annotated[str | None, WithJsonSchema({"enum": list(LOGS)})],
    Query(description="one of the logs, or several with commas; all if not given"),
]


# A protocol: levels of workers are the pools', which the API may not import.
class Levels(Protocol):
    """The levels of the server log and of workers' logging; words of `LEVELS`."""

    @property
    def server(self) -> str:
        """The server log's."""

    @property
    def workers(self) -> str:
        """That of workers of models without a level of their own."""

    @property
    def of_models(self) -> Mapping[str, str]:
        """Those of single models' workers."""

    def set(self, level: str, model: str | None) -> None:
        """Change all levels, or that of one model's workers; running workers included."""


def logs_router(
    book: LogBook, levels: Levels, versions_of: Callable[[str], Sequence[str]], check_exists: Callable[[str], None]
) -> APIRouter:
    """The routes. `versions_of` are the versions of a model that are known; `check_exists` raises ModelNotFound."""
    router = new_router(PrettyJson)

    @router.get(
        "/logs",
        operation_id="getLogs",
        summary="The newest lines of the logs: of a model, a request, a level",
        responses={200: {"model": LogLines}, **error_answers(400, 503)},
    )
    async def get_logs(
        request: Request,
        model: Annotated[str | None, Query(description="lines about this model")] = None,
        request_id: Annotated[str | None, Query(alias="request", description="lines of this request")] = None,
        level: _Level = None,
        tail: _Tail = None,
        log: _Log = None,
        follow: _Follow = None,
    ) -> Response:
        wanted, tail_count, does_follow = read_wanted(request.query_params, versions_of)
        if does_follow:
            return _Stream(book, wanted, tail_count)
        found = await book.search(wanted, tail_count)
        lines = [_line(record) for record in found.records]
        return PrettyJson(LogLines(lines=lines, complete=found.is_complete, since=found.since or None))

    @router.get(
        "/logging",
        operation_id="getLogging",
        summary="The levels of the server log and of workers' logging",
        responses={200: {"model": LoggingLevels}},
    )
    async def get_levels() -> Response:
        return PrettyJson(_levels(levels))

    @router.put(
        "/logging",
        operation_id="putLogging",
        summary="Change the level of the server log and of all workers, or of one model's workers",
        responses={200: {"model": LoggingLevels}, **error_answers(400, 404)},
    )
    async def put_level(
        request: Request,
        level: Annotated[str | None, WithJsonSchema({"enum": list(LEVELS)}), Query(description="the new level")] = None,
        model: Annotated[str | None, Query(description="only of this model's workers")] = None,
    ) -> Response:
        names = ("level", "model")
        given: QueryParameters | JsonParameters = QueryParameters(request.query_params, names)
        if not given.has("level") and (body := await read_short_body(request, _LONGEST_BODY)):
            given = JsonParameters(body, names)
        of_model = given.text("model")
        word = read_level(given.text("level"))
        if word is None:
            raise BadInput(f"Parameter level is required; it is one of {', '.join(LEVELS)}.")
        if of_model is not None:
            check_exists(of_model)
        levels.set(word, of_model)
        return PrettyJson(_levels(levels))

    return router


def read_wanted(values: Mapping[str, str], versions_of: Callable[[str], Sequence[str]]) -> tuple[Wanted, int, bool]:
    """The records that a query asks for, how many at most, and whether to follow. Raises BadInput."""
    given = read_strictly(values, ("model", "request", "level", "tail", "log", "follow"))
    does_follow = given.flag("follow", default=False)
    tail = given.whole("tail")
    tail = DEFAULT_TAIL if tail is None else tail
    if not (0 if does_follow else 1) <= tail <= MOST_LINES:
        raise BadInput(f"tail is {tail}; it must be a whole number from 1 to {MOST_LINES}, with follow also 0.")
    request_id = given.text("request") or None
    if request_id is not None and len(request_id) > MAX_CLIENT_ID:
        raise BadInput(f"request has {len(request_id)} characters; a request's id has at most {MAX_CLIENT_ID}.")
    model = given.text("model") or None
    logs = _read_logs(given.text("log"))
    versions = versions_of(model) if model is not None else ()
    return Wanted(model, request_id, read_level(given.text("level")), logs, versions), tail, does_follow


def read_level(word: str | None) -> str | None:
    """A level's name in any case, None without one. Raises BadInput for any other word."""
    if not word:
        return None
    if word.lower() not in LEVELS:
        raise BadInput(f"level is {word[:40]!r}; it must be one of {', '.join(LEVELS)}.")
    return word.lower()


def _read_logs(words: str | None) -> Sequence[LogName]:
    asked = words.split(",") if words else []
    for word in asked:
        if word not in LOGS:
            raise BadInput(f"log is {word[:40]!r}; it must be one of {', '.join(LOGS)}, or several with commas.")
    return [name for name in LOGS if name in asked] if asked else LOGS


def _line(record: Record) -> LogLine:
    return LogLine(record.log, record.at or None, record.level, record.ids or None, record.text)


def _levels(levels: Levels) -> LoggingLevels:
    return LoggingLevels(levels.server, levels.workers, dict(levels.of_models))


class _Stream(Response):
    """The lines that come, as Server-Sent Events: `data` is a `LogLine`; an event `end` or `error` is the last."""

    media_type = "text/event-stream"

    def __init__(self, book: LogBook, wanted: Wanted, tail: int) -> None:
        super().__init__()
        self._book = book
        self._wanted = wanted
        self._tail = tail

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer until the client goes, or the server stops. Raises TooManyAskLogs before the answer begins."""
        async with self._book.follow(self._wanted, self._tail) as following:
            headers = [line for line in self.raw_headers if line[0] != b"content-length"]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            try:
                await while_connected(Request(scope, receive), self._send_all(following, send))
            except ClientGone:
                return

    async def _send_all(self, following: Following, send: Send) -> None:
        async def write(text: str, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": more})

        await write("".join([_event(record) for record in following.found.records]) or ": \n\n")
        coming: asyncio.Future[list[Record] | None] | None = None
        try:
            while True:
                coming = coming or asyncio.ensure_future(following.next())
                await asyncio.wait([coming], timeout=HEARTBEAT_S)
                if not coming.done():
                    await write(": \n\n")
                    continue
                records, coming = coming.result(), None
                if records is None:
                    break
                if records:
                    await write("".join([_event(record) for record in records]))
        finally:
            if coming is not None:
                coming.cancel()
        if following.is_too_slow:
            why = json.dumps({"message": "The lines were taken too slowly, so some are missing. Follow again."})
            await write(f"event: error\ndata: {why}\n\n", more=False)
        else:
            await write("event: end\ndata: {}\n\n", more=False)


def _event(record: Record) -> str:
    return f"data: {msgspec.json.encode(_line(record)).decode()}\n\n"
