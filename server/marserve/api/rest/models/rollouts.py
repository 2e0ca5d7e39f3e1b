"""The management API of shadows and roll-outs over HTTP.

`/models/{m}/shadow` and `/models/{m}/rollout` never mean versions of these names.
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from marserve.api.rest.application import PrettyJson
from marserve.api.rest.late_routes import new_router
from marserve.api.rest.models.traffic import Dry, is_dry, read_object
from marserve.api.rest.schemas import Name, RolloutBody, RolloutStatus, ShadowBody, ShadowStatus, body_of, error_answers
from marserve.desired_state.policies import Changes
from marserve.errors import RouteNotFound
from marserve.registry.models import Registry
from marserve.registry.observing.shadow_spec import read_shadow
from marserve.rollout.course import read_rollout
from marserve.rollout.rollouts import ORDERS, Rollouts


def rollout_router(
    registry: Registry,
    rollouts: Rollouts,
    guard: Callable[[str], None] = lambda call: None,
    changes: Changes | None = None,
) -> APIRouter:
    """The routes, which must come before those of versions. `guard` may refuse a call that begins a roll-out.

    `changes` takes the calls that change models; the registry if not given.
    """
    router = new_router(PrettyJson)
    _add_shadow(router, registry, changes or Changes(registry))
    _add_rollout(router, rollouts, guard)
    return router


def _add_shadow(router: APIRouter, registry: Registry, changes: Changes) -> None:
    path = "/models/{model_name}/shadow"

    @router.get(
        path,
        operation_id="getShadow",
        summary="What a model's shadow is, has done, and where its answers differ",
        responses={200: {"model": ShadowStatus}, **error_answers(404)},
    )
    async def describe(model_name: Name) -> Response:
        return PrettyJson(registry.mirrors.describe(model_name))

    @router.put(
        path,
        operation_id="putShadow",
        summary="Mirror a share of a model's requests to another version",
        responses={200: {"model": ShadowStatus}, **error_answers(400, 404, 409)},
        openapi_extra=body_of(ShadowBody),
    )
    async def put(request: Request, model_name: Name, dry_run: Dry = None) -> Response:
        spec = read_shadow(await read_object(request))
        return PrettyJson(await changes.put_shadow(model_name, spec, dry_run=is_dry(request)))

    @router.delete(
        path,
        operation_id="deleteShadow",
        summary="Mirror a model's requests no more",
        responses={200: {"model": ShadowStatus}, **error_answers(400, 404, 409)},
    )
    async def remove(request: Request, model_name: Name, dry_run: Dry = None) -> Response:
        return PrettyJson(await changes.put_shadow(model_name, None, dry_run=is_dry(request)))


def _add_rollout(router: APIRouter, rollouts: Rollouts, guard: Callable[[str], None]) -> None:
    path = "/models/{model_name}/rollout"

    @router.get(
        "/rollouts",
        operation_id="listRollouts",
        summary="The present or last roll-out of each model",
    )
    async def list_all() -> Response:
        return PrettyJson({"rollouts": rollouts.list()})

    @router.get(
        path,
        operation_id="getRollout",
        summary="A model's roll-out, its verdicts and their evidence",
        responses={200: {"model": RolloutStatus}, **error_answers(404)},
    )
    async def describe(model_name: Name) -> Response:
        return PrettyJson(rollouts.describe(model_name))

    @router.post(
        path,
        operation_id="beginRollout",
        summary="Let a version take over step by step, as long as it is no worse",
        responses={202: {"model": RolloutStatus}, **error_answers(400, 404, 409)},
        openapi_extra=body_of(RolloutBody),
    )
    async def begin(request: Request, model_name: Name, dry_run: Dry = None) -> Response:
        spec = read_rollout(await read_object(request))
        is_tried = is_dry(request)
        guard(f"marserve rollout {model_name}")
        if is_tried:
            return PrettyJson(rollouts.begin(model_name, spec, dry_run=True))
        return PrettyJson(rollouts.begin(model_name, spec), status_code=202)

    @router.put(
        path + "/{order}",
        operation_id="orderRollout",
        summary="`pause`, `resume`, `abort` or `promote` a roll-out",
        responses={200: {"model": RolloutStatus}, **error_answers(400, 404, 409)},
    )
    async def order(request: Request, model_name: Name, order: str, dry_run: Dry = None) -> Response:
        is_tried = is_dry(request)
        for known in ORDERS:
            if order == known:
                rehearsed = rollouts.rehearse(model_name, known).document() if is_tried else None
                return PrettyJson(rehearsed or rollouts.order(model_name, known))
        raise RouteNotFound(f"{order[:40]} is no order for a roll-out; the orders are {', '.join(ORDERS)}.")

    @router.delete(
        path,
        operation_id="abortRollout",
        summary="Abort a roll-out: the version that served before serves again",
        responses={200: {"model": RolloutStatus}, **error_answers(400, 404, 409)},
    )
    async def abort(request: Request, model_name: Name, dry_run: Dry = None) -> Response:
        if is_dry(request):
            return PrettyJson(rollouts.rehearse(model_name, "abort").document())
        return PrettyJson(rollouts.order(model_name, "abort"))
