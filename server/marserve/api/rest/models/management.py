"""The management API over HTTP: from paths and parameters to calls of the registry, and its answers back (contract 2).

It decides nothing about models: the registry does.
"""

from __future__ import annotations

import logging
from asyncio import to_thread
from collections.abc import Iterable
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from marserve.answers.management import (
    CheckReport,
    DryRunStatus,
    KServeReady,
    ModelDescription,
    ModelList,
    NotThere,
    RegisteredStatus,
    StatusMessage,
)
from marserve.api.decoding import SHORT_BYTES
from marserve.api.errors import error_message, error_status, error_type
from marserve.api.http.request_body import is_form, is_quick, read_parts
from marserve.api.http.response_headers import ResponseHeaders
from marserve.api.parameters import (
    COPY_OF,
    PAGE_PARAMETERS,
    REGISTER_PARAMETERS,
    SCALE_PARAMETERS,
    UNREGISTER_PARAMETERS,
    QueryParameters,
    read_copy,
    read_parameters,
    read_registration,
)
from marserve.api.rest.application import PrettyJson
from marserve.api.rest.hang_up import while_connected
from marserve.api.rest.late_routes import Answering, endpoints, new_router
from marserve.api.rest.models.swap import add_swap
from marserve.api.rest.models.traffic import Dry, add_traffic, is_dry
from marserve.api.rest.schemas import Flag, Name, error_answers, takes
from marserve.api.wishes import TIMEOUT, read_timeout_s
from marserve.desired_state.dry_runs import DryRuns
from marserve.desired_state.policies import Changes
from marserve.errors import BadInput, ModelNotFound, VersionNotFound
from marserve.messages import Answer, Part
from marserve.registry.intake.registration import (
    Progress,
    default_set_message,
    unregistered_message,
)
from marserve.registry.models import Registry
from marserve.rollout.rollouts import Rollouts

log = logging.getLogger("marserve.api")

MOST_CHECK_SAMPLES = 64
MOST_REMARKS = 1000

_NOT_THERE: dict[int | str, dict[str, Any]] = {404: {"model": NotThere}}
_STATUS: dict[Progress, int] = {"done": 200, "begun": 202, "partial": 206}

Customized = Annotated[Flag, Query(description="ask the handler too, for `customizedMetadata`")]


