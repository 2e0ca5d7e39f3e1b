"""Statistics on the management API: what each version did in the last minutes, and what all of them do now.

`/models/{m}/stats` never means a version named `stats`.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, NamedTuple

from fastapi import APIRouter, Query
from pydantic import WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from marserve.answers.management import (
    BatchesOfSize,
    DeviceActivity,
    EventLoopActivity,
    ModelStatistics,
    ServerActivity,
    StageSoFar,
    Times,
    TimesByPart,
    TimesSoFar,
    VersionActivity,
    VersionStatistics,
    WindowStatistics,
)
from marserve.api.parameters import read_strictly
from marserve.api.rest.application import PrettyJson
from marserve.api.rest.late_routes import endpoints, new_router
from marserve.api.rest.schemas import error_answers
from marserve.errors import BadInput
from marserve.registry.models import Registry
from marserve.telemetry.loop_lag import LoopLag
from marserve.telemetry.metrics.causes import by_known_cause
from marserve.telemetry.metrics.counts import VersionMetrics
from marserve.telemetry.metrics.histogram import Histogram
from marserve.telemetry.metrics.windows import HOUR_S, MINUTE_S, SINCE_START, Figures, Growth
from marserve.telemetry.timeline import STAGES

DEFAULT_LIMIT: Final = 50
MOST_LISTED: Final = 1000
LONGEST_SEARCH: Final = 200
MOST_REASONS: Final = 20
# The rows of all versions are made once for all clients that ask within this time, or within so many times as long as
# making them took.
SHARED_S: Final = 0.5
REST: Final = 20
# The event loop makes rows for so long at a time.
STEP_S: Final = 0.002

_SORTS: Final[Mapping[str, Callable[[VersionActivity], Any]]] = {
    "rate": lambda row: -row.answersPerSecond,
    "p99": lambda row: -(row.p99 or 0.0),
    "queue": lambda row: -row.queued,
    "memory": lambda row: -row.memoryBytes,
    "name": lambda row: row.modelName,
}
SORTS: Final = tuple(_SORTS)

ReadDevices = Callable[[], Sequence[DeviceActivity]]

_Sort = Annotated[
    Annotated[str | None, WithJsonSchema({"enum": list(SORTS), "default": "rate"})],
    Query(description="which versions come first: those with most answers, the slowest, …"),
]
_Limit = Annotated[
    Annotated[
        str | None,
        WithJsonSchema({"type": "integer", "minimum": 1, "maximum": MOST_LISTED, "default": DEFAULT_LIMIT}),
    ],
    Query(description="how many versions at most"),
]
_Offset = Annotated[
    Annotated[str | None, WithJsonSchema({"type": "integer", "minimum": 0, "default": 0})],
    Query(description="how many versions of the list come before them"),
]
_Search = Annotated[
    Annotated[str | None, WithJsonSchema({"type": "string", "maxLength": LONGEST_SEARCH})],
    Query(description="only versions of models whose names have this in them, in whatever case"),
]


def statistics_router(
    registry: Registry,
    devices: ReadDevices = tuple,
    clock: Callable[[], float] = time.monotonic,
    loop_lag: LoopLag | None = None,
) -> APIRouter:
    """The routes, which must come before those of versions. `devices` reads the accelerators."""
    router = new_router(PrettyJson)

    def look_around() -> Around:
        readiness = registry.readiness()
        return Around(
            at=clock(),
            is_ready=readiness.is_ready,
            reasons=_first_of([*readiness.reasons, *readiness.remarks]),
            times=_times_so_far(registry.answer_times()),
            event_loop=None if loop_lag is None else _event_loop(loop_lag),
        )

    board = Board(lambda: registry.activities(clock()), clock, look_around)

    @router.get(
        "/stats",
        operation_id="serverActivity",
        summary="What versions do now and did in the last minute, and the devices",
        responses={200: {"model": ServerActivity}, **error_answers(400)},
    )
    async def activity(
        request: Request, sort: _Sort = None, limit: _Limit = None, offset: _Offset = None, search: _Search = None
    ) -> Response:
        wanted = read_wanted(request.query_params)
        made = await board.made()
        found = list(devices())
        return PrettyJson(await asyncio.to_thread(_activity, made, found, wanted))

    async def statistics(request: Request, model: str, version: str | None) -> Response:
        read_strictly(request.query_params, ())
        now, default = clock(), registry.default_of(model)
        return PrettyJson(
            ModelStatistics(
                modelName=model,
                at=round(now, 3),
                versions=[
                    statistics_of(each, now, is_default=each.version == default)
                    for each in registry.version_metrics(model, version)
                ],
            )
        )

    of_model, of_version = endpoints(statistics)
    described: dict[str, Any] = {"responses": {200: {"model": ModelStatistics}, **error_answers(400, 404)}}
    router.add_api_route(
        "/models/{model_name}/stats",
        of_model,
        methods=["GET"],
        operation_id="modelStatistics",
        summary="Rates, times, batches and errors of a model's versions: of 1, 5, 60 minutes and since the start",
        **described,
    )
    router.add_api_route(
        "/models/{model_name}/{model_version}/stats",
        of_version,
        methods=["GET"],
        operation_id="version_modelStatistics",
        summary="The same of one version",
        **described,
    )
    return router


class Wanted(NamedTuple):
    """Which versions come first, how many are listed, after how many others, and what their models' names have."""

    sort: str
    limit: int
    offset: int = 0
    search: str = ""


