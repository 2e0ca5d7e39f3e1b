"""Endpoints that installed packages add to a listener: makes an `EndpointCall` of a request, and sends its answer.

`marserve.plugins` finds the packages; `app` says which key the routes need.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from marserve.api.rest.application import PrettyJson
from marserve.api.rest.late_routes import new_router
from marserve.errors import BadSettings, MarserveError, Unavailable
from marserve.machine.threads import bounded_by_caller
from marserve.plugins import EndpointAnswer, EndpointCall, InstalledEndpoint
from marserve.registry.models import Registry
from marserve.telemetry.logs.log_limit import caused_by

log = logging.getLogger("marserve.api")

METHODS = ["GET", "PUT", "POST", "DELETE"]
# An endpoint that takes longer is given up.
ANSWER_S = 60.0
# Requests for these never reach a router: the connection takes them.
TAKEN = frozenset({"predictions", "explanations", "invocations", "models", "v1", "v2", "wfpredict"})
# A plug-in may replace these: `ping` as TorchServe's could (SageMaker's does), and the pages.
MAY_BE_REPLACED = frozenset({"ping", "docs", "openapi.json"})

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\t\x20-\x7e]*")
_FRAMING = frozenset(("content-length", "transfer-encoding", "connection", "keep-alive", "trailer", "upgrade"))


class ModelsView:
    """The part of the registry that an endpoint may use."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def names(self) -> list[str]:
        """All registered models."""
        names: list[str] = []
        offset: int | None = 0
        while offset is not None:
            page = self._registry.list_models(None, offset)
            names += [name for name, _ in page.models]
            offset = page.next_offset
        return names

    def describe(self, model: str, version: str | None = None) -> dict[str, Any]:
        """A version as the management API describes it. Raises ModelNotFound or VersionNotFound."""
        return self._registry.describe(model, version)

    def is_ready(self, model: str, version: str | None = None) -> bool:
        """Whether a version can answer. Raises ModelNotFound or VersionNotFound."""
        return self._registry.data_plane.is_model_ready(model, version)


def check_patterns(installed: InstalledEndpoint, routers: Sequence[Router]) -> None:
    """Raise BadSettings if a route of the listener begins like the endpoint's."""
    pattern = installed.endpoint.pattern
    own = {route.path.split("/")[1] for router in routers for route in router.routes if isinstance(route, Route)}
    if pattern in (TAKEN | own) - MAY_BE_REPLACED:
        raise BadSettings(
            f"{installed.origin} wants to answer /{pattern}, which the server answers itself; "
            "let the plug-in have another pattern, or uninstall it"
        )


def endpoint_router(installed: InstalledEndpoint, registry: Registry, answer_s: float = ANSWER_S) -> APIRouter:
    """The routes of one endpoint. `answer_s` is how long it may take, in seconds."""
    router = new_router(PrettyJson)
    endpoint, models = installed.endpoint, ModelsView(registry)
    is_async = inspect.iscoroutinefunction(endpoint.answer)

    def answer_in_time(call: EndpointCall) -> Any:
        # The endpoint may wait for another server while this one stops; `answer_s` bounds that.
        with bounded_by_caller():
            return endpoint.answer(call)

    async def answer(request: Request) -> Response:
        call = EndpointCall(
            method=request.method,
            path=request.scope["path"],
            query=tuple(request.query_params.multi_items()),
            headers=dict(request.headers),
            body=await request.body(),
            models=models,
        )
        try:
            async with asyncio.timeout(answer_s):
                made = endpoint.answer(call) if is_async else await asyncio.to_thread(answer_in_time, call)
                answered = await made if inspect.isawaitable(made) else made
        except TimeoutError:
            log.error("%s did not answer in %g s", installed.origin, answer_s, extra=caused_by(""))
            raise Unavailable(f"/{endpoint.pattern} did not answer in time.") from None
        except MarserveError:
            raise
        except Exception as error:
            # The author's code: its message may hold anything, so the client does not get it.
            log.error("%s failed", installed.origin, exc_info=error, extra=caused_by(""))
            raise EndpointFailed(f"/{endpoint.pattern} failed.") from None
        if not _is_sound(answered):
            log.error("%s answered what cannot be sent: %r", installed.origin, answered, extra=caused_by(""))
            raise EndpointFailed(f"/{endpoint.pattern} failed.")
        return _response(answered)

    for path in (f"/{endpoint.pattern}", f"/{endpoint.pattern}/{{rest:path}}"):
        router.add_api_route(path, answer, methods=METHODS, include_in_schema=False, response_model=None)
    return router


class EndpointFailed(MarserveError):
    """An endpoint of a plug-in raised, or returned no valid answer; the log says more."""


def _is_sound(answered: object) -> bool:
    return (
        isinstance(answered, EndpointAnswer)
        and isinstance(answered.body, bytes | str)
        and isinstance(answered.status, int)
        and 200 <= answered.status <= 599
        and bool(_VALUE.fullmatch(answered.content_type))
        and all(_NAME.fullmatch(name) and _VALUE.fullmatch(value) for name, value in answered.headers.items())
    )


def _response(answered: EndpointAnswer) -> Response:
    response = Response(answered.body, status_code=answered.status)
    response.headers["content-type"] = answered.content_type
    for name, value in answered.headers.items():
        if name.lower() not in _FRAMING:
            response.headers[name] = value
    return response
