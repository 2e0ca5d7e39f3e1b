"""The metrics listener: one page, in Prometheus' text format or in OpenMetrics (contract 3.1)."""

from __future__ import annotations

import contextlib
from typing import Annotated, Final

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from marserve.api.rest.late_routes import new_router
from marserve.telemetry.metrics.scrapes import Scrapes

# A page goes to the connection in such pieces: what a client does not read waits here, in bytes that scrapes share.
PIECE_BYTES: Final = 64 * 1024


class Scrape(Response):
    """The answer to one scrape, which counts as open until its last byte is taken."""

    def __init__(self, scrapes: Scrapes, accept: str, names: list[str]) -> None:
        super().__init__()
        self._scrapes, self._accept, self._names = scrapes, accept, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the page and send it. Raises TooManyScrapes.

        A client that reads too slowly may lose its place to another: then the connection closes before the end.
        """
        with contextlib.suppress(TimeoutError):
            await self._send(send)

    async def _send(self, send: Send) -> None:
        async with self._scrapes.taking():
            page = await self._scrapes.page(self._accept, self._names)
            headers = [
                (b"content-type", page.content_type.encode("latin-1")),
                (b"content-length", b"%d" % page.size),
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            for part in page.parts:
                for start in range(0, len(part), PIECE_BYTES):
                    piece = part[start : start + PIECE_BYTES]
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


def metrics_router(scrapes: Scrapes) -> APIRouter:
    """`/metrics` and any path below it, by any method."""
    router = new_router()

    async def page(request: Request) -> Response:
        return Scrape(scrapes, request.headers.get("accept", ""), request.query_params.getlist("name[]"))

    # An empty list means every method. It comes first, as FastAPI takes longer to find that a query fits.
    router.add_route("/metrics", page, methods=[], include_in_schema=False)
    router.add_route("/metrics/{rest:path}", page, methods=[], include_in_schema=False)

    @router.get(
        "/metrics",
        operation_id="metrics",
        summary="Every metric",
        response_class=Response,
        responses={
            200: {
                "content": {
                    "text/plain": {"schema": {"type": "string"}},
                    "application/openmetrics-text": {"schema": {"type": "string"}},
                }
            }
        },
    )
    async def documented(
        request: Request,
        names: Annotated[list[str] | None, Query(alias="name[]", description="only samples with these names")] = None,
    ) -> Response:
        return await page(request)

    return router