def said(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """These statuses for the API description: the answer is a sentence, and with 200 it may be a dry run's."""
    return {status: {"model": DryRunStatus if status == 200 else StatusMessage} for status in statuses}


def management_router(
    registry: Registry,
    *,
    enable_model_api: bool,
    changes: Changes | None = None,
    rollouts: Rollouts | None = None,
    has_readiness: bool = True,
    as_recorded: bool = True,
) -> APIRouter:
    """The routes of the management listener; without `enable_model_api` none that registers or unregisters.

    With `has_readiness` it has `/v1/models/{model}` as TorchServe answers it. `changes` takes the calls that change
    models; the registry if not given. Dry runs ask `rollouts` which roll-outs a change concerns. `as_recorded`:
    answers have TorchServe's words.
    """
    changes = changes or Changes(registry)
    dry_runs = DryRuns(registry, changes, rollouts)
    router = new_router(PrettyJson)
    add_traffic(router, registry, changes)  # first, as its paths look like those of versions
    _add_models(router, registry)
    if has_readiness:
        _add_readiness(router, registry)
    _add_scale(router, registry, changes, dry_runs, as_recorded=as_recorded)
    _add_default(router, registry, changes, dry_runs)
    _add_check(router, registry)
    if enable_model_api:
        add_swap(router, registry, changes)
        _add_register(router, changes, dry_runs, as_recorded=as_recorded)
        _add_unregister(router, changes, dry_runs)
    return router


class Remarks:
    """Logs each warning about calls that name no model once."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, str]] = set()

    def tell(self, call: str, sentences: Iterable[str]) -> None:
        """Log those of a call's warnings that are new. Clients choose their words, so the number is bounded."""
        for sentence in sentences:
            if (call, sentence) not in self._logged and len(self._logged) < MOST_REMARKS:
                self._logged.add((call, sentence))
                log.warning("%s: %s", call, sentence)


def _add_pair(
    router: APIRouter, method: str, end: str, answer: Answering, operation: str, *summaries: str, **described: Any
) -> None:
    """The routes for a model's default version and for a named one; `end` ends both paths."""
    beginnings = (("/models/{model_name}", ""), ("/models/{model_name}/{model_version}", "version_"))
    for (path, prefix), endpoint, summary in zip(beginnings, endpoints(answer), summaries, strict=True):
        options = {"operation_id": prefix + operation, "summary": summary, **described}
        router.add_api_route(path + end, endpoint, methods=[method], **options)


def _add_models(router: APIRouter, registry: Registry) -> None:
    """List, describe."""
    remarks = Remarks()

    @router.get(
        "/models",
        operation_id="listModels",
        summary="List models",
        responses={200: {"model": ModelList}},
        openapi_extra=takes(PAGE_PARAMETERS),
    )
    async def list_models(request: Request) -> Response:
        query = QueryParameters(request.query_params, PAGE_PARAMETERS)
        page = registry.list_models(query.integer("limit"), query.integer("next_page_token"))
        remarks.tell("GET /models", query.warnings)
        return PrettyJson(page.document())

    @router.get(
        "/models/{model_name}",
        operation_id="describeModel",
        summary="Describe a model's default version",
        responses={200: {"model": list[ModelDescription]}, **error_answers(400, 500, 503, 504), **_NOT_THERE},
    )
    async def describe(
        request: Request,
        model_name: Name,
        customized: Customized = None,
        model_version: Annotated[str | None, Query(description="another version than the default one")] = None,
    ) -> Response:
        return await _describe(registry, request, model_name, model_version or None, customized)

    @router.get(
        "/models/{model_name}/{model_version}",
        operation_id="version_describeModel",
        summary="Describe a version, or `all`",
        responses={200: {"model": list[ModelDescription]}, **error_answers(400, 500, 503, 504), **_NOT_THERE},
    )
    async def describe_version(
        request: Request, model_name: Name, model_version: Name, customized: Customized = None
    ) -> Response:
        if model_version == "all":
            try:
                return PrettyJson(registry.describe_all(model_name))
            except ModelNotFound as error:
                return _not_there_yet(error, registry.arriving(model_name))
        return await _describe(registry, request, model_name, model_version, customized)


def _add_readiness(router: APIRouter, registry: Registry) -> None:
    """KServe's readiness, as TorchServe answers it."""

    @router.get(
        "/v1/models/{model_name}",
        operation_id="kserveReady",
        summary="Whether a model can answer (KServe V1)",
        responses={200: {"model": KServeReady}, **error_answers(404)},
    )
    async def is_ready(model_name: Name) -> Response:
        return PrettyJson({"name": model_name, "ready": registry.data_plane.is_model_ready(model_name)})


async def _describe(
    registry: Registry, request: Request, model: str, version: str | None, customized: str | None
) -> Response:
    try:
        registry.data_plane.check_exists(model, version)
    except (ModelNotFound, VersionNotFound) as error:
        return _not_there_yet(error, registry.arriving(model, version))
    if (customized or "").lower() != "true":
        return PrettyJson([registry.describe(model, version)])
    header = request.headers.get(TIMEOUT)
    within_s = None if header is None else read_timeout_s(header.encode("latin-1"))
    headers = getattr(request.state, "sent_headers", request.headers.raw)
    asking = registry.describe_customized(model, version, within_s, headers)
    described, answer = await while_connected(request, asking)
    if len(answer.body) > SHORT_BYTES:
        return _dress(await to_thread(PrettyJson, [described]), answer)
    return _dress(PrettyJson([described]), answer)


def _not_there_yet(error: ModelNotFound | VersionNotFound, arriving: list[dict[str, Any]]) -> Response:
    """The error, and the progress of archives that are being fetched for the model. Raises the error without any."""
    if not arriving:
        raise error
    document = {"code": error_status(error), "type": error_type(error), "message": error_message(error)}
    return PrettyJson({**document, "arriving": arriving}, status_code=error_status(error))


_FRAMING = frozenset(("content-length", "transfer-encoding", "connection", "keep-alive", "trailer", "upgrade"))


def _dress(response: Response, answer: Answer) -> Response:
    """Set the handler's status and headers on the response. Raises HandlerFailed for illegal ones."""
    ResponseHeaders().head(answer.status, answer.reason, answer.headers, keep_alive=True)
    response.status_code = answer.status
    for name, value in answer.headers:
        if name.lower() not in _FRAMING:
            response.headers[name] = value
    return response


def _add_scale(
    router: APIRouter, registry: Registry, changes: Changes, dry_runs: DryRuns, *, as_recorded: bool
) -> None:
    """Change the number of workers, and how batches are formed."""

    async def scale(request: Request, model: str, version: str | None) -> Response:
        query = QueryParameters(request.query_params, SCALE_PARAMETERS)
        minimum, maximum = query.whole("min_worker"), query.whole("max_worker")
        batch_size, delay_ms = query.whole("batch_size"), query.whole("max_batch_delay")
        is_synchronous = query.flag("synchronous", False)
        named = version or query.text("model_version") or None
        delay_s = None if delay_ms is None else delay_ms / 1000
        tunes = batch_size is not None or delay_ms is not None
        scales = not tunes or minimum is not None or maximum is not None
        minimum = 1 if minimum is None else minimum
        maximum = minimum if maximum is None else maximum
        if is_dry(request):
            would = [dry_runs.tune(model, named, batch_size=batch_size, max_batch_delay_s=delay_s)] if tunes else []
            if scales:
                would.append(dry_runs.scale(model, named, min_workers=minimum, max_workers=maximum))
            whole = would[0] if len(would) == 1 else would[0].beside(would[1])
            return PrettyJson(whole.noting(*query.warnings).document())
        if query.warnings:
            registry.remark(model, named, query.warnings)
        if tunes:
            tuned = await changes.tune(model, named, batch_size=batch_size, max_batch_delay_s=delay_s)
            if not scales:
                return PrettyJson({"status": tuned})
        scaled = await changes.scale(model, named, min_workers=minimum, max_workers=maximum, synchronous=is_synchronous)
        status = scaled.message if as_recorded else scaled.own_message
        return PrettyJson({"status": status}, status_code=_STATUS[scaled.progress])

    _add_pair(
        *(router, "PUT", "", scale, "setAutoScale"),
        "Scale a model's default version, or change how its batches are formed",
        "Scale a version, or change how its batches are formed",
        responses={**said(200, 202, 206), **error_answers(400, 404, 500, 503, 507)},
        openapi_extra=takes(SCALE_PARAMETERS),
    )


def _add_default(router: APIRouter, registry: Registry, changes: Changes, dry_runs: DryRuns) -> None:
    @router.put(
        "/models/{model_name}/{model_version}/set-default",
        operation_id="setDefault",
        summary="Let a version answer requests that name none",
        responses={**said(200), **error_answers(400, 404, 409)},
    )
    async def set_default(request: Request, model_name: Name, model_version: Name, dry_run: Dry = None) -> Response:
        if is_dry(request):
            return PrettyJson(dry_runs.set_default(model_name, model_version).document())
        await changes.set_default(model_name, model_version)
        has_rule = registry.traffic.rule_of(model_name) is not None
        return PrettyJson({"status": default_set_message(model_name, model_version, has_rule=has_rule)})


def _add_check(router: APIRouter, registry: Registry) -> None:
    """Check whether batches are answered as single requests."""

    async def check(request: Request, model: str, version: str | None) -> Response:
        body = await request.body()
        samples: list[list[Part]] = []
        if body:
            content_type = request.headers.get("content-type")
            if content_type is None or not is_form(content_type) or is_quick(body, content_type):
                parts = read_parts(body, content_type)
            else:
                parts = await to_thread(read_parts, body, content_type)
            # Each value of a form is a sample: the body of one request.
            samples = [[Part("body", part.body, part.content_type)] for part in parts]
        if len(samples) > MOST_CHECK_SAMPLES:
            raise BadInput(f"There are {len(samples)} samples; a check takes at most {MOST_CHECK_SAMPLES}.")
        return PrettyJson(await registry.check(model, version, samples))

    body: dict[str, Any] = {
        "requestBody": {
            "description": "one sample, or several as the values of a form; none: the samples of the model",
            "content": {
                "*/*": {"schema": {"type": "string", "format": "binary"}},
                "multipart/form-data": {"schema": {"type": "object"}},
            },
        }
    }

    _add_pair(
        *(router, "POST", "/check", check, "checkModel"),
        "Compare batches of the default version with single requests",
        "Compare batches of a version with single requests",
        responses={200: {"model": CheckReport}, **error_answers(400, 404, 500, 503)},
        openapi_extra=body,
    )


def _add_register(router: APIRouter, changes: Changes, dry_runs: DryRuns, *, as_recorded: bool) -> None:
    @router.post(
        "/models",
        operation_id="registerModel",
        summary="Register an archive as a version of a model",
        responses={
            **said(200),
            **{status: {"model": RegisteredStatus} for status in (202, 206)},
            **error_answers(400, 404, 409, 500, 503, 507),
        },
        openapi_extra=takes(REGISTER_PARAMETERS, in_body=True),
    )
    async def register(request: Request) -> Response:
        parameters = await read_parameters(request, REGISTER_PARAMETERS)
        if parameters.has(COPY_OF):
            copied = await changes.copy(read_copy(parameters))
            shown = RegisteredStatus(copied.own_message, copied.model, copied.version)
            return PrettyJson(shown, status_code=_STATUS[copied.progress])
        if is_dry(request, parameters):
            return PrettyJson((await dry_runs.register(read_registration(parameters))).document())
        registered = await changes.register(read_registration(parameters))
        document = RegisteredStatus(registered.message)
        if not as_recorded:
            document = RegisteredStatus(registered.own_message, registered.model, registered.version)
        return PrettyJson(document, status_code=_STATUS[registered.progress])


def _add_unregister(router: APIRouter, changes: Changes, dry_runs: DryRuns) -> None:
    async def unregister(request: Request, model: str, version: str | None) -> Response:
        query = QueryParameters(request.query_params, UNREGISTER_PARAMETERS)
        named = version or query.text("model_version") or None
        is_forced = query.flag("force", False)
        if is_dry(request):
            return PrettyJson(dry_runs.unregister(model, named, force=is_forced).noting(*query.warnings).document())
        await changes.unregister(model, named, force=is_forced)
        return PrettyJson({"status": unregistered_message(model)})

    _add_pair(
        *(router, "DELETE", "", unregister, "unregisterModel", "Unregister a model's only version"),
        "Unregister a version",
        responses={**said(200), **error_answers(400, 403, 404, 408, 409)},
        openapi_extra=takes(UNREGISTER_PARAMETERS),
    )
