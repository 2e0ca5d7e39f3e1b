"""The Open Inference Protocol's REST routes about server and models, as `marserve` answers them.

Those that `torchserve` answers are in `open_inference.py`. Inference itself is `api/http/inference.py`. What each
document says is made in `api/open_inference`; for users it is in docs/open-inference.md.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from marserve.answers.management import ModelReady, WorkersOfModel
from marserve.api.open_inference.documents import (
    config_document,
    index_document,
    metadata_document,
    server_document,
    statistics_document,
    versions_of,
)
from marserve.api.open_inference.repository import Repository
from marserve.api.rest.application import PrettyJson
from marserve.api.rest.late_routes import endpoints, new_router
from marserve.api.rest.schemas import body_like, error_answers
from marserve.api.rest.short_body import read_short_body
from marserve.errors import BadInput
from marserve.registry.models import Registry

# The body of `/v2/repository/index`, which says `{"ready": true}` or nothing.
MAX_INDEX_BODY = 1024

NOT_READY: Final[dict[int | str, dict[str, Any]]] = {503: {"description": "Not ready."}}


def open_inference_models_router(
    registry: Registry, repository: Repository | None = None, *, shares_memory: bool = False
) -> APIRouter:
    """Health, metadata, configuration, statistics and the repository's index.

    With `repository`, which loads models at this address, the index has those that could be loaded. `shares_memory`:
    the server takes regions of shared memory.
    """
    router = new_router(PrettyJson)
    _add_server(router, registry, shares_memory=shares_memory)
    add_index(router, registry, repository)
    _add_models(router, registry)
    return router


def _add_server(router: APIRouter, registry: Registry, *, shares_memory: bool) -> None:
    @router.get("/v2/health/live", operation_id="oip_live", summary="Whether the server answers (Open Inference)")
    async def live(request: Request) -> Response:
        return PrettyJson({"live": True})

    @router.get(
        "/v2/health/ready",
        operation_id="oip_ready",
        summary="Whether to send requests here (Open Inference)",
        responses=NOT_READY,
    )
    async def ready(request: Request) -> Response:
        readiness = registry.readiness()
        document = {"ready": True} if readiness.is_ready else {"ready": False, "reasons": list(readiness.reasons)}
        return PrettyJson(document, status_code=200 if readiness.is_ready else 503)

    @router.get("/v2", operation_id="oip_server", summary="Name, version and extensions of the server (Open Inference)")
    async def describe(request: Request) -> Response:
        return PrettyJson(server_document(shares_memory=shares_memory))

    @router.get(
        "/v2/models/stats", operation_id="oip_all_statistics", summary="What every version answered (Open Inference)"
    )
    async def all_statistics(request: Request) -> Response:
        return PrettyJson({"model_stats": [statistics_document(each) for each in registry.version_metrics()]})


def add_index(router: APIRouter, registry: Registry, repository: Repository | None) -> None:
    """Add the route of the repository's index; `repository` as for the router."""

    @router.post(
        "/v2/repository/index",
        operation_id="oip_index",
        summary='All versions and their states; {"ready": true} asks for those that answer (Open Inference)',
        responses=error_answers(400),
        openapi_extra=body_like({"ready": {"type": "boolean"}}),
    )
    async def index(request: Request) -> Response:
        only_ready = await _wants_ready(request)
        if repository is not None:
            return PrettyJson(await repository.index(only_ready=only_ready))
        return PrettyJson(index_document(versions_of(registry), only_ready=only_ready))


def _add_models(router: APIRouter, registry: Registry) -> None:
    async def metadata(request: Request, model_name: str, model_version: str | None) -> Response:
        declaration = registry.declaration_of(model_name, model_version)
        versions = registry.data_plane.version_names(model_name)
        return PrettyJson(metadata_document(model_name, versions, declaration))

    async def ready(request: Request, model_name: str, model_version: str | None) -> Response:
        found = registry.data_plane.readiness_of(model_name, model_version)
        workers = None if found.is_ready else WorkersOfModel(found.ready_workers, found.needed_workers)
        document = ModelReady(model_name, found.is_ready, found.reason or None, workers)
        return PrettyJson(document, status_code=200 if found.is_ready else 503)

    async def config(request: Request, model_name: str, model_version: str | None) -> Response:
        declaration = registry.declaration_of(model_name, model_version)
        return PrettyJson(config_document(registry.describe(model_name, model_version), declaration))

    async def statistics(request: Request, model_name: str, model_version: str | None) -> Response:
        metrics = registry.version_metrics(model_name, model_version)
        return PrettyJson({"model_stats": [statistics_document(each) for each in metrics]})

    for end, answer, word, summary in (
        ("", metadata, "metadata", "A model's versions, inputs and outputs"),
        ("/ready", ready, "model_ready", "Whether a model can answer"),
        ("/config", config, "config", "A model's configuration"),
        ("/stats", statistics, "statistics", "What a model answered"),
    ):
        of_default, of_version = endpoints(answer)
        for middle, of, endpoint in (("", "", of_default), ("/versions/{model_version}", "_of_version", of_version)):
            router.add_api_route(
                f"/v2/models/{{model_name}}{middle}{end}",
                endpoint,
                methods=["GET"],
                operation_id=f"oip_{word}{of}",
                summary=f"{summary} (Open Inference)",
                responses=error_answers(404) | (NOT_READY if answer is ready else {}),
            )


async def _wants_ready(request: Request) -> bool:
    """Whether the body asks for versions that answer alone. Raises BadInput."""
    body = await read_short_body(request, MAX_INDEX_BODY, "The body of /v2/repository/index")
    if not body.strip():
        return False
    try:
        wish = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        wish = None
    ready = wish.get("ready", False) if isinstance(wish, dict) else None
    if not isinstance(ready, bool):
        raise BadInput('The body of /v2/repository/index must be a JSON object; its "ready" is true or false.')
    return ready