def read_wanted(values: Mapping[str, str]) -> Wanted:
    """Read the query of `/stats`. Raises BadInput."""
    given = read_strictly(values, ("sort", "limit", "offset", "search"))
    limit = given.up_to("limit", DEFAULT_LIMIT, MOST_LISTED)
    sort = given.text("sort") or "rate"
    if sort not in SORTS:
        raise BadInput(f"sort is {sort[:100]!r}; it is one of {', '.join(SORTS)}.")
    offset = given.whole("offset") or 0
    if offset < 0:
        raise BadInput(f"offset is {offset}; it must be 0 or more.")
    search = given.text("search") or ""
    if len(search) > LONGEST_SEARCH:
        raise BadInput(f"search has {len(search)} characters; it may have {LONGEST_SEARCH}.")
    return Wanted(sort, limit, offset, search)


class Around(NamedTuple):
    """What the server's activity says beside its versions. `at` is monotonic."""

    at: float
    is_ready: bool
    reasons: list[str]
    times: TimesSoFar
    event_loop: EventLoopActivity | None


class Made(NamedTuple):
    """What the board has: rows of all versions, and what was around them when the last was made."""

    rows: list[VersionActivity]
    around: Around


class Board:
    """The rows of all versions, made in short steps and shared by clients that ask at about the same time."""

    def __init__(
        self,
        make: Callable[[], Iterable[VersionActivity]],
        clock: Callable[[], float],
        look_around: Callable[[], Around],
    ) -> None:
        self._make = make
        self._clock = clock
        self._look_around = look_around
        self._making: asyncio.Future[Made] | None = None
        self._good_until = -1.0

    async def made(self) -> Made:
        """The rows, and what is around them; they are not to be changed."""
        making = self._making
        if making is None or (making.done() and (self._clock() >= self._good_until or making.exception() is not None)):
            making = self._making = asyncio.ensure_future(self._made())
        # Shielded: other clients wait for the same rows when this one goes.
        return await asyncio.shield(making)

    async def _made(self) -> Made:
        rows: list[VersionActivity] = []
        began = step = time.perf_counter()
        worked_s = 0.0
        for row in self._make():
            rows.append(row)
            if (now := time.perf_counter()) - step >= STEP_S:
                worked_s += now - step
                await asyncio.sleep(0)
                step = time.perf_counter()
        worked_s += time.perf_counter() - step if rows else time.perf_counter() - began
        await asyncio.sleep(0)
        step = time.perf_counter()
        around = self._look_around()
        worked_s += time.perf_counter() - step
        self._good_until = self._clock() + max(SHARED_S, REST * worked_s)
        return Made(rows, around)


def _activity(made: Made, devices: list[DeviceActivity], wanted: Wanted) -> ServerActivity:
    rows, around = made
    by, sought = _SORTS[wanted.sort], wanted.search.casefold()
    found = [row for row in rows if sought in row.modelName.casefold()] if sought else rows
    most = min(wanted.offset + wanted.limit, len(found))
    first = heapq.nsmallest(most, found, key=lambda row: (by(row), row.modelName, row.modelVersion))
    return ServerActivity(
        at=round(around.at, 3),
        ready=around.is_ready,
        reasons=around.reasons,
        versions=first[wanted.offset :],
        versionsInAll=len(rows),
        versionsFound=len(found),
        answersPerSecond=round(sum(row.answersPerSecond for row in rows), 3),
        errors=sum(row.errors for row in rows),
        refused=sum(row.refused for row in rows),
        queued=sum(row.queued for row in rows),
        running=sum(row.running for row in rows),
        memoryBytes=sum(row.memoryBytes for row in rows),
        times=around.times,
        eventLoop=around.event_loop,
        devices=devices,
    )


