"""A listener with the real connection class and a fake data plane, served by uvicorn on the test's own event loop."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trustme
import uvicorn

from marserve.api.browsers import BrowserRules
from marserve.api.byte_ledger import ByteLedger
from marserve.api.errors import AS_RECORDED, ErrorRules
from marserve.api.http.connection import bind_connection
from marserve.api.http.connections import ConnectionTable
from marserve.api.http.inference import InferenceSurface
from marserve.api.http.request_head import HttpLimits
from marserve.api.http.response_headers import ResponseHeaders
from marserve.api.open_inference.packed_bodies import PackedBodies
from marserve.api.tokens import Tokens
from marserve.telemetry.logs.access_log import Sampling
from support.fake_data_plane import FakeDataPlane
from support.http_client import RawClient, connect


class Lines:
    """An access log that keeps its lines."""

    is_on = True
    has_ids = False
    sampling: Sampling | None = None

    def __init__(self) -> None:
        self.lines: list[str] = []

    def write(self, line: str) -> None:
        """Keep a line."""
        self.lines.append(line)


class Counts:
    """Counters as the server's metrics have them."""

    def __init__(self) -> None:
        self.responses = [0] * 10
        self.refused: dict[str, int] = {}

    def count_refused(self, cause: str) -> None:
        """Count a refusal."""
        self.refused[cause] = self.refused.get(cause, 0) + 1


@dataclass
class Listening:
    """A running listener and what a test looks at."""

    port: int
    plane: FakeDataPlane
    table: ConnectionTable
    log: Lines
    counts: Counts
    server: uvicorn.Server
    tls: ssl.SSLContext | None = None

    def connect(self, *, read_ahead: int = 2**16) -> AbstractAsyncContextManager[RawClient]:
        """Open a connection to it."""
        return connect(self.port, self.tls, read_ahead=read_ahead)

    async def wait_until_empty(self) -> None:
        """Wait until no connection is open."""
        async with asyncio.timeout(10):
            while len(self.table):
                await asyncio.sleep(0.001)


async def echo_app(scope: Any, receive: Any, send: Any) -> None:
    """An ASGI application that answers with method, path and body; `/crash` raises, `/unread` reads nothing."""
    if scope["path"] == "/crash":
        raise RuntimeError("secret /etc/passwd")
    body = b""
    while scope["path"] != "/unread":
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    text = f"{scope['method']} {scope['path']} ".encode() + body
    headers = [(b"content-length", b"%d" % len(text)), (b"x-echo", b"yes")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": text})


@asynccontextmanager
async def listening(
    limits: HttpLimits | None = None,
    *,
    tls_folder: Path | None = None,
    app: Any = echo_app,
    has_inference: bool = True,
    response_headers: ResponseHeaders | None = None,
    error_rules: ErrorRules = AS_RECORDED,
    tokens: Tokens | None = None,
    browser_rules: BrowserRules | None = None,
    ledger: ByteLedger | None = None,
    marks_open_inference: bool = False,
    splits_instances: bool = False,
    packed_bodies: PackedBodies | None = None,
    logs_streams_at_end: bool = False,
) -> AsyncIterator[Listening]:
    """Serve on a free port of this machine; over TLS, with a certificate made in `tls_folder`, where one is given.

    At the end every connection is cut, and the table must be empty.
    """
    plane, log, counts = FakeDataPlane(), Lines(), Counts()
    limits = limits or HttpLimits()
    table = ConnectionTable(limits, ledger)
    protocol = bind_connection(
        InferenceSurface(
            plane,
            marks_open_inference=marks_open_inference,
            splits_instances=splits_instances,
            packed_bodies=packed_bodies,
        )
        if has_inference
        else None,
        limits,
        log,
        counts,
        table,
        response_headers=response_headers,
        error_rules=error_rules,
        tokens=tokens,
        browser_rules=browser_rules,
        logs_streams_at_end=logs_streams_at_end,
    )
    files: dict[str, Any] = {}
    client_context = None
    if tls_folder is not None:
        files, client_context = _certify(tls_folder)
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        date_header=False,
        server_header=False,
        **files,
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    await server.startup(sockets=[listener])
    if ledger is not None:
        table.start()
    try:
        yield Listening(port, plane, table, log, counts, server, client_context)
    finally:
        table.stop()
        for listening_server in server.servers:
            listening_server.close()
        listener.close()
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        async with asyncio.timeout(10):
            while server.server_state.connections or server.server_state.tasks or len(table):
                await asyncio.sleep(0.001)


def _certify(folder: Path) -> tuple[dict[str, Any], ssl.SSLContext]:
    """Uvicorn's settings for TLS, and a client's context that trusts the certificate."""
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    chain, key = folder / "chain.pem", folder / "key.pem"
    certificate.cert_chain_pems[0].write_to_path(chain)
    certificate.private_key_pem.write_to_path(key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # that trusts this authority alone, as by default checking names
    authority.configure_trust(context)
    return {"ssl_certfile": str(chain), "ssl_keyfile": str(key)}, context
