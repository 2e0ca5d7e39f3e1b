"""Over HTTP: which build of a version serves, and what the search for a faster one showed.

`/models/{m}/optimise` never means a version named `optimise`.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from marserve.answers.optimising import OptimisingReport
from marserve.api.parameters import read_strictly
from marserve.api.rest.application import PrettyJson
from marserve.api.rest.late_routes import endpoints, new_router
from marserve.api.rest.schemas import error_answers
from marserve.optimise.background.background import Background


def optimising_router(background: Background) -> APIRouter:
    """The routes, which must come before those of versions."""
    router = new_router(PrettyJson)

    async def show(request: Request, model: str, version: str | None) -> Response:
        read_strictly(request.query_params, ())
        return PrettyJson(background.report(model, version))

    of_model, of_version = endpoints(show)
    for endpoint, of, prefix in ((of_model, "", ""), (of_version, "/{model_version}", "version_")):
        summary = "Which build serves, and what the search for a faster one showed"
        router.add_api_route(
            f"/models/{{model_name}}{of}/optimise",
            endpoint,
            methods=["GET"],
            operation_id=f"{prefix}optimisingState",
            summary=summary if not prefix else f"{summary}: of one version",
            responses={200: {"model": OptimisingReport}, **error_answers(400, 404)},
        )
    return router
