"""The routes of the pages: `GET /`, `/openapi.json`, the files of `/docs` and the dashboard, and what `/docs` shows.

Files and the API description need no key; what they get of models, and what the description says of each, needs that
of the listener.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from marserve import __version__
from marserve.answers.pages import OfferedModel, OfferedNames, ServerCard
from marserve.api.parameters import PAGE_PARAMETERS, QueryParameters
from marserve.api.rest.application import PrettyJson
from marserve.api.rest.declared_paths import DeclaredVersion, with_models
from marserve.api.rest.description import WrittenOnce
from marserve.api.rest.late_routes import new_router
from marserve.api.rest.pages.accept import prefers_html
from marserve.api.rest.pages.files import DASHBOARD, DASHBOARD_FILES, FILES, PAGE, PageFiles
from marserve.api.rest.schemas import Name, error_answers, takes
from marserve.registry.models import Registry
from marserve.workflows.workflows import Workflows


def links_of(
    *,
    has_inference: bool = False,
    has_management: bool = False,
    has_metrics: bool = False,
    has_dashboard: bool = False,
) -> dict[str, str]:
    """Where to go on from `/` of a listener that serves these APIs."""
    links = {"docs": PAGE, "openapi": "/openapi.json"}
    if has_dashboard:
        links["dashboard"] = DASHBOARD
    if has_inference or has_management:
        links["ready"] = "/readyz"
    if has_inference:
        links["predictions"] = "/predictions/{model_name}"
    if has_management:
        links["models"] = "/models"
    if has_metrics:
        links["metrics"] = "/metrics"
    return links


Declared = Callable[[Request], Sequence[DeclaredVersion]]


def pages_router(links: Mapping[str, str], written: WrittenOnce, declared: Declared = lambda request: ()) -> APIRouter:
    """`/`, `/openapi.json` and the files of the pages. `written` are the listener's descriptions.

    Where `links` name the dashboard, it is served, and is what a browser gets at `/`. `declared` are the versions that
    declare their input, as far as a request may know of them.
    """
    router = new_router(PrettyJson)
    described = _WithModels()
    files = PageFiles()
    first_page = DASHBOARD if "dashboard" in links else PAGE
    served = {**FILES, **DASHBOARD_FILES} if "dashboard" in links else FILES
    card = ServerCard(name="marserve", version=__version__, status="alive", links=dict(links))

    @router.get(
        "/",
        operation_id="server",
        summary="What answers here, and where to go on; a page for browsers",
        responses={200: {"model": ServerCard}},
    )
    async def greet(request: Request) -> Response:
        is_page = prefers_html(request.headers.get("accept", ""))
        answer = await files.answer(first_page, request) if is_page else PrettyJson(card)
        answer.headers["vary"] = "Accept"
        return answer

    @router.get("/openapi.json", operation_id="openapi", summary="The API description, as OpenAPI 3.1")
    async def describe(request: Request) -> Response:
        whole = (await written.get(request.app)).whole
        return Response(await described.get(whole, tuple(declared(request))), media_type="application/json")

    async def show(path: str, request: Request) -> Response:
        if request.scope.get("raw_path", b"").endswith(b"/"):
            return RedirectResponse(f"..{path}", 308)  # else what the page loads would be looked for a folder too deep
        return await files.answer(path, request)

    async def answer_file(path: str, request: Request) -> Response:
        return await files.answer(path, request)

    router.add_route("/", greet, methods=["HEAD"], include_in_schema=False)
    router.add_route("/openapi.json", describe, methods=["HEAD"], include_in_schema=False)
    for path in served:
        endpoint = partial(show if path in (PAGE, DASHBOARD) else answer_file, path)
        router.add_route(path, endpoint, methods=["GET", "HEAD"], include_in_schema=False)
    return router


class _WithModels:
    """The API description with its models, written anew when they are others than those of the last call."""

    def __init__(self) -> None:
        self._last: tuple[tuple[DeclaredVersion, ...], bytes] = ((), b"")

    async def get(self, whole: bytes, versions: tuple[DeclaredVersion, ...]) -> bytes:
        """The description `whole` with a path for each of these versions."""
        if not versions:
            return whole
        last, written = self._last
        if last != versions:
            written = await asyncio.to_thread(self._write, whole, versions)
            self._last = versions, written
        return written

    @staticmethod
    def _write(whole: bytes, versions: Sequence[DeclaredVersion]) -> bytes:
        return bytes(PrettyJson(with_models(json.loads(whole), versions)).body)


def offers_router(registry: Registry, workflows: Workflows | None = None) -> APIRouter:
    """What the page at `/docs` gets of the models, and of the workflows, that take requests here."""
    router = new_router(PrettyJson)

    @router.get(
        "/docs/models",
        operation_id="offeredModels",
        summary="The models that take requests here",
        responses={200: {"model": OfferedNames}},
        openapi_extra=takes(PAGE_PARAMETERS),
    )
    async def list_offers(request: Request) -> Response:
        query = QueryParameters(request.query_params, PAGE_PARAMETERS)
        offset = query.integer("next_page_token")
        page = registry.offered_names(query.integer("limit"), offset)
        if workflows is not None and not offset:
            page.workflows.extend(name for name, _ in workflows.list_workflows().models)
        return PrettyJson(page)

    @router.get(
        "/docs/models/{model_name}/versions",
        operation_id="offeredModel",
        summary="A model's versions, and what each takes",
        responses={200: {"model": OfferedModel}, **error_answers(404)},
    )
    async def offer(model_name: Name) -> Response:
        return PrettyJson(registry.offered(model_name))

    return router
