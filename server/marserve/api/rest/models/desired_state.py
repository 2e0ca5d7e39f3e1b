"""The desired state over HTTP: describe, plan, apply, undo.

It decides nothing: `desired_state` reads, compares and applies documents. Bodies are YAML or JSON, whatever their
content type says.
"""

from __future__ import annotations

from asyncio import to_thread
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from starlette.requests import Request
from starlette.responses import Response

from marserve.api.rest.application import PrettyJson
from marserve.api.rest.late_routes import new_router
from marserve.api.rest.models.traffic import Dry, is_dry
from marserve.api.rest.schemas import Flag, error_answers
from marserve.desired_state.diff import Diff
from marserve.desired_state.reconciler import Reconciler, Unnamed
from marserve.desired_state.schema import schema
from marserve.errors import BadInput

Number = Annotated[str, Path(description="`number` in the history")]

Prune = Annotated[
    Flag,
    Query(
        description="where no document decides: unload versions that came by calls and that the document does not name"
    ),
]
Adopt = Annotated[Flag, Query(description="where no document decides: add versions that came by calls to the document")]

_BODY: dict[str, Any] = {
    "requestBody": {
        "description": "the document, YAML or JSON; none: the one that the server was started with, as it is now",
        "content": {
            "application/yaml": {"schema": {"type": "string"}},
            "application/json": {
                "schema": {
                    "type": "object",
                    "description": "GET /desired-state/schema has all of it",
                    "properties": {"models": {"type": ["object", "null"]}},
                    "required": ["models"],
                }
            },
        },
    }
}


def desired_state_router(reconciler: Reconciler, *, enable_model_api: bool) -> APIRouter:
    """The routes; without `enable_model_api` only those that change nothing."""
    router = new_router(PrettyJson)
    _add_questions(router, reconciler)
    if enable_model_api:
        _add_orders(router, reconciler)
    return router


def _add_questions(router: APIRouter, reconciler: Reconciler) -> None:
    @router.get(
        "/desired-state",
        operation_id="describeDesiredState",
        summary="What is in force, where the document lies, and what has failed",
    )
    async def describe() -> Response:
        return PrettyJson(reconciler.describe())

    @router.get(
        "/desired-state/document",
        operation_id="readDesiredState",
        summary="The document in force, as YAML in canonical form, without secrets of addresses",
        responses={200: {"content": {"application/yaml": {}}}, **error_answers(400)},
    )
    async def document() -> Response:
        if reconciler.current is None:
            raise BadInput("No desired state is in force: none was applied since the server started.")
        etag = f'"{reconciler.current.digest}"'
        text = await to_thread(reconciler.current.shown().write)
        return Response(text, media_type="application/yaml", headers={"etag": etag})

    @router.get("/desired-state/schema", operation_id="desiredStateSchema", summary="The document's JSON Schema")
    async def its_schema() -> Response:
        return PrettyJson(schema())

    @router.get(
        "/desired-state/history",
        operation_id="desiredStateHistory",
        summary="The documents that were applied, newest first",
    )
    async def history() -> Response:
        return PrettyJson({"history": reconciler.history()})

    @router.get(
        "/desired-state/history/{number}",
        operation_id="desiredStateEntry",
        summary="One document that was applied",
        responses=error_answers(400),
    )
    async def entry(number: Number) -> Response:
        found = reconciler.entry(int(number)) if number.isascii() and number.isdigit() and len(number) < 10 else None
        if found is None:
            raise BadInput(f"The history has no entry {number[:20]}; GET /desired-state/history lists them.")
        is_current = any(each["number"] == found.number and each["isCurrent"] for each in reconciler.history())
        text = await to_thread(lambda: found.state().shown().write().decode())
        return PrettyJson({**found.describe(is_current=is_current), "document": text})

    @router.post(
        "/desired-state/plan",
        operation_id="planDesiredState",
        summary="What applying a document would do",
        responses=error_answers(400),
        openapi_extra=_BODY,
    )
    async def plan(request: Request, prune: Prune = None, adopt: Adopt = None) -> Response:
        return PrettyJson(plan_document(await reconciler.plan(await _document(request), _unnamed(prune, adopt))))


