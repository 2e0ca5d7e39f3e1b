"""The management API of traffic over HTTP: weights, sticky keys and labels of a model's versions.

`/models/{m}/traffic` never means a version named `traffic`; `?model_version=traffic` does.
"""

from __future__ import annotations

import json
from asyncio import to_thread
from collections import Counter
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from marserve.answers.management import StatusMessage
from marserve.api.decoding import SHORT_BYTES
from marserve.api.parameters import JsonParameters, Parameters, QueryParameters
from marserve.api.rest.application import PrettyJson
from marserve.api.rest.schemas import (
    Flag,
    LabelBody,
    LabelStatus,
    Name,
    TrafficBody,
    TrafficStatus,
    body_of,
    error_answers,
)
from marserve.desired_state.policies import Changes
from marserve.errors import BadInput
from marserve.registry.catalogue.traffic import read_traffic
from marserve.registry.models import Registry

MOST_BODY_BYTES = 1 << 20

Dry = Annotated[Flag, Query(description="only say what would be, and whether it can be")]


def add_traffic(router: APIRouter, registry: Registry, changes: Changes) -> None:
    """The routes, which must come before those of versions. `changes` takes the calls that change something."""
    _add_weights(router, registry, changes)
    _add_labels(router, registry, changes)


def _add_weights(router: APIRouter, registry: Registry, changes: Changes) -> None:
    path = "/models/{model_name}/traffic"

    @router.get(
        path,
        operation_id="getTraffic",
        summary="How requests that name no version are shared out",
        responses={200: {"model": TrafficStatus}, **error_answers(404)},
    )
    async def describe(model_name: Name) -> Response:
        return PrettyJson(registry.traffic.describe(model_name))

    @router.put(
        path,
        operation_id="putTraffic",
        summary="Share out requests that name no version by weights",
        responses={200: {"model": TrafficStatus}, **error_answers(400, 404, 409)},
        openapi_extra=body_of(TrafficBody),
    )
    async def put(request: Request, model_name: Name, dry_run: Dry = None) -> Response:
        traffic = read_traffic(await read_object(request))
        return PrettyJson(await changes.put_traffic(model_name, traffic, dry_run=is_dry(request)))

    @router.delete(
        path,
        operation_id="deleteTraffic",
        summary="Let the default version answer requests that name none",
        responses={200: {"model": TrafficStatus}, **error_answers(400, 404, 409)},
    )
    async def reset(request: Request, model_name: Name, dry_run: Dry = None) -> Response:
        return PrettyJson(await changes.put_traffic(model_name, None, dry_run=is_dry(request)))


def _add_labels(router: APIRouter, registry: Registry, changes: Changes) -> None:
    path = "/models/{model_name}/labels"

    @router.get(
        path,
        operation_id="getLabels",
        summary="What each label of a model names",
        responses={200: {"model": dict[str, LabelStatus]}, **error_answers(404)},
    )
    async def describe(model_name: Name) -> Response:
        return PrettyJson(registry.traffic.labels(model_name))

    @router.put(
        path + "/{label}",
        operation_id="putLabel",
        summary="Let a label name a version",
        responses={200: {"model": LabelStatus}, **error_answers(400, 404, 409)},
        openapi_extra=body_of(LabelBody),
    )
    async def put(request: Request, model_name: Name, label: Name, dry_run: Dry = None) -> Response:
        document = await read_object(request)
        version = document.get("version")
        if not isinstance(version, str) or not version or set(document) - {"version"}:
            raise BadInput('A label is put with the version that it is to name and nothing else: {"version": "2.0"}.')
        return PrettyJson(await changes.put_label(model_name, label, version, dry_run=is_dry(request)))

    @router.delete(
        path + "/{label}",
        operation_id="deleteLabel",
        summary="Let a label name nothing any more",
        responses={200: {"model": StatusMessage}, **error_answers(400, 404, 409)},
    )
    async def remove(request: Request, model_name: Name, label: Name, dry_run: Dry = None) -> Response:
        dry = is_dry(request)
        await changes.remove_label(model_name, label, dry_run=dry)
        outcome = "would be removed" if dry else "removed"
        return PrettyJson({"status": f'Label "{label}" of model "{model_name}" {outcome}'})


def is_dry(request: Request, parameters: Parameters | None = None) -> bool:
    """Whether the query has `dry_run=true`, or the body in `parameters` does.

    Raises BadInput for a value that is neither true nor false, and for other spellings of the name: a misspelled dry
    run must not change anything.
    """
    in_body = isinstance(parameters, JsonParameters) and parameters.flag("dry_run", False)
    for name in _spelled_dry_run(request, parameters):
        if name != "dry_run":
            raise BadInput(f"parameter {name!r} is not known; did you mean dry_run?")
    word = QueryParameters(request.query_params, ("dry_run",)).text("dry_run")
    if word is not None and word.lower() not in ("true", "false"):
        # Not taken as false, as elsewhere: that would carry out what was meant as a dry run.
        raise BadInput(f"dry_run is {word[:60]!r}; it must be true or false.")
    return in_body or (word is not None and word.lower() == "true")


def refuse_dry_run(what: str, request: Request, parameters: Parameters | None = None) -> None:
    """For calls without a dry run: raise BadInput if one is asked for, however it is spelled."""
    for name in _spelled_dry_run(request, parameters):
        raise BadInput(f"{what} cannot be tried, and {name} would be ignored: nothing was done. Leave {name} out.")


def _spelled_dry_run(request: Request, parameters: Parameters | None) -> list[str]:
    names = {*request.query_params, *(() if parameters is None else parameters.names)}
    return [name for name in sorted(names) if name.lower().replace("-", "").replace("_", "") == "dryrun"]


async def read_object(request: Request) -> dict[str, Any]:
    """The body, a JSON object without duplicate keys. Raises BadInput."""
    body = await request.body()
    if len(body) > MOST_BODY_BYTES:
        raise BadInput(f"The body has {len(body)} bytes; it may have {MOST_BODY_BYTES}.")
    return await to_thread(_object_of, body) if len(body) > SHORT_BYTES else _object_of(body)


def _object_of(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body, object_pairs_hook=_once)
    except (ValueError, RecursionError):
        raise BadInput("The body is not valid JSON.") from None
    if not isinstance(document, dict):
        raise BadInput("The body must be a JSON object.")
    return document


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen = dict(pairs)
    if len(seen) != len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise BadInput(f"{twice[:80]!r} stands in the body more than once.")
    return seen
