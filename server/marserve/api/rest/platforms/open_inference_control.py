"""The Open Inference Protocol's REST routes that change the server: loading, unloading, settings of log and traces.

An address for inference answers what is in force, and takes changes only if it is open to them. What each call does is
`api/open_inference`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from marserve.api.open_inference.repository import Repository
from marserve.api.open_inference.server_settings import LogSettings, TraceSettings
from marserve.api.rest.application import PrettyJson
from marserve.api.rest.late_routes import new_router
from marserve.api.rest.schemas import Name, body_like, error_answers
from marserve.api.rest.short_body import read_short_body
from marserve.errors import BadInput, ControlClosed

MAX_BODY: Final = 16 * 1024

# What the API description says of bodies.
LOG_SETTINGS: Final = {
    "log_verbose_level": {"type": "integer", "minimum": 0},
    **{name: {"type": "boolean"} for name in ("log_info", "log_warnings", "log_errors")},
    **{name: {"type": "string"} for name in ("log_file", "log_format")},
}
TRACE_SETTINGS: Final = {
    "trace_level": {"type": "array", "items": {"type": "string"}, "examples": [["OFF"]]},
    **{name: {"type": "string"} for name in ("trace_rate", "trace_count", "log_frequency", "trace_file")},
}


def open_inference_control_router(
    repository: Repository,
    log_settings: LogSettings,
    check_exists: Callable[[str], None],
    trace_settings: TraceSettings | None = None,
    *,
    is_open: bool,
) -> APIRouter:
    """The routes; unless `is_open` changes are refused. `check_exists` raises ModelNotFound."""
    router = new_router(PrettyJson)

    def check_open(call: str) -> None:
        if not is_open:
            raise ControlClosed(call)

    _add_repository(router, repository, check_open)
    _add_log(router, log_settings, check_open)
    _add_trace(router, trace_settings or TraceSettings(), check_exists, check_open)
    return router


def _add_repository(router: APIRouter, repository: Repository, check_open: Callable[[str], None]) -> None:
    @router.post(
        "/v2/repository/models/{model_name}/load",
        operation_id="oip_load",
        summary="Register a model of the model store, or make it ready (Open Inference)",
        responses=error_answers(400, 403, 404, 409, 500, 503, 507),
        openapi_extra=body_like({"parameters": {"type": "object", "maxProperties": 0}}),
    )
    async def load(request: Request, model_name: Name) -> Response:
        check_open("A load")
        await repository.load(model_name, await _parameters(request, "a load, which takes no config and no files,"))
        return PrettyJson({})

    @router.post(
        "/v2/repository/models/{model_name}/unload",
        operation_id="oip_unload",
        summary="Unregister all versions of a model (Open Inference)",
        responses=error_answers(400, 403, 404, 408, 409),
        openapi_extra=body_like(
            {"parameters": {"type": "object", "properties": {"unload_dependents": {"type": "boolean"}}}}
        ),
    )
    async def unload(request: Request, model_name: Name) -> Response:
        check_open("An unload")
        await repository.unload(model_name, await _parameters(request, "an unload"))
        return PrettyJson({})


def _add_log(router: APIRouter, log_settings: LogSettings, check_open: Callable[[str], None]) -> None:
    @router.get("/v2/logging", operation_id="oip_log", summary="The settings of the log (Open Inference)")
    async def show() -> Response:
        return PrettyJson(log_settings.document())

    @router.post(
        "/v2/logging",
        operation_id="oip_set_log",
        summary="Change the level of the log (Open Inference)",
        responses=error_answers(400, 403),
        openapi_extra=body_like(LOG_SETTINGS),
    )
    async def change(request: Request) -> Response:
        check_open("Another setting of the log")
        log_settings.change(await read_settings(request, "settings of the log"))
        return PrettyJson(log_settings.document())


def _add_trace(
    router: APIRouter, settings: TraceSettings, check_exists: Callable[[str], None], check_open: Callable[[str], None]
) -> None:
    async def show() -> Response:
        return PrettyJson(settings.document())

    async def show_of_model(model_name: Name) -> Response:
        check_exists(model_name)
        return PrettyJson(settings.document())

    async def change(request: Request) -> Response:
        check_open("Another setting of traces")
        settings.check(await read_settings(request, "settings of traces"))
        return PrettyJson(settings.document())

    async def change_of_model(request: Request, model_name: Name) -> Response:
        check_open("Another setting of traces")
        check_exists(model_name)
        settings.check(await read_settings(request, "settings of traces"))
        return PrettyJson(settings.document())

    for path, of, reading, changing in (
        ("/v2/trace/setting", "", show, change),
        ("/v2/models/{model_name}/trace/setting", "_of_model", show_of_model, change_of_model),
    ):
        statuses = (404,) if of else ()
        router.add_api_route(
            path,
            reading,
            methods=["GET"],
            operation_id=f"oip_trace{of}",
            summary="The settings of traces (Open Inference)",
            responses=error_answers(*statuses),
        )
        router.add_api_route(
            path,
            changing,
            methods=["POST"],
            operation_id=f"oip_set_trace{of}",
            summary="Refuse settings of traces other than those in force (Open Inference)",
            responses=error_answers(400, 403, *statuses),
            openapi_extra=body_like(TRACE_SETTINGS),
        )


async def _parameters(request: Request, words: str) -> Mapping[str, Any]:
    """The parameters in a body `{"parameters": {...}}`, which may be empty. Raises BadInput."""
    document = await read_settings(request, words)
    parameters = document.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise BadInput(f'"parameters" in the body of {words.partition(",")[0]} must be an object.')
    return parameters


async def read_settings(request: Request, words: str) -> dict[str, Any]:
    """The body, a JSON object or nothing. Raises BadInput."""
    body = await read_short_body(request, MAX_BODY, f"The body of {words}")
    if not body.strip():
        return {}
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise BadInput(f"The body of {words.partition(',')[0]} must be a JSON object, or empty.")
    return document
