"""Profiles over HTTP: one worker of a version is measured while it serves.

`/models/{m}/profile` never means a version named `profile`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from marserve.answers.profiles import ModelProfile, ProfileState
from marserve.api.parameters import StrictParameters, read_strictly
from marserve.api.rest.application import PrettyJson
from marserve.api.rest.hang_up import while_connected
from marserve.api.rest.late_routes import Answering, endpoints, new_router
from marserve.api.rest.schemas import error_answers
from marserve.errors import BadInput
from marserve.profiling.session import Profiles, ProfileWish

MOST_REQUESTS: Final = 20_000
MOST_SECONDS: Final = 600.0
DEFAULT_SECONDS: Final = 5.0
# How long requests are awaited if only their number is given.
REQUESTS_WITHIN_S: Final = 60.0
DEFAULT_BYTES: Final = 64 << 20
LEAST_BYTES, MOST_BYTES = 1 << 20, 1 << 30

_SCHEMAS: Final[Mapping[str, tuple[dict[str, Any], str]]] = {
    "requests": (
        {"type": "integer", "minimum": 1, "maximum": MOST_REQUESTS},
        "ends after so many; without `seconds` after a minute at the latest",
    ),
    "seconds": (
        {"type": "number", "exclusiveMinimum": 0, "maximum": MOST_SECONDS, "default": DEFAULT_SECONDS},
        "ends after so long",
    ),
    "operators": ({"type": "boolean", "default": True}, "record the operators of torch"),
    "shapes": ({"type": "boolean", "default": True}, "with the shapes of their inputs"),
    "memory": ({"type": "boolean", "default": False}, "with what they allocate"),
    "stacks": ({"type": "boolean", "default": False}, "with the Python that called them"),
    "max_bytes": (
        {"type": "integer", "minimum": LEAST_BYTES, "maximum": MOST_BYTES, "default": DEFAULT_BYTES},
        "how much of the worker's memory may hold operators; further batches have none recorded",
    ),
}


def profile_router(profiles: Profiles) -> APIRouter:
    """The routes, which must come before those of versions."""
    router = new_router(PrettyJson)

    async def make(request: Request, model: str, version: str | None) -> Response:
        wish = read_wish(request.query_params)
        await request.body()
        return PrettyJson(await while_connected(request, profiles.make(model, version, wish)))

    async def state(request: Request, model: str, version: str | None) -> Response:
        read_strictly(request.query_params, ())
        return PrettyJson(profiles.state(model, version))

    async def trace(request: Request, model: str, version: str | None) -> Response:
        read_strictly(request.query_params, ())
        headers = {"content-disposition": 'attachment; filename="trace.json.gz"'}
        return Response(profiles.trace(model, version), media_type="application/gzip", headers=headers)

    described = {
        "parameters": [
            {"name": name, "in": "query", "required": False, "schema": schema, "description": sentence}
            for name, (schema, sentence) in _SCHEMAS.items()
        ]
    }
    _add(
        router,
        make,
        "POST",
        "profile",
        "profileModel",
        "Measure how a worker spends its time while it serves",
        responses={200: {"model": ModelProfile}, **error_answers(400, 404, 409)},
        openapi_extra=described,
    )
    _add(
        router,
        state,
        "GET",
        "profile",
        "profileState",
        "Whether a profile is being made, and what the last one showed",
        responses={200: {"model": ProfileState}, **error_answers(400, 404)},
    )
    _add(
        router,
        trace,
        "GET",
        "profile/trace",
        "profileTrace",
        "The last profile's trace in Chrome's format, packed by gzip",
        responses={200: {"content": {"application/gzip": {}}}, **error_answers(400, 404)},
    )
    return router


def _add(
    router: APIRouter, answer: Answering, method: str, path: str, operation: str, summary: str, **described: Any
) -> None:
    of_model, of_version = endpoints(answer)
    for endpoint, of, prefix in ((of_model, "", ""), (of_version, "/{model_version}", "version_")):
        router.add_api_route(
            f"/models/{{model_name}}{of}/{path}",
            endpoint,
            methods=[method],
            operation_id=prefix + operation,
            summary=summary if not prefix else f"{summary}: of one version",
            **described,
        )


def read_wish(values: Mapping[str, str]) -> ProfileWish:
    """Read the query of a profile. Raises BadInput."""
    given = read_strictly(values, _SCHEMAS)
    requests = given.up_to("requests", 0, MOST_REQUESTS) if given.has("requests") else 0
    seconds = _seconds(given, REQUESTS_WITHIN_S if requests else DEFAULT_SECONDS)
    max_bytes = given.up_to("max_bytes", DEFAULT_BYTES, MOST_BYTES)
    if max_bytes < LEAST_BYTES:
        raise BadInput(
            f"max_bytes is {max_bytes}; it must be from {LEAST_BYTES} to {MOST_BYTES}. operators=false records none."
        )
    return ProfileWish(
        requests,
        seconds,
        max_bytes if given.flag("operators", True) else 0,
        given.flag("shapes", True),
        given.flag("memory", False),
        given.flag("stacks", False),
    )


def _seconds(given: StrictParameters, default: float) -> float:
    word = given.text("seconds")
    if word is None:
        return default
    try:
        seconds = float(word)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MOST_SECONDS:
        raise BadInput(f"seconds is {word[:40]!r}; it must be a number above 0, at most {MOST_SECONDS:g}.")
    return seconds
