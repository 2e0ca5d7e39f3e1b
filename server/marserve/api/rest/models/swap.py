"""The management API of swaps over HTTP: another archive takes the place of a serving version."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, get_args

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from marserve.api.parameters import Parameters, read_parameters
from marserve.api.rest.application import PrettyJson
from marserve.api.rest.models.traffic import is_dry
from marserve.api.rest.schemas import Name, SwapBody, SwapStatus, error_answers
from marserve.desired_state.policies import Changes
from marserve.errors import BadInput, without_stop
from marserve.registry.changes.swap import SwapOrder, SwapParameters, Swapped
from marserve.registry.intake.registration import RegisterParameters
from marserve.registry.models import Registry

SWAP_PARAMETERS = ("version", "order", "keep_old", "check", "dry_run")


def add_swap(
    router: APIRouter,
    registry: Registry,
    changes: Changes,
    names: Sequence[str],
    read: Callable[[Parameters], RegisterParameters],
) -> None:
    """The route. `names` are the parameters of a registration, and `read` reads them; `changes` may refuse a swap."""
    known = (*names, *SWAP_PARAMETERS)

    @router.post(
        "/models/{model_name}/swap",
        operation_id="swapModel",
        summary="Put an archive in the place of a version that serves",
        responses={
            200: {"model": SwapStatus},
            **error_answers(400, 404, 409, 500, 503, 507),
        },
        openapi_extra={
            "requestBody": {
                "description": "the parameters as JSON, in place of the query",
                "content": {"application/json": {"schema": SwapBody.model_json_schema()}},
            }
        },
    )
    async def swap(
        request: Request,
        model_name: Name,
        url: Annotated[str | None, Query(description="the archive's name in the model store, or its address")] = None,
        version: Annotated[
            str | None,
            Query(description="whose place is taken; if not given, that of the archive's own name, else the default"),
        ] = None,
    ) -> Response:
        parameters = await read_parameters(request, known)
        wish = _read_wish(model_name, parameters, read, dry_run=is_dry(request, parameters))
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


def _read_wish(
    model: str, parameters: Parameters, read: Callable[[Parameters], RegisterParameters], *, dry_run: bool
) -> SwapParameters:
    """Read a swap's parameters. Raises BadInput for all warnings: no old client sends swaps, so this can be strict."""
    if (name := parameters.text("model_name")) is not None and name != model:
        raise BadInput(f"model_name is {name[:60]!r}; a swap stays within its model, {model}.")
    order = parameters.text("order")
    if order is not None and order not in get_args(SwapOrder):
        raise BadInput(f"order is {order[:60]!r}; it must be load_first or unload_first.")
    flags = {name: parameters.flag(name, default) for name, default in _FLAGS.items()}
    if parameters.warnings:
        raise BadInput(f"{without_stop(parameters.warnings[0][:200])}.")
    return SwapParameters(
        model=model,
        registration=read(parameters),
        version=parameters.text("version") or None,
        order=order,  # type: ignore[arg-type]
        keeps_old=flags["keep_old"],
        checks=flags["check"],
        dry_run=dry_run,
    )


_FLAGS = {"keep_old": False, "check": True}
