"""Answers `HEAD` as `GET`, without the body, where only the latter has a route (RFC 9110, 9.3.2)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# GET there changes something, so that no request which only looks may do it.
NO_HEAD = ("/token",)


class HeadAsGet:
    """Stands before the routes of a listener."""

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["method"] != "HEAD" or not self._is_for_get(scope):
            await self._app(scope, receive, send)
            return
        has_ended = False

        async def send_head(message: Message) -> None:
            nonlocal has_ended
            if message["type"] == "http.response.start":
                await send(message)
            elif message["type"] == "http.response.body" and not has_ended:
                has_ended = True
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                if message.get("more_body"):  # of a stream, such as logs that are followed
                    answering.cancel()

        answering = asyncio.ensure_future(self._app({**scope, "method": "GET"}, receive, send_head))
        try:
            await answering
        except asyncio.CancelledError:
            if not has_ended:
                answering.cancel()
                raise

    def _is_for_get(self, scope: Scope) -> bool:
        if scope["path"] in NO_HEAD:
            return False
        as_get = {**scope, "method": "GET"}
        takes_head = any(route.matches(scope)[0] is Match.FULL for route in self._routes)
        return not takes_head and any(route.matches(as_get)[0] is Match.FULL for route in self._routes)
