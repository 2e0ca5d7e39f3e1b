"""Answers preflights, which a browser sends before a request for another site's page, for each route that exists.

The browser reads only the CORS headers, which every answer has if CORS is configured, so an empty 200 suffices. With
`keeps_documents`, routes that answer `OPTIONS` with a document, as TorchServe's do, still do so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.responses import Response
from starlette.routing import Match, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send


def is_preflight(scope: Scope) -> bool:
    """Whether a request is a preflight (the Fetch standard's CORS-preflight request)."""
    if scope["method"] != "OPTIONS":
        return False
    names = {name for name, _ in scope["headers"]}
    return b"origin" in names and b"access-control-request-method" in names


class Preflights:
    """Answers preflights for the routes of one listener without keys.

    `is_inference` says whether a path is an inference route; `routers` do not hold those.
    """

    def __init__(
        self,
        app: ASGIApp,
        routers: Sequence[Router],
        is_inference: Callable[[bytes], bool],
        *,
        keeps_documents: bool,
    ) -> None:
        self._app = app
        self._routers = routers
        self._is_inference = is_inference
        self._keeps_documents = keeps_documents

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or not is_preflight(scope) or not self._exists(scope):
            await self._app(scope, receive, send)
            return
        if not self._keeps_documents or not await self._has_sent_document(scope, receive, send):
            await Response(status_code=200)(scope, receive, send)

    def _exists(self, scope: Scope) -> bool:
        matches = (route.matches(scope)[0] for router in self._routers for route in router.routes)
        return any(match is not Match.NONE for match in matches) or self._is_inference(scope["raw_path"])

    async def _has_sent_document(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Let the route answer. Its error (no such model, no `OPTIONS`) is not sent, as it answers no preflight."""
        has_document = False

        async def send_document(message: Message) -> None:
            nonlocal has_document
            if message["type"] == "http.response.start":
                has_document = message["status"] < 400
            if has_document:
                await send(message)

        await self._app(scope, receive, send_document)
        return has_document
