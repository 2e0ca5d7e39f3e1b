"""Lets callers on this machine alone manage models, at an address that other APIs share.

Knows who calls by the connection's other end, and nothing of keys. A proxy on this machine counts as this machine, as
with an address on loopback; so does a browser, and the `Host` shows a page that led its own name here.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from starlette.routing import Match, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from marserve.api.browsers import BrowserRules
from marserve.api.errors import ForeignHost
from marserve.api.rest.application import error_response
from marserve.errors import ManagementClosed


class OnlyHere:
    """Stands in front of a listener's application, and answers 403 to who asks for one of `routers` from elsewhere.

    `rules` say which hosts a request for them may name.
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


def is_here(client: tuple[str, int] | None) -> bool:
    """Whether the other end of a connection is on this machine; None is the other end of a socket file."""
    if client is None:
        return True
    try:
        address = ipaddress.ip_address(client[0].partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
