"""One listener's FastAPI application, made of finished routers: paths, errors and JSON as the contract has them.

Inference requests do not come here, the connection takes them; everything else does. Request ids, caching and CORS
headers are the connection's too, so that every answer of a listener has them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote, unquote_to_bytes

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from marserve import __version__
from marserve.api.errors import error_answer
from marserve.api.http.inference import MAX_SEGMENTS
from marserve.errors import (
    BadInput,
    BadWorkflow,
    DownloadFailed,
    LoadFailed,
    MarserveError,
    MethodNotAllowed,
    RouteNotFound,
    WorkflowFailed,
    without_stop,
)
from marserve.names import json_escaped
from marserve.telemetry.logs.log_limit import caused_by

# A reason in a header: long enough for an exception's words, short enough for any proxy.
MAX_REASON_CHARACTERS = 500
# No call has so many segments or parameters; each takes some microseconds.
MOST_QUERY_FIELDS = 256

log = logging.getLogger("marserve.api")

# What may stand for itself in a path's segment once it is split: printable ASCII, but not the two that mean something.
_PLAIN = "".join(map(chr, range(0x20, 0x7F))).replace("/", "").replace("%", "")


class PrettyJson(JSONResponse):
    """JSON as TorchServe writes it: indented by two, one line end; only what could mislead a reader is escaped."""

    def render(self, content: Any) -> bytes:
        """The body."""
        return (json_escaped(json.dumps(content, indent=2, ensure_ascii=False)) + "\n").encode()


def build_app(
    routers: Sequence[Router],
    *,
    title: str,
    docs_url: str | None = None,
    overload_status: int = 503,
    guard: Callable[[ASGIApp], ASGIApp] | None = None,
) -> FastAPI:
    """The application of one listener. Routers that share a path are asked in their order.

    `docs_url` is where a page for people is served, if anywhere; it needs scripts from outside. `overload_status` is
    for what is refused because the server is full or going. `guard` puts something before the routes that sees every
    request, its path split.
    """
    app = FastAPI(
        title=title,
        version=__version__,
        docs_url=docs_url,
        redoc_url=None,
        openapi_url="/openapi.json" if docs_url else None,
        redirect_slashes=False,
        default_response_class=PrettyJson,
    )
    for router in routers:
        # Not `include_router`, which analyses each route a second time, at the first request and on the event loop.
        app.router.routes.extend(router.routes)

    async def answer(request: Request, error: Exception) -> Response:
        return error_response(_translate(error), overload_status)

    for kind in (MarserveError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, answer)
    if guard is not None:
        app.add_middleware(guard)
    app.add_middleware(Border)
    return app


class Border:
    """What every request passes: its path is split before it is decoded, and what nobody foresaw becomes a 500."""

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
            # Nobody is left to answer, and nothing went wrong here.
            return
        except Exception as error:
            # A border: a defect of ours in one call must neither end the connection without an answer nor be silent.
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
    """The path with its segments decoded, so that equal names compare equal, and then encoded where they would clash.

    A `%2F` stays part of a name instead of making two of it; slashes at the end do not count.
    """
    segments = raw.rstrip(b"/").split(b"/")
    return "/".join(quote(unquote_to_bytes(segment), safe=_PLAIN) for segment in segments) or "/"


def error_response(error: Exception, overload_status: int = 503) -> Response:
    """An error as the contract's error object."""
    answer = error_answer(error, overload_status=overload_status)
    headers = dict(answer.headers)
    # Only the management API raises these, where more may be said.
    tells = LoadFailed | BadWorkflow | WorkflowFailed | DownloadFailed
    if isinstance(error, tells) and error.reason and error.reason not in error.message:
        headers["x-marserve-reason"] = _header_text(error.reason)
    return Response(answer.body, status_code=answer.status, headers=headers)


def _header_text(text: str) -> str:
    """A sentence as a header may carry it: printable ASCII, one line, bounded."""
    line = " ".join(text.split())[:MAX_REASON_CHARACTERS]
    return "".join(character if " " <= character <= "~" else "?" for character in line)


def _translate(error: Exception) -> Exception:
    """What the framework refuses, as an error of ours."""
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
