"""Health over HTTP: `/ping` by TorchServe's rule, and three probes. Needs no credential.

`/livez`: this process answers, and has not just stood still. `/readyz`: requests can be sent here. `/startupz`: all
models of the start were tried.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from marserve.answers.management import Health, Probe
from marserve.api.rest.application import PrettyJson
from marserve.api.rest.late_routes import new_router
from marserve.registry.models import Registry
from marserve.telemetry.loop_lag import Interval

PROBES = ("/livez", "/readyz", "/startupz")
"""The paths that never need a credential."""


def health_router(
    registry: Registry,
    *,
    has_ping: bool = True,
    platform_route: str | None = None,
    last_stall: Callable[[], Interval | None] = lambda: None,
) -> APIRouter:
    """The probes, and with `has_ping` (the inference listener) `/ping` and the path of a platform's own check.

    `last_stall` is a time in which the event loop stood still and for which `/livez` is still 503.
    """
    router = new_router(PrettyJson)
    if has_ping:
        _add_ping(router, registry)
        if platform_route is not None and platform_route != "/ping":
            _add_platforms_check(router, registry, platform_route)
    _add_probes(router, registry, last_stall)
    return router


def _add_ping(router: APIRouter, registry: Registry) -> None:
    """Contract 1.6: any method, and any path below `/ping`."""

    @router.get(
        "/ping",
        operation_id="ping",
        summary="Whether every model's default version has kept its workers",
        responses={200: {"model": Health}, 500: {"model": Health}},
    )
    async def ping(request: Request) -> Response:
        is_healthy = registry.data_plane.is_healthy()
        return PrettyJson({"status": "Healthy" if is_healthy else "Unhealthy"}, status_code=200 if is_healthy else 500)

    # An empty list means every method.
    for path in ("/ping", "/ping/{rest:path}"):
        router.add_route(path, ping, methods=[], include_in_schema=False)


def _add_platforms_check(router: APIRouter, registry: Registry, path: str) -> None:
    """A platform sends requests once this is healthy, so it waits until every model of the start answers."""

    async def check(request: Request) -> Response:
        is_ready = registry.readiness().is_ready and not registry.startup_failures
        return PrettyJson({"status": "Healthy" if is_ready else "Unhealthy"}, status_code=200 if is_ready else 503)

    router.add_route(path, check, methods=["GET", "HEAD"], include_in_schema=False)


def _add_probes(router: APIRouter, registry: Registry, last_stall: Callable[[], Interval | None]) -> None:
    @router.get(
        "/livez",
        operation_id="livez",
        summary="Whether the server answers, and has not just stood still",
        responses={200: {"model": Probe}, 503: {"model": Probe}},
    )
    async def livez(request: Request) -> Response:
        stall = last_stall()
        reasons: list[str] = []
        if stall is not None:
            ago_s = max(0.0, time.monotonic() - stall.end)
            reasons.append(f"the event loop stood still for {stall.end - stall.begin:.1f} s, {ago_s:.0f} s ago")
        return _probe(not reasons, "alive", "stalled", reasons)

    @router.get(
        "/readyz",
        operation_id="readyz",
        summary="Whether to send requests here",
        responses={200: {"model": Probe}, 503: {"model": Probe}},
    )
    async def readyz(request: Request) -> Response:
        readiness = registry.readiness()
        return _probe(readiness.is_ready, "ready", "not ready", (*readiness.reasons, *readiness.remarks))

    @router.get(
        "/startupz",
        operation_id="startupz",
        summary="Whether the models of the start were all tried",
        responses={200: {"model": Probe}, 503: {"model": Probe}},
    )
    async def startupz(request: Request) -> Response:
        readiness = registry.readiness()
        return _probe(readiness.is_started, "started", "starting", readiness.startup_reasons)

    for path, endpoint in (("/livez", livez), ("/readyz", readyz), ("/startupz", startupz)):
        router.add_route(path, endpoint, methods=["HEAD"], include_in_schema=False)


def _probe(is_well: bool, well: str, not_well: str, reasons: Sequence[str]) -> Response:
    return PrettyJson(
        {"status": well if is_well else not_well, "reasons": list(reasons)}, status_code=200 if is_well else 503
    )