def _first_of(reasons: list[str]) -> list[str]:
    """Of a thousand models each may be a reason, and this is asked for every two seconds."""
    more = len(reasons) - MOST_REASONS
    return reasons if more <= 0 else [*reasons[:MOST_REASONS], f"and {more} more reasons, which /readyz tells"]


def _event_loop(loop_lag: LoopLag) -> EventLoopActivity:
    return EventLoopActivity(_times_so_far(loop_lag.lag_seconds), loop_lag.stalls, round(loop_lag.longest_s, 3))


def _times_so_far(seconds: Histogram) -> TimesSoFar:
    return TimesSoFar([1000 * bound for bound in seconds.bounds], list(seconds.buckets), round(1000 * seconds.sum, 3))


def _stages_so_far(metrics: VersionMetrics) -> list[StageSoFar]:
    """The queue and the handler have histograms of their own."""
    by_name = {**metrics.stages.by_stage, "queue": metrics.queue_seconds, "handle": metrics.handler_seconds}
    streams = (name for name in by_name if name not in STAGES)
    counted = ((name, by_name[name]) for name in (*STAGES, *streams) if name in by_name)
    return [
        StageSoFar(name, count, round(1000 * seconds.sum, 3))
        for name, seconds in counted
        if (count := sum(seconds.buckets))
    ]


def statistics_of(metrics: VersionMetrics, now: float, *, is_default: bool) -> VersionStatistics:
    """The statistics of one version; `now` is monotonic."""

    def within(seconds: float) -> WindowStatistics | None:
        figures = metrics.windows.figures(now, metrics, seconds)
        return None if figures is None else _window(figures)

    whole = within(SINCE_START)
    assert whole is not None
    return VersionStatistics(
        modelVersion=metrics.version,
        isDefault=is_default,
        lastMinute=within(MINUTE_S),
        last5Minutes=within(5 * MINUTE_S),
        last60Minutes=within(HOUR_S),
        sinceStart=whole,
        times=_times_so_far(metrics.total_seconds),
        stages=_stages_so_far(metrics),
    )


def _window(figures: Figures) -> WindowStatistics:
    sizes = figures.batch_sizes
    mean = sizes.mean
    return WindowStatistics(
        seconds=round(figures.seconds, 3),
        requests=figures.requests,
        requestsPerSecond=round(figures.per_second(figures.requests), 3),
        answers={str(status): count for status, count in sorted(figures.answers.items())},
        answersPerSecond=round(figures.per_second(figures.total_seconds.count), 3),
        errors=dict(by_known_cause(figures.errors)),
        refused=dict(by_known_cause(figures.refused)),
        cancelled=figures.cancelled,
        expired=figures.expired,
        retried=figures.retried,
        isolated=figures.isolated,
        outOfMemory=figures.out_of_memory,
        milliseconds=TimesByPart(
            _times(figures.queue_seconds), _times(figures.handler_seconds), _times(figures.total_seconds)
        ),
        batches=sizes.count,
        meanBatch=None if mean is None else round(mean, 3),
        batchSizes=[
            BatchesOfSize(None if bound is None else int(bound), count)
            for bound, count in zip((*sizes.bounds, None), sizes.counts, strict=True)
            if count
        ],
        busyWorkers=round(figures.busy_workers, 3),
        workerStarts=figures.worker_starts,
        workerRestarts=figures.worker_restarts,
        workerDeaths=dict(by_known_cause(figures.worker_deaths)),
        loadsOnDemand=figures.loads_on_demand,
        evictions=figures.evictions,
    )


def _times(growth: Growth) -> Times:
    count, mean = growth.count, growth.mean
    if not count or mean is None:
        return Times(0)
    p50, p90, p95, p99 = (round(1000 * (growth.quantile(part) or 0.0), 3) for part in (0.5, 0.9, 0.95, 0.99))
    return Times(count, round(1000 * mean, 3), p50, p90, p95, p99)
