"""The routes of SageMaker's plug-in for TorchServe on the inference listener: `/ping` and `/execution-parameters`.

`sagemaker_endpoints=true` turns both on. `/invocations` and `/models/{m}/invoke` need no setting: they are inference
routes like all others (contract §1.2, §10.6).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from marserve.api.rest.application import PrettyJson
from marserve.api.rest.late_routes import new_router
from marserve.errors import Unavailable
from marserve.registry.data_plane import DataPlane

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What the routes need to know. On an endpoint of many models these come and go, and share one handler: its file
    `service_file` must exist. None if the handler is no file.
    """

    concurrent_transforms: int
    max_request_bytes: int
    is_multi_model: bool = False
    service_file: Path | None = None


def sagemaker_router(data_plane: DataPlane, endpoint: Endpoint) -> APIRouter:
    """The plug-in's two routes. It must come before the health router, whose `/ping` it replaces."""
    router = new_router(PrettyJson)
    has_been_well = False

    @router.get("/ping", operation_id="sagemakerPing", summary="Whether a model has been loaded (SageMaker)")
    async def ping(request: Request) -> Response:
        nonlocal has_been_well
        if endpoint.is_multi_model:
            if endpoint.service_file is not None and not endpoint.service_file.is_file():
                raise Unavailable("Service file unavailable")
        else:
            # Once healthy, always healthy: the platform must not replace an endpoint because a worker died.
            has_been_well = has_been_well or data_plane.has_loaded_model()
            if not has_been_well:
                raise Unavailable("Models are not loaded")
        return Response(json.dumps({"Status": "Healthy"}, indent="\t") + "\n", media_type="application/json")

    @router.get(
        "/execution-parameters", operation_id="executionParameters", summary="How to send batch transforms (SageMaker)"
    )
    async def execution_parameters(request: Request) -> Response:
        return PrettyJson(
            {
                "MaxConcurrentTransforms": endpoint.concurrent_transforms,
                "BatchStrategy": "MULTI_RECORD",
                "MaxPayloadInMB": max(1, endpoint.max_request_bytes // MIB),
            }
        )

    return router
