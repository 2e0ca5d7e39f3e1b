"""The ASGI application around one request: adds what every answer of a listener has.

It adds the common headers, counts the answer and logs its request. It asks uvicorn's cycle only whether the client has
gone.
"""

from __future__ import annotations

import logging
from time import monotonic

from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from marserve.api.byte_ledger import Hold
from marserve.api.errors import error_answer
from marserve.api.http.listener import Listener
from marserve.api.http.request_head import Head
from marserve.errors import MarserveError
from marserve.telemetry.logs.line_ids import about_request
from marserve.telemetry.logs.log_limit import caused_by

log = logging.getLogger("marserve.api")


class AsgiRun:
    """One request on its way through the application. `id` is the request id, also in the scope's state.

    The state's `sent_headers` are those that a handler may see. Their names keep their case, which ASGI's headers lose.
    """

    __slots__ = ("_app", "_began", "_cycle", "_has_started", "_listener", "_peer", "_send_on", "head", "hold", "id")

    _send_on: ASGISendCallable

    def __init__(
        self, listener: Listener, cycle: RequestResponseCycle, app: ASGI3Application, peer: str, head: Head
    ) -> None:
        self.id = listener.request_ids.of(head.client_id)
        # The room of its body, given back with the last reference to the run: when the application has ended.
        self.hold: Hold | None = None
        self._listener = listener
        self._cycle = cycle
        self._app = app
        self._peer = peer
        self.head = head
        self._began = monotonic()
        self._has_started = False

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """Run the application. An exception before its answer becomes an error object."""
        self._send_on = send
        given = self.head.client_id
        with about_request(f"{self.id}/{given}" if given and given != self.id else self.id):
            await self._run(scope, receive)

    async def _run(self, scope: Scope, receive: ASGIReceiveCallable) -> None:
        scope["state"]["request_id"] = self.id
        scope["state"]["sent_headers"] = self.head.headers
        try:
            await self._app(scope, receive, self._send)
        except Exception as error:
            if self._has_started:
                raise
            if not isinstance(error, MarserveError):
                log.exception("Request %s failed: %s", self.id, self.head.line, extra=caused_by(self._peer))
            status, body, headers = error_answer(error, self._listener.error_rules)
            lines = [(name.encode(), value.encode("latin-1")) for name, value in headers]
            lines.append((b"content-length", b"%d" % len(body)))
            await self._send({"type": "http.response.start", "status": status, "headers": lines, "trailers": False})
            await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _send(self, message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start" and not self._has_started:
            self._has_started = True
            if not self._cycle.disconnected:
                head, status = self.head, message["status"]
                self._listener.record(self._peer, head.line, status, self._began, monotonic(), self.id, head.client_id)
            is_left = self.head.is_upload and self._cycle.more_body and self._cycle.keep_alive
            ours = self._listener.response_headers.of(self.head.lines)
            headers = ours.complete(list(message.get("headers", [])), self.id)
            is_said = any(name.lower() == b"connection" for name, _ in headers)
            # The rest of a refused upload may be gigabytes, so it is not read: the connection closes. If it closes for
            # another reason, uvicorn adds the header itself only since 0.53.
            if is_left or not (self._cycle.keep_alive or is_said):
                headers.append((b"connection", b"close"))
            await self._send_on({**message, "headers": headers})
            if is_left:
                # uvicorn would close at once, which resets a client that still sends. `HttpConnection` closes gently.
                self.head.keep_alive = False
                self._cycle.keep_alive = True
            return
        await self._send_on(message)
