"""One listener's FastAPI application, made of finished routers: paths, errors and JSON as the contract has them.

A further surface is a router in a file of `platforms/` or `models/`, which `app/building/routes.py` gives to a
listener. The connection takes inference requests; all others come here. It also adds request ids, caching and CORS
headers, so that every answer of a listener has them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote, unquote_to_bytes

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from msgspec import to_builtins
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from marserve import __version__
from marserve.api.errors import AS_RECORDED, ErrorRules, error_answer, reason_of
from marserve.api.http.inference import MAX_SEGMENTS
from marserve.api.rest.head_requests import HeadAsGet
from marserve.api.rest.no_route import Routes
from marserve.errors import (
    BadInput,
    MarserveError,
    MethodNotAllowed,
    RouteNotFound,
    without_stop,
)
from marserve.names import json_escaped
from marserve.telemetry.logs.log_limit import caused_by

# Of a reason in a header: enough for an exception's message, and short enough for any proxy.
MAX_REASON_CHARACTERS = 500
# More than any call has; each parameter costs some microseconds.
MOST_QUERY_FIELDS = 256

log = logging.getLogger("marserve.api")

# Characters that need no escape in a segment of a split path: printable ASCII except `/` and `%`.
_PLAIN = "".join(map(chr, range(0x20, 0x7F))).replace("/", "").replace("%", "")


class PrettyJson(JSONResponse):
    """JSON as TorchServe writes it: indented by two, one line end, and few escapes."""

    def render(self, content: Any) -> bytes:
        """The body."""
        return (json_escaped(json.dumps(content, indent=2, ensure_ascii=False, default=to_builtins)) + "\n").encode()


def build_app(
    routers: Sequence[Router],
    *,
    title: str,
    error_rules: ErrorRules = AS_RECORDED,
    guard: Callable[[ASGIApp], ASGIApp] | None = None,
    only_model: Callable[[], str | None] = lambda: None,
) -> FastAPI:
    """The application of one listener. If routers share a path, the first one answers.

    `guard` wraps the routes and sees every request, with its path split. Unless errors are as recorded, `HEAD` is
    answered as `GET` is. `only_model` finds the model that an error
    about a missing route may name.
    """
    app = FastAPI(
        title=title,
        version=__version__,
        docs_url=None,  # FastAPI's own page loads scripts from outside; `pages/` has ours
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        default_response_class=PrettyJson,
    )
    for router in routers:
        # Not `include_router`, which would analyse each route again, at the first request and on the event loop.
        app.router.routes.extend(router.routes)

    known = Routes(app.router.routes)

    async def answer(request: Request, error: Exception) -> Response:
        is_open_inference = request.scope["path"].startswith(("/v1/", "/v2/"))
        explained = None
        if not error_rules.as_recorded and isinstance(error, HTTPException):
            explained = known.explain(error.status_code, request.scope, only_model)
        return error_response(explained or _translate(error), error_rules, is_open_inference=is_open_inference)

    for kind in (MarserveError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, answer)
    if not error_rules.as_recorded:
        app.add_middleware(HeadAsGet, routes=app.router.routes)
    if guard is not None:
        app.add_middleware(guard)
    app.add_middleware(Border)
    return app


class Border:
    """Every request passes it: it splits the path before decoding it, and makes unforeseen exceptions a 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        raw_path = scope.get("raw_path") or quote(scope["path"]).encode()
        if raw_path.count(b"/") > MAX_SEGMENTS or scope["query_string"].count(b"&") >= MOST_QUERY_FIELDS:
            error = BadInput(f"A path has at most {MAX_SEGMENTS} segments, a query {MOST_QUERY_FIELDS} parameters.")
            await error_response(error)(scope, receive, send)
            return
        scope = {**scope, "path": split_path(raw_path)}
        has_begun = False

        async def note_begin(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, note_begin)
        except ClientDisconnect:
            # The client has gone; nothing went wrong here.
            return
        except Exception as error:
            # The outermost border: a defect of marserve in one call is answered and logged.
            request_id = scope.get("state", {}).get("request_id", "-")
            extra = caused_by(peer_of(scope))
            log.exception("Request %s failed: %s %s", request_id, scope["method"], scope["path"], extra=extra)
            if has_begun:
                raise
            await error_response(error)(scope, receive, send)


def peer_of(scope: Scope) -> str:
    """The client's address and port, `127.0.0.1:64003`; empty on a Unix socket."""
    return "{}:{}".format(*scope["client"]) if scope.get("client") else ""


def split_path(raw: bytes) -> str:
    """The path with its segments decoded, and encoded again in one form, so that equal names compare equal.

    So a `%2F` stays part of a name and does not split it. Slashes at the end are dropped.
    """
    segments = raw.rstrip(b"/").split(b"/")
    return "/".join(quote(unquote_to_bytes(segment), safe=_PLAIN) for segment in segments) or "/"


def error_response(error: Exception, rules: ErrorRules = AS_RECORDED, *, is_open_inference: bool = False) -> Response:
    """An error as the contract's error object, with the key that clients of the Open Inference Protocol read."""
    answer = error_answer(error, rules, is_open_inference=is_open_inference)
    headers = dict(answer.headers)
    if reason := reason_of(error):
        headers["x-marserve-reason"] = _header_text(reason)
    return Response(answer.body, status_code=answer.status, headers=headers)


def _header_text(text: str) -> str:
    """A sentence as a header may carry it: printable ASCII, one line, bounded."""
    line = " ".join(text.split())[:MAX_REASON_CHARACTERS]
    return "".join(character if " " <= character <= "~" else "?" for character in line)


def _translate(error: Exception) -> Exception:
    """A refusal of the framework as an error of marserve."""
    if isinstance(error, RequestValidationError):
        places = ", ".join(".".join(map(str, problem["loc"])) for problem in error.errors())
        return BadInput(f"The request cannot be used: {places}.")
    if not isinstance(error, HTTPException):
        return error
    if error.status_code == 404:
        return RouteNotFound()
    if error.status_code == 405:
        return MethodNotAllowed()
    return BadInput(f"The request cannot be used: {without_stop(error.detail)}.")