def _add_orders(router: APIRouter, reconciler: Reconciler) -> None:
    @router.put(
        "/desired-state",
        operation_id="applyDesiredState",
        summary="Have the models that a document says, all of them or nothing changed",
        responses=error_answers(400, 409, 500, 503),
        openapi_extra=_BODY,
    )
    async def apply(request: Request, dry_run: Dry = None, prune: Prune = None, adopt: Adopt = None) -> Response:
        data, unnamed = await _document(request), _unnamed(prune, adopt)
        if is_dry(request):
            return PrettyJson(plan_document(await reconciler.plan(data, unnamed)))
        wanted = request.headers.get("if-match")
        digest = None if wanted is None else wanted.strip().strip('"')
        outcome = await reconciler.apply(data, if_digest=digest, unnamed=unnamed)
        return PrettyJson(await to_thread(outcome.document))

    @router.post(
        "/desired-state/undo",
        operation_id="undoDesiredState",
        summary="Go back to the document before the one in force",
        responses=error_answers(400, 409, 500, 503),
    )
    async def undo(request: Request, dry_run: Dry = None, prune: Prune = None, adopt: Adopt = None) -> Response:
        unnamed = _unnamed(prune, adopt)
        if is_dry(request):
            return PrettyJson(plan_document(await reconciler.plan_undo(unnamed)))
        return PrettyJson((await reconciler.undo(unnamed=unnamed)).document())


def _unnamed(prune: str | None, adopt: str | None) -> Unnamed:
    """What to do with versions that no document names. Raises BadInput for both at once, and for other values."""
    for name, word in (("prune", prune), ("adopt", adopt)):
        if word is not None and word.lower() not in ("true", "false"):
            raise BadInput(f"{name} is {word[:60]!r}; it must be true or false.")
    prunes, adopts = (word is not None and word.lower() == "true" for word in (prune, adopt))
    if prunes and adopts:
        raise BadInput("prune=true unloads what the document does not name, and adopt=true keeps it: say one of them.")
    return "prune" if prunes else "adopt" if adopts else "refuse"


async def _document(request: Request) -> bytes | None:
    body = await request.body()
    return body if body.strip() else None


def plan_document(diff: Diff) -> dict[str, Any]:
    """A plan as clients get it. `memoryBytes` is what the change takes while old and new versions are both loaded.

    They both are for `undoWindow` seconds after the change, so that undo is only a switch, unless the memory is needed
    earlier. `unnamed` are versions that are unloaded only with `prune=true`; `adopted` those added to the document.
    `problems` name archives that cannot be fetched now; the change would fail.
    """
    coming = [step.memory_bytes for step in diff.of("load")]
    going = [step.memory_bytes for step in diff.of("unload")]
    return {
        "isEmpty": diff.is_empty,
        "steps": [step.document() for step in diff.steps],
        "kept": _named(diff.kept),
        **({"unnamed": _named(diff.unnamed)} if diff.unnamed else {}),
        **({"adopted": _named(diff.adopted)} if diff.adopted else {}),
        **({"problems": list(diff.problems)} if diff.problems else {}),
        **({"undoWindow": diff.undo_window_s} if diff.undo_window_s and going else {}),
        "memoryBytes": {
            "atMost": _sum(coming),
            "afterwards": None if _sum(coming) is None or _sum(going) is None else sum(filter(None, coming + going)),
        },
    }


def _named(versions: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"model": model, "version": version} for model, version in versions]


def _sum(costs: list[int | None]) -> int | None:
    """The sum; None if one of them is not known."""
    known = [cost for cost in costs if cost is not None]
    return sum(known) if len(known) == len(costs) else None
