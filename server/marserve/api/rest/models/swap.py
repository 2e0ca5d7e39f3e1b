"""The management API of swaps over HTTP: another archive takes the place of a serving version."""

from __future__ import annotations

from typing import Any, get_args

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from marserve.answers.management import SwapStatus
from marserve.api.parameters import SWAP_PARAMETERS, Parameters, read_parameters, read_registration
from marserve.api.rest.application import PrettyJson
from marserve.api.rest.models.traffic import is_dry
from marserve.api.rest.schemas import Name, error_answers, takes
from marserve.desired_state.policies import Changes
from marserve.errors import BadInput, without_stop
from marserve.registry.changes.swap import SwapOrder, SwapParameters, Swapped
from marserve.registry.models import Registry


def add_swap(router: APIRouter, registry: Registry, changes: Changes) -> None:
    """The route; `changes` may refuse a swap."""

    @router.post(
        "/models/{model_name}/swap",
        operation_id="swapModel",
        summary="Put an archive in the place of a version that serves",
        responses={200: {"model": SwapStatus}, **error_answers(400, 404, 409, 500, 503, 507)},
        openapi_extra=takes(SWAP_PARAMETERS, in_body=True),
    )
    async def swap(request: Request, model_name: Name) -> Response:
        parameters = await read_parameters(request, SWAP_PARAMETERS)
        wish = _read_wish(model_name, parameters, dry_run=is_dry(request, parameters))
        changes.check("swap a version")
        swapped = await registry.swap(wish)
        return PrettyJson(describe(swapped))


def describe(swapped: Swapped) -> dict[str, Any]:
    """The answer to the client."""
    return {
        "status": swapped.message,
        "modelName": swapped.model,
        "modelVersion": swapped.version,
        "replacedVersion": swapped.old,
        "order": swapped.order,
        "workers": swapped.workers,
        "seconds": swapped.seconds,
        **({"notes": list(swapped.notes)} if swapped.notes else {}),
        **({} if swapped.rehearsed is None else swapped.rehearsed.document()),
    }


def _read_wish(model: str, parameters: Parameters, *, dry_run: bool) -> SwapParameters:
    """Read a swap's parameters. Raises BadInput for all warnings: no old client sends swaps, so this can be strict."""
    if (name := parameters.text("model_name")) is not None and name != model:
        raise BadInput(f"model_name is {name[:60]!r}; a swap stays within its model, {model}.")
    order = parameters.text("order")
    if order is not None and order not in get_args(SwapOrder):
        raise BadInput(f"order is {order[:60]!r}; it must be load_first or unload_first.")
    keeps_old, checks = parameters.flag("keep_old", False), parameters.flag("check", True)
    if parameters.warnings:
        raise BadInput(f"{without_stop(parameters.warnings[0][:200])}.")
    return SwapParameters(
        model=model,
        registration=read_registration(parameters),
        version=parameters.text("version") or None,
        order=order,  # type: ignore[arg-type]
        keeps_old=keeps_old,
        checks=checks,
        dry_run=dry_run,
    )
