"""The Open Inference Protocol's REST routes other than inference (contract 1.10), if the setting turns them on.

`/v2/models/{model}/infer` is an inference route like any other (`api/http/inference.py`), with or without these. The
handler decides what it takes and answers; the envelope `kservev2` makes tensors of it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from marserve import __version__
from marserve.api.rest.application import PrettyJson
from marserve.api.rest.late_routes import new_router


def open_inference_router() -> APIRouter:
    """Server health and metadata, and a refusal of versions in the path; any method, as in TorchServe."""
    router = new_router(PrettyJson)

    @router.get("/v2/health/live", operation_id="oip_live", summary="Whether the server answers (Open Inference)")
    async def live(request: Request) -> Response:
        return PrettyJson({"live": True})

    @router.get("/v2/health/ready", operation_id="oip_ready", summary="Whether the server is up (Open Inference)")
    async def ready(request: Request) -> Response:
        return PrettyJson({"ready": True})

    @router.get("/v2", operation_id="oip_server", summary="Name, version and extensions of the server (Open Inference)")
    async def describe(request: Request) -> Response:
        # TorchServe misspells the last key as "extenstion"; clients of the protocol expect this one.
        return PrettyJson({"name": "marserve", "version": __version__, "extensions": ["kserve", "kubeflow"]})

    async def refuse_version(request: Request) -> Response:
        return PrettyJson({"error": "Model versioning is not yet supported."}, status_code=501)

    anyhow: tuple[tuple[str, Callable[[Request], Awaitable[Response]]], ...] = (
        ("/v2/health/live", live),
        ("/v2/health/ready", ready),
        ("/v2", describe),
        ("/v2/models/{model_name}/versions/{model_version}", refuse_version),
        ("/v2/models/{model_name}/versions/{model_version}/{rest:path}", refuse_version),
    )
    for path, answer in anyhow:
        # An empty list means every method.
        router.add_route(path, answer, methods=[], include_in_schema=False)
    return router
