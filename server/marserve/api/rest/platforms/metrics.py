"""The metrics listener: one page in Prometheus' text format (contract 3.1)."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from marserve.api.rest.late_routes import new_router
from marserve.telemetry.metrics.server_metrics import CONTENT_TYPE, Metrics


def metrics_router(metrics: Metrics, *, is_filled: bool = True) -> APIRouter:
    """`/metrics` and any path below it, by any method. Without `is_filled` (`metrics_mode=log`) the page is empty."""
    router = new_router()

    async def page(request: Request) -> Response:
        body = metrics.render(request.query_params.getlist("name[]")) if is_filled else b""
        return Response(body, headers={"content-type": CONTENT_TYPE})

    @router.get(
        "/metrics",
        operation_id="metrics",
        summary="Every metric",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def documented(
        request: Request,
        names: Annotated[list[str] | None, Query(alias="name[]", description="only samples with these names")] = None,
    ) -> Response:
        return await page(request)

    # An empty list means every method.
    router.add_route("/metrics", page, methods=[], include_in_schema=False)
    router.add_route("/metrics/{rest:path}", page, methods=[], include_in_schema=False)
    return router
