"""What a browser asks before it sends for another site's page: each route that exists answers.

What it wants to know stands in the CORS headers of every answer, or in that it has none: an empty 200 does. Routes that
answer `OPTIONS` with a document, as TorchServe's do, go on to do so where `keeps_documents`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.responses import Response
from starlette.routing import Match, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send


def is_preflight(scope: Scope) -> bool:
    """Whether a browser asks what it may send (the Fetch standard's CORS-preflight request)."""
    if scope["method"] != "OPTIONS":
        return False
    names = {name for name, _ in scope["headers"]}
    return b"origin" in names and b"access-control-request-method" in names


class Preflights:
    """Answers for the routes of one listener, where no key is asked for.

    `is_inference` says whether a path is one that predicts: those are in none of the `routers`.
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
        """Let the route answer. An error of it (no such model, no `OPTIONS`) is not sent: it is no answer."""
        has_document = False

        async def send_document(message: Message) -> None:
            nonlocal has_document
            if message["type"] == "http.response.start":
                has_document = message["status"] < 400
            if has_document:
                await send(message)

        await self._app(scope, receive, send_document)
        return has_document
