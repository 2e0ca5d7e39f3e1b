"""Stands before a listener's routes: checks keys, and applies the rules for browsers."""

from __future__ import annotations

import logging
from asyncio import Lock, to_thread
from collections.abc import Iterable, Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from marserve.api.browsers import BrowserRules
from marserve.api.errors import ForeignHost, ForeignOrigin
from marserve.api.preflights import is_preflight
from marserve.api.rest.application import PrettyJson, error_response, peer_of
from marserve.api.rest.late_routes import new_router
from marserve.api.tokens import Access, CannotKeepTokens, KeyNotReplaced, Tokens, authorization_of
from marserve.errors import InvalidToken
from marserve.telemetry.logs.log_limit import caused_by

log = logging.getLogger("marserve.api")


class Guard:
    """Checks that each request of a listener's application has the key that its route needs.

    `routers` pairs each router with what its routes need. Paths of no route need `otherwise`, so that a client without
    a key does not learn which routes there are. `open_paths` need no key. `browser_rules` judge requests for
    `unprotected` routes.
    """

    def __init__(
        self,
        app: ASGIApp,
        tokens: Tokens,
        routers: Sequence[tuple[Router, Access]],
        otherwise: Access,
        open_paths: Iterable[str] = (),
        *,
        answers_preflight: bool = False,
        browser_rules: BrowserRules | None = None,
    ) -> None:
        self._app = app
        self._tokens = tokens
        self._routers = routers
        self._otherwise = otherwise
        self._open_paths = frozenset(open_paths)
        self._answers_preflight = answers_preflight
        self._browser_rules = browser_rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it."""
        if scope["type"] == "http":
            if self._answers_preflight and is_preflight(scope):
                # A preflight never has a key. Browsers read the CORS headers, which every answer has; an empty one
                # tells nothing of the models.
                await Response(status_code=200)(scope, receive, send)
                return
            try:
                self._check(scope)
            except (InvalidToken, ForeignHost, ForeignOrigin) as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def access_of(self, scope: Scope) -> Access:
        """The access that a request needs."""
        path = scope["path"]
        if path in self._open_paths or path == "/api-description" or (path == "/" and scope["method"] == "OPTIONS"):
            return "open"
        for router, access in self._routers:
            if any(route.matches(scope)[0] is not Match.NONE for route in router.routes):
                return access
        return self._otherwise

    def _check(self, scope: Scope) -> None:
        access = self.access_of(scope)
        if access == "open":
            return
        if access == "unprotected":
            if self._browser_rules is not None:
                self._browser_rules.check_scope(scope)
            return
        value = authorization_of(scope["headers"])
        if access == "either":
            self._tokens.check_either(value)
        else:
            self._tokens.check(access, value)


def token_router(tokens: Tokens) -> APIRouter:
    """`/token?type=management` or `type=inference`, with the API key: a new key of that kind, in the file."""
    router = new_router(PrettyJson)
    one_at_a_time = Lock()

    @router.get(
        "/token",
        operation_id="renewToken",
        summary="Replace the management or the inference key; needs the API key",
    )
    async def renew(request: Request, type: str = "") -> Response:
        async with one_at_a_time:
            value = authorization_of(request.scope["headers"])
            try:
                ends = await to_thread(tokens.renew, type, value)
            except CannotKeepTokens as error:
                log.error("The %s key was not replaced: %s", type, error, extra=caused_by(peer_of(request.scope)))
                raise KeyNotReplaced(error.why) from error
        return PrettyJson({"status": f"The {type} key was replaced; the new one is in the key file", "expires": ends})

    router.add_api_route("/token", renew, methods=["POST"], include_in_schema=False, name="renewTokenByPost")
    return router


class BrowserGuard:
    """Applies the rules for browsers to every request of a listener without keys."""

    def __init__(self, app: ASGIApp, rules: BrowserRules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it."""
        if scope["type"] == "http":
            try:
                self._rules.check_scope(scope)
            except (ForeignHost, ForeignOrigin) as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)
