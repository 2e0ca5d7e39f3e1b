"""`/v1/models`, in KServe's protocol V1 and in OpenAI's at once: which models there are, and whether one can answer.

Each object has the keys of both. TorchServe answers `/v1/models/{model}` on its management address alone, with KServe's
keys and always 200 (contract 2.8; `api/rest/models/management.py`). `:predict` and `:explain` are inference's.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from marserve.answers.management import ModelOfV1, ModelsOfV1, WorkersOfModel
from marserve.api.rest.application import PrettyJson
from marserve.api.rest.late_routes import new_router
from marserve.api.rest.schemas import Name, error_answers
from marserve.registry.models import Registry

OWNER = "marserve"


def kserve_router(registry: Registry) -> APIRouter:
    """`GET /v1/models` and `/v1/models/{model}`; 503 while the model cannot answer, 404 for one that is not there."""
    router = new_router(PrettyJson)

    def describe(model: str) -> ModelOfV1:
        found = registry.data_plane.readiness_of(model)
        return ModelOfV1(
            id=model,
            object="model",
            created=int(registry.registered_at(model)),
            owned_by=OWNER,
            name=model,
            ready=found.is_ready,
            reason=found.reason or None,
            workers=None if found.is_ready else WorkersOfModel(found.ready_workers, found.needed_workers),
        )

    @router.get(
        "/v1/models",
        operation_id="v1_models",
        summary="The models (KServe V1, OpenAI)",
        responses={200: {"model": ModelsOfV1}},
    )
    async def list_models() -> Response:
        data = [describe(model.name) for model in registry.all_offered()]
        return PrettyJson(ModelsOfV1(object="list", data=data, models=[model.name for model in data]))

    @router.get(
        "/v1/models/{model_name}",
        operation_id="kserve_v1_ready",
        summary="Whether a model can answer (KServe V1, OpenAI)",
        responses={200: {"model": ModelOfV1}, 503: {"model": ModelOfV1}, **error_answers(404)},
    )
    async def model(model_name: Name) -> Response:
        described = describe(model_name)
        return PrettyJson(described, status_code=200 if described.ready else 503)

    return router
