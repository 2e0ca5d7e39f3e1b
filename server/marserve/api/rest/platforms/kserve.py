"""KServe's protocol V1 beside `:predict` and `:explain` (`api/http/inference.py`): whether a model can answer.

TorchServe answers this on its management address alone (contract 2.8); in KServe's configuration that is also the
inference address. Under `marserve` the inference address answers it too if requests are wrapped as KServe's.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from marserve.answers.management import KServeReady
from marserve.api.rest.application import PrettyJson
from marserve.api.rest.late_routes import new_router
from marserve.api.rest.schemas import error_answers
from marserve.registry.data_plane import DataPlane


def kserve_router(data_plane: DataPlane) -> APIRouter:
    """`GET /v1/models/{model}`; 404 for a model that is not there."""
    router = new_router(PrettyJson)

    @router.get(
        "/v1/models/{model_name}",
        operation_id="kserve_v1_ready",
        summary="Whether a model can answer (KServe V1)",
        responses={200: {"model": KServeReady}, **error_answers(404)},
    )
    async def is_ready(model_name: str) -> Response:
        return PrettyJson({"name": model_name, "ready": data_plane.is_model_ready(model_name)})

    return router
