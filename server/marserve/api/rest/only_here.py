"""Lets only callers on this machine manage models, at an address that the management API shares with others.

It looks at the connection's other end, and knows no keys. A proxy on this machine counts as this machine, as with an
address on loopback. So does a browser; the `Host` shows a page that points its own name here.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from starlette.routing import Match, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from marserve.api.browsers import BrowserRules
from marserve.api.errors import ForeignHost
from marserve.api.rest.application import error_response
from marserve.errors import ManagementClosed, UploadsClosed


class OnlyHere:
    """Stands before a listener's application. Callers elsewhere get 403 for the routes of `routers`.

    `rules` say which hosts a request for these routes may name.
    """

    def __init__(self, app: ASGIApp, routers: Sequence[Router], rules: BrowserRules | None = None) -> None:
        self._app = app
        self._routers = routers
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it."""
        if scope["type"] == "http" and self._is_closed(scope):
            try:
                self._check(scope)
            except (ManagementClosed, ForeignHost) as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        if not is_here(scope.get("client")):
            raise ManagementClosed
        if self._rules is not None:
            self._rules.check_host(scope["headers"])

    def _is_closed(self, scope: Scope) -> bool:
        return any(route.matches(scope)[0] is not Match.NONE for router in self._routers for route in router.routes)


class KeylessUploads:
    """Says who may upload to a server without keys: callers on this machine, and others if there are rules for them.

    The rules judge what browsers send. No other site's origin may stand in them: whatever an operator lets other pages
    do, they upload nothing. Those for this machine know its names.
    """

    def __init__(self, here: BrowserRules, elsewhere: BrowserRules | None) -> None:
        self._here, self._elsewhere = here, elsewhere

    def check(self, scope: Scope) -> None:
        """Raise UploadsClosed, ForeignHost or ForeignOrigin for a caller who may not."""
        rules = self._here if is_here(scope.get("client")) else self._elsewhere
        if rules is None:
            raise UploadsClosed
        rules.check(scope["method"], scope["headers"])


def is_here(client: tuple[str, int] | None) -> bool:
    """Whether the other end of a connection is on this machine. It is None over a Unix socket."""
    if client is None:
        return True
    try:
        address = ipaddress.ip_address(client[0].partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
