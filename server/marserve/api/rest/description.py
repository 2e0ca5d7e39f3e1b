"""The API description: an OpenAPI document of what a listener serves (contract 1.12).

FastAPI describes its own routes. Inference requests never reach it, so their description stands here. Writing takes
seconds, so a thread does it when the first client asks, and all answers are made of the bytes that it wrote.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from msgspec.json import schema_components
from starlette.requests import Request
from starlette.responses import Response

from marserve import __version__
from marserve.answers.management import ErrorBody
from marserve.api.http.instances import MAX_INSTANCES
from marserve.api.rest.application import PrettyJson
from marserve.api.rest.late_routes import LateRoute, endpoints, new_router
from marserve.api.rest.schemas import Name
from marserve.api.wishes import MAX_TIMEOUT_MS, PRIORITY, TIMEOUT, VERSION
from marserve.errors import MarserveError
from marserve.registry.models import Registry
from marserve.telemetry.logs.log_limit import caused_by

log = logging.getLogger("marserve.api")

Document = dict[str, Any]

# Placeholders for the title and the quoted name in the documents of one model.
TITLE: Final = "marserve-title-of-this-document"
NAME: Final = "marserve-name-of-this-model"


_, _ERROR = schema_components([ErrorBody], ref_template="#/components/schemas/{name}")


class DescriptionFailed(MarserveError):
    """The API description could not be written."""

    def __init__(self) -> None:
        super().__init__("The API description could not be written; the server's log says why. The next call tries it.")


class Descriptions(NamedTuple):
    """The documents of one listener, as bytes; those of one model or workflow hold `TITLE` and `NAME`.

    Empty if the listener does not serve what they describe.
    """

    whole: bytes
    inference_model: bytes = b""
    workflow: bytes = b""
    management_model: bytes = b""


class WrittenOnce:
    """The descriptions of one listener. The first call of `get` runs `write` in a thread; all calls get its result."""

    def __init__(self, write: Callable[[FastAPI], Descriptions]) -> None:
        self._write = write
        self._written: Descriptions | None = None
        self._writing: asyncio.Future[Descriptions] | None = None

    async def get(self, app: FastAPI) -> Descriptions:
        """The descriptions of `app`. Raises DescriptionFailed; the next call then tries again."""
        if self._written is not None:
            return self._written
        if self._writing is None:
            self._writing = asyncio.ensure_future(asyncio.to_thread(self._write, app))
            self._writing.add_done_callback(self._done)
        try:
            # Shielded: other calls wait for the same documents when the client of this one goes.
            return await asyncio.shield(self._writing)
        except Exception:
            raise DescriptionFailed from None

    def _done(self, writing: asyncio.Future[Descriptions]) -> None:
        self._writing = None
        if writing.cancelled():
            return
        error = writing.exception()
        if error is None:
            self._written = writing.result()
        else:
            log.error("The API description could not be written", exc_info=error, extra=caused_by(""))


def describe_once(
    *, has_inference: bool = False, has_management: bool = False, has_open_inference: bool = False
) -> WrittenOnce:
    """The descriptions of a listener that serves these APIs.

    `has_open_inference`: inference speaks the Open Inference Protocol in full.
    """
    inference = _inference_calls(has_open_inference) if has_inference else ()
    return WrittenOnce(lambda app: _write(app, inference, has_management=has_management))


def description_router(
    registry: Registry,
    *,
    has_inference: bool = False,
    has_management: bool = False,
    has_open_inference: bool = False,
    written: WrittenOnce | None = None,
) -> APIRouter:
    """`OPTIONS /`, `/api-description` and the descriptions of one model, for a listener that serves these APIs.

    It must come before the management router: if two routes take a path, the first one answers. `written` are the
    descriptions, where other routes answer with them too.
    """
    router = new_router(PrettyJson)
    if written is None:
        written = describe_once(
            has_inference=has_inference, has_management=has_management, has_open_inference=has_open_inference
        )

    @router.options("/", operation_id="apiDescription", summary="This document")
    async def describe(request: Request) -> Response:
        return _answer((await written.get(request.app)).whole)

    @router.get("/api-description", operation_id="apiDescriptionPage", summary="This document", deprecated=True)
    async def describe_anyhow(request: Request) -> Response:
        return _answer((await written.get(request.app)).whole)

    # An empty list means every method.
    router.add_route("/api-description", describe, methods=[], include_in_schema=False)
    if has_inference:
        _add_inference_models(router, registry, written, _inference_calls(has_open_inference))
    if has_management:
        _add_management_models(router, registry, written)
    return router


def _answer(document: bytes) -> Response:
    return Response(document, media_type="application/json")


def _fill(document: bytes, title: str, name: str = "") -> bytes:
    """A document of one model: its title and, quoted, its name."""
    text = json.dumps(title, ensure_ascii=False).encode("utf-8", "replace")[1:-1]
    return document.replace(NAME.encode(), quote(name, safe="").encode()).replace(TITLE.encode(), text)


def _write(app: FastAPI, inference: Sequence[InferenceCall], *, has_management: bool) -> Descriptions:
    """Write all documents of a listener; `inference` are its inference calls. Takes seconds."""
    whole = _describe_listener(app, inference)
    inference_model = workflow = management_model = b""
    if inference:
        inference_model = _render(_model_document(TITLE, _inference_paths(inference, NAME)))
        path = f"/wfpredict/{NAME}"
        operation = _inference_operation(path, "workflow_predictions", "Run a workflow", False)
        workflow = _render(_model_document(TITLE, {path: {"post": operation}}))
    if has_management:
        paths = {path: item for path, item in whole["paths"].items() if path.startswith("/models/{model_name}")}
        paths.pop("/models/{model_name}/invoke", None)
        document = _model_document(TITLE, paths)
        document["components"] = whole.get("components", {})
        management_model = _render(document)
    return Descriptions(_render(whole), inference_model, workflow, management_model)


def _render(document: Document) -> bytes:
    return bytes(PrettyJson(document).body)


def _describe_listener(app: FastAPI, inference: Sequence[InferenceCall]) -> Document:
    document: Document = get_openapi(
        title=app.title,
        version=__version__,
        description="Model serving for PyTorch and ONNX, compatible with TorchServe.",
        routes=app.routes,
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for route in app.routes:
        schemas |= route.components if isinstance(route, LateRoute) else {}
    if inference:
        document["paths"] |= _inference_paths(inference)
        schemas |= _ERROR
    return document


# ------------------------------------------------------------------------------------------- inference

# Path, operation id, summary, whether the query is input too.
InferenceCall = tuple[str, str, str, bool]

_INFERENCE: Final[tuple[InferenceCall, ...]] = (
    ("/predictions/{model_name}", "predictions", "Predict with a model's default version", False),
    ("/predictions/{model_name}/{model_version}", "version_predictions", "Predict with a version", False),
    ("/explanations/{model_name}", "explanations", "Explain a prediction of the default version", False),
    ("/explanations/{model_name}/{model_version}", "version_explanations", "Explain a prediction of a version", False),
    ("/v1/models/{model_name}:predict", "kserve_v1_predict", "Predict (KServe V1)", False),
    ("/v1/models/{model_name}:explain", "kserve_v1_explain", "Explain (KServe V1)", False),
    ("/v2/models/{model_name}/infer", "kserve_v2_infer", "Predict (KServe V2)", False),
    ("/v2/models/{model_name}/explain", "kserve_v2_explain", "Explain (KServe V2)", False),
    ("/invocations", "invocations", "Predict (SageMaker)", True),
    ("/models/{model_name}/invoke", "invoke", "Predict (SageMaker, several models)", True),
    ("/{model_name}/predict", "legacy_predict", "Predict (older form)", True),
    ("/{model_name}/{model_version}/predict", "legacy_version_predict", "Predict with a version (older form)", True),
    ("/wfpredict/{workflow_name}", "workflow_predictions", "Run a workflow", False),
)


_V2: Final = "/v2/models/{model_name}/versions/{model_version}"
_OPEN_INFERENCE: Final[tuple[InferenceCall, ...]] = (
    (f"{_V2}/infer", "kserve_v2_infer_version", "Predict with a version (KServe V2)", False),
    (f"{_V2}/explain", "kserve_v2_explain_version", "Explain a prediction of a version (KServe V2)", False),
)


def _inference_calls(has_open_inference: bool) -> tuple[InferenceCall, ...]:
    return (*_INFERENCE, *_OPEN_INFERENCE) if has_open_inference else _INFERENCE


def _inference_paths(calls: Sequence[InferenceCall], model: str | None = None) -> Document:
    """The inference paths; for one model those that name a model, with its name in them."""
    paths: Document = {}
    for path, operation, summary, takes_query in calls:
        if model is not None and "{model_name}" not in path:
            continue
        named = path if model is None else path.replace("{model_name}", quote(model, safe=""))
        paths[named] = {"post": _inference_operation(named, operation, summary, takes_query)}
    return paths


_WISHES: list[Document] = [
    {
        "name": TIMEOUT,
        "in": "header",
        "description": "how long the client waits for the answer, in milliseconds",
        "schema": {"type": "integer", "minimum": 1, "maximum": MAX_TIMEOUT_MS},
    },
    {
        "name": PRIORITY,
        "in": "header",
        "description": "0 (most urgent) to 9; the model's own if not given",
        "schema": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    {
        "name": VERSION,
        "in": "header",
        "description": "the version, or the label of one, that is to answer; a version in the path goes before it",
        "schema": {"type": "string"},
    },
]


_NOT_TAKEN: Final = "The body is compressed, and not by gzip or deflate, or the model does not declare its tensors."
_TENSORS: Final = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "parameters": {"type": "object"},
        "inputs": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "minLength": 1},
                    "datatype": {"type": "string", "examples": ["FP32"]},
                    "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
                    "data": {"type": "array"},
                    "parameters": {"type": "object"},
                },
                "required": ["name", "datatype", "shape"],
            },
        },
        "outputs": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "parameters": {"type": "object"}},
                "required": ["name"],
            },
        },
    },
    "required": ["inputs"],
}
_INSTANCES: Final = {
    "type": "object",
    "properties": {"instances": {"type": "array", "items": {}, "maxItems": MAX_INSTANCES}},
    "required": ["instances"],
}


def _documents_of(path: str) -> Document:
    """What a body of JSON holds, on routes whose protocol says so."""
    schema = _TENSORS if path.startswith("/v2/") else _INSTANCES if path.startswith("/v1/") else None
    return {} if schema is None else {"application/json": {"schema": schema}}


def _inference_operation(path: str, operation: str, summary: str, takes_query: bool) -> Document:
    parameters: list[Document] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in ("model_name", "model_version", "workflow_name")
        if "{" + name + "}" in path
    ]
    if path == "/invocations":
        parameters.append(
            {
                "name": "model_name",
                "in": "query",
                "description": "the model; may be left out when exactly one was loaded at start",
                "schema": {"type": "string"},
            }
        )
    parameters += _WISHES
    about = "Any method will do. The handler gets the body as it is"
    error = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}}
    return {
        "operationId": operation,
        "summary": summary,
        "description": f"{about}, and the query's parameters beside it." if takes_query else f"{about}.",
        "parameters": parameters,
        "requestBody": {
            "content": {
                **_documents_of(path),
                "*/*": {"schema": {"type": "string", "format": "binary"}},
                "multipart/form-data": {"schema": {"type": "object"}},
            }
        },
        "responses": {
            "200": {
                "description": "What the handler answered; it may choose another status and any content type.",
                "content": {"*/*": {"schema": {}}},
            },
            "400": {"description": "The request, or what the handler's input is made of, cannot be read.", **error},
            "404": {"description": "No such model, version or workflow.", **error},
            "413": {"description": "The body is too large.", **error},
            **({"415": {"description": _NOT_TAKEN, **error}} if path.startswith("/v2/") else {}),
            "500": {"description": "The handler raised, or the worker died or took too long.", **error},
            "503": {
                "description": "No worker, a full queue, a deadline too near; or `handler_error_status`.",
                **error,
            },
            "504": {"description": "The deadline passed.", **error},
            "507": {"description": "Memory ran out.", **error},
        },
    }


def _add_inference_models(
    router: APIRouter, registry: Registry, written: WrittenOnce, calls: Sequence[InferenceCall]
) -> None:
    """`OPTIONS` on every inference route that names a model: the document of that model."""

    async def describe(request: Request, model_name: str, model_version: str | None) -> Response:
        registry.data_plane.check_exists(model_name, model_version)
        document = (await written.get(request.app)).inference_model
        return _answer(_fill(document, f"RESTful API for: {model_name}", model_name))

    of_default, of_version = endpoints(describe)

    @router.options("/wfpredict/{workflow_name}", include_in_schema=False)
    async def describe_workflow(request: Request, workflow_name: Name) -> Response:
        document = (await written.get(request.app)).workflow
        return _answer(_fill(document, f"RESTful API for: {workflow_name}", workflow_name))

    for path, operation, _, _ in calls:
        if "{model_name}" in path:
            endpoint = of_version if "{model_version}" in path else of_default
            router.add_api_route(
                path, endpoint, methods=["OPTIONS"], include_in_schema=False, name=f"describe_{operation}"
            )


def _model_document(title: str, paths: Document) -> Document:
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": "1.0.0"},
        "paths": paths,
        "components": {"schemas": _ERROR},
    }


# ------------------------------------------------------------------------------------------- management


def _add_management_models(router: APIRouter, registry: Registry, written: WrittenOnce) -> None:
    """`OPTIONS` on a model's management paths: what may be done with it."""

    async def describe(request: Request, model_name: str, model_version: str | None) -> Response:
        registry.data_plane.check_exists(model_name, model_version)
        document = (await written.get(request.app)).management_model
        return _answer(_fill(document, f"RESTful Management API for: {model_name}"))

    paths = ("/models/{model_name}", "/models/{model_name}/{model_version}")
    for path, endpoint in zip(paths, endpoints(describe), strict=True):
        router.add_api_route(path, endpoint, methods=["OPTIONS"], include_in_schema=False)
