"""Routes of FastAPI that are analysed at their first request, or for the API description, and not at the start.

FastAPI makes a validator for each parameter of a route and for each answer that the route describes. For all routes of
a server that takes a third of a second of processor time, and most servers use few of them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from msgspec.json import schema_components
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import compile_path

from marserve.api.rest.schemas import Name

# Answers a request for a model, and for one of its versions if that is named.
Answering = Callable[[Request, str, str | None], Awaitable[Response]]


def import_for_first_request() -> None:
    """Import what FastAPI imports when it analyses its first route. Called once the server is up, off its start."""
    if sys.version_info < (3, 14):  # later ones only warn that pydantic's first version does not run there
        with suppress(ImportError):
            importlib.import_module("pydantic.v1")


class LateRoute(APIRoute):
    """Knows its path, methods and endpoint; FastAPI's other attributes of a route are made when one is first read.

    The thread that writes the API description and the event loop may both make them. Both make the same, and each
    reads an attribute only after setting it.
    """

    def __init__(
        self, path: str, endpoint: Callable[..., Any], *, methods: set[str] | list[str] | None = None, **options: Any
    ) -> None:
        self.path = path
        self.endpoint = endpoint
        self.methods = {method.upper() for method in (["GET"] if methods is None else methods)}
        self.path_regex, self.path_format, self.param_convertors = compile_path(path)
        self.components: dict[str, Any] = {}
        self._options: dict[str, Any] | None = {**options, "methods": methods}

    def __getattr__(self, name: str) -> Any:
        options = self.__dict__.get("_options")
        if options is not None and not name.startswith("__"):
            answers = described(options.get("responses") or {}, self.components)
            written = {"responses": answers, "openapi_extra": described_body(options.get("openapi_extra"))}
            super().__init__(self.path, self.endpoint, **{**options, **written})
            self._options = None
        try:
            return self.__dict__[name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}") from None


def described(answers: Mapping[int | str, Mapping[str, Any]], components: dict[str, Any]) -> dict[int | str, Any]:
    """The answers of a route, with the JSON Schema in the place of a `model` of `answers/management.py`.

    The schemas of the documents go to `components`.
    """
    responses: dict[int | str, Any] = {}
    for status, answer in answers.items():
        responses[status] = dict(answer)
        if "model" not in answer:
            continue
        try:
            [schema], found = schema_components([answer["model"]], ref_template="#/components/schemas/{name}")
        except TypeError:
            continue  # pydantic's, which FastAPI describes
        del responses[status]["model"]
        responses[status]["content"] = {"application/json": {"schema": schema}}
        components.update(found)
    return responses


def described_body(extra: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What a route says of itself, with the JSON Schema in the place of the pydantic `model` of its body."""
    if extra is None:
        return None
    body = dict(extra.get("requestBody") or {})
    if "model" not in body:
        return dict(extra)
    schema = body.pop("model").model_json_schema(ref_template="#/components/schemas/{model}")
    return {**extra, "requestBody": {**body, "content": {"application/json": {"schema": schema}}}}


def endpoints(answer: Answering) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The endpoints of a path that names a model, and of one that names its version as well."""

    async def of_default(request: Request, model_name: Name) -> Response:
        return await answer(request, model_name, None)

    async def of_version(request: Request, model_name: Name, model_version: Name) -> Response:
        return await answer(request, model_name, model_version)

    return of_default, of_version


def new_router(response_class: type[Response] = JSONResponse) -> APIRouter:
    """A router of `LateRoute`s, which answer with this class unless they say otherwise."""
    return APIRouter(default_response_class=response_class, route_class=LateRoute)
