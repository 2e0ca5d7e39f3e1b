"""The HTTP listeners: addresses bound before anything is begun, connections accepted once the server is ready.

It knows sockets and uvicorn; `building/routes.py` makes the routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import socket
import ssl
import stat
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from marserve.api.http.connection import HttpConnection, bind_connection
from marserve.api.http.inference import InferenceSurface
from marserve.api.http.response_headers import ResponseHeaders
from marserve.api.open_inference.packed_bodies import PackedBodies
from marserve.api.preflights import Preflights
from marserve.api.rest.application import build_app
from marserve.api.rest.only_here import is_here as is_loopback
from marserve.api.sockets import bind as bind_tcp
from marserve.api.sockets import listen, resolve
from marserve.app.building.cannot_start import CannotStart, cannot_bind
from marserve.app.building.from_settings import (
    cors_headers,
    error_rules,
    http_limits,
    sequence_headers,
    speaks_all_open_inference,
)
from marserve.app.building.parts import Parts
from marserve.app.building.routes import Routers, build_routes, own_access
from marserve.settings import Address, Settings, apis_by_address

BACKLOG = 2048
# Linux: a socket filter that drops packets which open a connection (SYN without ACK in byte 13 of the TCP header) and
# lets all others pass. Each line is (code, jump if true, jump if false, value); see linux/filter.h and asm/socket.h.
SO_ATTACH_FILTER = 26
DROP_NEW = [(0x30, 0, 0, 13), (0x54, 0, 0, 0x12), (0x15, 0, 1, 0x02), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF)]
# Long enough for half-open connections to complete, and for the loop to accept them. A client that connects meanwhile
# tries again after a second.
ACCEPT_REST_S = 0.005
# The limit for accepting all that wait. A listening socket reports their number as `tcpi_unacked`.
MOST_ACCEPT_S = 1.0
# How many turns of the loop lie between asyncio's accept and the first bytes read: task, connection made, reader, read.
TURNS_UNTIL_READ = 5
TCP_INFO_UNACKED = 24
# How long a client may take to agree on TLS.
HANDSHAKE_S = 10.0
# How long a server on a socket's file may take to accept a connection.
STALE_SOCKET_S = 1.0


@dataclass(slots=True)
class Listener:
    """One listening address: its socket, and the server on it once it accepts."""

    address: Address
    names: list[str]
    sock: socket.socket
    config: uvicorn.Config
    state: ServerState
    server: asyncio.Server | None = None

    async def accept(self) -> None:
        """Accept connections from now on. Raises CannotStart if another listens on the address since it was bound."""
        loop = asyncio.get_running_loop()
        try:
            listen(self.sock, BACKLOG)
        except OSError as error:
            raise _cannot_bind(self.address, error, self.names) from error

        def protocol() -> asyncio.Protocol:
            made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
                config=self.config, server_state=self.state, app_state={}, _loop=loop
            )
            return made

        tls: ssl.SSLContext | None = self.config.ssl
        if self.address.scheme == "unix":
            self.server = await loop.create_unix_server(protocol, sock=self.sock, backlog=BACKLOG)
        else:
            self.server = await loop.create_server(
                protocol,
                sock=self.sock,
                ssl=tls,
                ssl_handshake_timeout=HANDSHAKE_S if tls is not None else None,
                backlog=BACKLOG,
            )

    def send_clients_away(self) -> None:
        """Answer as before, but ask each client to connect anew: the load balancer will find it another server.

        So no client has a connection here when requests are refused.
        """
        cast("type[HttpConnection]", self.config.http_protocol_class).listener.is_leaving = True
        for connection in list(self.state.connections):
            cast("HttpConnection", connection).part_after_next_answer()

    async def turn_away(self) -> None:
        """Let no new connection in, and take in those that the system has accepted on our behalf.

        Closing a listening socket resets connections that wait on it, or are half opened, requests and all. So new ones
        are first dropped unseen (a client tries again within a second, and is refused by then), where the system can
        do that.
        """
        if sys.platform == "linux" and self.address.scheme != "unix":
            instructions = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in DROP_NEW))
            program = struct.pack("HL", len(DROP_NEW), ctypes.addressof(instructions))
            with contextlib.suppress(OSError):
                self.sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
        await asyncio.sleep(ACCEPT_REST_S)
        loop = asyncio.get_running_loop()
        end = loop.time() + MOST_ACCEPT_S
        while self._waiting and loop.time() < end:  # a busy machine may not have looked at the sockets yet
            await asyncio.sleep(ACCEPT_REST_S)
        for _ in range(TURNS_UNTIL_READ):  # else a connection accepted just now is closed as idle, its request unread
            await asyncio.sleep(0)

    @property
    def _waiting(self) -> int:
        """How many connections the system has accepted and the loop has not; 0 if the system does not report it."""
        if sys.platform != "linux" or self.address.scheme == "unix":
            return 0
        facts = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_UNACKED + 4)
        return int.from_bytes(facts[TCP_INFO_UNACKED:], sys.byteorder)

    def close(self) -> None:
        """Stop listening."""
        if self.server is not None:
            self.server.close()
        self.sock.close()
        if self.address.scheme == "unix" and self.address.path is not None:
            Path(self.address.path).unlink(missing_ok=True)


def bind_listeners(parts: Parts) -> list[Listener]:
    """Bind every address of the settings; equal addresses become one listener with all their routes.

    Raises CannotStart, and then leaves no socket open.
    """
    listeners: list[Listener] = []
    try:
        for address, names in apis_by_address(parts.settings):
            listeners.append(_bind_listener(address, names, parts))
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def taken_addresses(settings: Settings) -> Iterator[CannotStart]:
    """The errors that binding the addresses would raise now. Nothing is left open, made or removed."""
    for address, names in apis_by_address(settings):
        try:
            if address.scheme == "unix":
                _check_path(Path(address.path or ""))
            else:
                bind(address).close()
        except OSError as error:
            yield _cannot_bind(address, error, names)


def _cannot_bind(address: Address, error: OSError, names: list[str]) -> CannotStart:
    return cannot_bind(address, error, *(f"{name.lower()}_address" for name in names))


def _bind_listener(address: Address, names: list[str], parts: Parts) -> Listener:
    settings, access = parts.settings, parts.access
    routers = build_routes(names, parts)
    is_here = reaches_this_machine_alone(address)
    speaks_all = speaks_all_open_inference(settings)
    predictions_rules = access.browser_rules(address, ["Inference"], is_here=is_here)
    surface = InferenceSurface(
        parts.registry.data_plane,
        parts.workflows,
        settings.predict_route,
        marks_open_inference=speaks_all,
        splits_instances=settings.entry == "marserve",
        sequence=sequence_headers(settings),
        shared_tensors=parts.shared_tensors,
        packed_bodies=PackedBodies(parts.registry, settings.max_request_size) if speaks_all else None,
    )
    connection = bind_connection(
        surface if "Inference" in names else None,
        http_limits(settings, has_management="Management" in names),
        parts.logs.access,
        parts.metrics,
        parts.connections,
        error_rules=error_rules(settings, parts.logs.with_own_paths),
        large_answers=parts.large_answers,
        response_headers=ResponseHeaders(*cors_headers(settings)),
        tokens=access.inference_tokens,
        browser_rules=predictions_rules if access.inference_tokens is None else None,
        decoding=parts.decoding,
        request_ids=parts.request_ids,
        recorder=parts.ended,
        tracing=parts.tracing,
        logs_streams_at_end=settings.entry == "marserve",
    )
    config = uvicorn.Config(
        build_app(
            [router for router, _ in routers],
            title=f"marserve: {' and '.join(names)} API",
            error_rules=error_rules(settings, parts.logs.with_own_paths),
            guard=_guard(address, names, routers, parts, surface),
            only_model=lambda: parts.registry.data_plane.only_startup_model if "Inference" in names else None,
        ),
        http=connection,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=False,
        proxy_headers=False,
    )
    try:
        config.load()
        config.ssl = access.tls if address.is_tls else None
        sock = bind(address)
    except OSError as error:
        raise _cannot_bind(address, error, names) from error
    if address.port == 0 and address.scheme != "unix":
        address = replace(address, port=sock.getsockname()[1])
    return Listener(address, names, sock, config, ServerState())


def bind(address: Address) -> socket.socket:
    """A socket bound to `address` that does not listen yet. Raises OSError."""
    if address.scheme == "unix":
        assert address.path is not None
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _remove_stale(Path(address.path))
            sock.bind(address.path)
        except BaseException:
            sock.close()
            raise
        return sock
    return bind_tcp(address.host, address.port)


def reaches_this_machine_alone(address: Address) -> bool:
    """Whether a listener of this address is on loopback only, whatever its host's name.

    False for a socket's file, and for a host without an address, which binding will report.
    """
    if address.scheme == "unix":
        return False
    try:
        where = resolve(address.host, address.port)[4]
    except OSError:
        return False
    return is_loopback((str(where[0]), 0))


def _guard(
    address: Address, names: list[str], routers: Routers, parts: Parts, surface: InferenceSurface
) -> Callable[[ASGIApp], ASGIApp] | None:
    """Wraps a listener's routes with its checks; None without any."""
    settings = parts.settings
    guard: Callable[[ASGIApp], ASGIApp] | None = None
    if names != ["Metrics"]:
        rules = parts.access.browser_rules(address, names, is_here=reaches_this_machine_alone(address))
        guard = parts.access.guard(routers, own_access(names), rules)
    keeps_documents = settings.entry == "torchserve"
    if keeps_documents and not settings.cors_origins:
        return guard

    def has_inference_route(path: bytes) -> bool:
        return "Inference" in names and surface.match(path) is not None

    def answer_preflights(app: ASGIApp) -> ASGIApp:
        answering = Preflights(app, [each for each, _ in routers], has_inference_route, keeps_documents=keeps_documents)
        return answering if guard is None else guard(answering)

    return answer_preflights


def _remove_stale(path: Path) -> None:
    """Remove a stale socket file (contract §6.3). Raises OSError if a server listens on it, or if it is no socket."""
    _check_stale(path)
    path.unlink(missing_ok=True)


def _check_path(path: Path) -> None:
    """Raise OSError if no socket can be made at this path, without making one."""
    _check_stale(path)
    if not path.parent.is_dir():
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))


def _check_stale(path: Path) -> None:
    """Raise OSError if a server listens on this file, or if it is no socket."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise OSError(errno.EEXIST, "there is a file that is no socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(STALE_SOCKET_S)
            client.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        return
    except (TimeoutError, BlockingIOError):  # a server listens, but its backlog is full
        pass
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
