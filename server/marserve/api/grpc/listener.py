"""The two gRPC ports: grpcio's servers, their limits and keys, and which services they have.

The only file that makes a grpcio server. A listener is bound first, so that a taken port is found at the start, and
accepts later. It is stopped in two steps: calls that are being answered get their answers, then idle calls are cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from marserve.api.byte_ledger import ByteLedger
from marserve.api.decoding import Decoding
from marserve.api.errors import AS_RECORDED, ErrorRules
from marserve.api.grpc import health as grpc_health
from marserve.api.grpc import inference as grpc_inference
from marserve.api.grpc import management as grpc_management
from marserve.api.grpc import reflection as grpc_reflection
from marserve.api.grpc.calls import STALL_TIMEOUT_S, Authorize, Calls, quiet_grpcio
from marserve.api.grpc.health import GrpcHealth
from marserve.api.grpc.inference import GrpcInference
from marserve.api.grpc.management import GrpcManagement
from marserve.api.grpc.open_inference import GrpcOpenInference
from marserve.api.grpc.reflection import GrpcReflection
from marserve.api.grpc.schema import OPEN_INFERENCE, OPEN_INFERENCE_OF_TORCHSERVE, Schema
from marserve.api.request_ids import RequestIds
from marserve.api.tls import Identity
from marserve.desired_state.policies import Changes
from marserve.registry.intake.call_modes import PLAIN_NAMES, SequenceHeaderNames
from marserve.registry.models import Registry
from marserve.telemetry.logs.access_log import AccessLog
from marserve.telemetry.metrics.counts import Metrics

# Of an answer's length; workers bound it (`max_response_size`).
UNLIMITED: Final = -1
# How long grpcio may take to cut calls and close its port.
CUT_LIMIT_S: Final = 5.0
# grpcio sends a GOAWAY only when it is stopped, and then ends a call that has come but was not looked at as CANCELLED
# (grpc/grpc#41785), which clients do not retry elsewhere. So new calls are first refused for a moment: a client that
# gets UNAVAILABLE does not come back at once.
REFUSE_FIRST_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class GrpcLimits:
    """Limits for clients of one port. Sizes in bytes, times in seconds; None: no limit.

    A connection that is `age_s` old is asked to close, and its calls have `age_grace_s` to end. After `keepalive_s`
    of silence a client gets a ping, and is cut if it does not answer within `keepalive_timeout_s`. A client may send a
    ping every `least_ping_interval_s`.
    """

    message_bytes: int = 6_553_500
    header_bytes: int = 64 * 1024
    connections: int = 8192
    calls_per_connection: int = 1024
    age_s: float | None = None
    age_grace_s: float | None = None
    keepalive_s: float = 60.0
    keepalive_timeout_s: float = 20.0
    least_ping_interval_s: float = 10.0

    def options(self) -> list[tuple[str, int]]:
        """As grpcio's channel arguments."""
        options = {
            "grpc.so_reuseport": 0,  # so that binding a taken port fails
            "grpc.max_receive_message_length": self.message_bytes,
            "grpc.max_send_message_length": UNLIMITED,
            "grpc.max_metadata_size": self.header_bytes,
            "grpc.absolute_max_metadata_size": self.header_bytes,
            "grpc.max_allowed_incoming_connections": self.connections,
            "grpc.max_concurrent_streams": self.calls_per_connection,
            "grpc.keepalive_time_ms": _milliseconds(self.keepalive_s),
            "grpc.keepalive_timeout_ms": _milliseconds(self.keepalive_timeout_s),
            "grpc.keepalive_permit_without_calls": 1,
            "grpc.http2.min_ping_interval_without_data_ms": _milliseconds(self.least_ping_interval_s),
        }
        if self.age_s is not None:
            options["grpc.max_connection_age_ms"] = _milliseconds(self.age_s)
        if self.age_grace_s is not None:
            options["grpc.max_connection_age_grace_ms"] = _milliseconds(self.age_grace_s)
        return list(options.items())


@dataclass(frozen=True, slots=True)
class GrpcAddress:
    """Where a port is: a host's name or address, and a number; 0 lets the system choose."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(slots=True)
class GrpcListener:
    """One port. `name` is the API's; `address` has the port that the system gave."""

    name: str
    address: GrpcAddress
    calls: Calls = field(repr=False)
    _server: Any = field(repr=False)
    _has_begun: bool = field(default=False, repr=False)

    async def accept(self) -> None:
        """Accept calls from now on."""
        self._has_begun = True
        await self._server.start()

    async def stop(self, grace_s: float = 0.0) -> None:
        """Take no more calls, send clients away (GOAWAY), and give calls `grace_s` for their answers.

        The rest is cut.
        """
        if not self._has_begun:
            await self.accept()  # grpcio gives back the port only of a server that was started
        if grace_s and self.calls.has_been_called:
            await asyncio.sleep(REFUSE_FIRST_S)
        ending = asyncio.ensure_future(self._server.stop(grace_s))
        if grace_s:
            silence = asyncio.ensure_future(self.calls.wait_until_silent())
            try:
                await asyncio.wait((ending, silence), return_when=asyncio.FIRST_COMPLETED)
            finally:
                silence.cancel()
                # Watches and silent dialogues would keep the port open as long as their clients like.
                cutting = asyncio.ensure_future(self._server.stop(None))
                with contextlib.suppress(asyncio.CancelledError):
                    await silence
                await asyncio.wait((ending, cutting), timeout=CUT_LIMIT_S)
        else:
            await asyncio.wait((ending,), timeout=CUT_LIMIT_S)


class GrpcPorts:
    """Makes listeners. They share the schema, the log, the metrics and TLS."""

    def __init__(
        self,
        registry: Registry,
        access_log: AccessLog,
        metrics: Metrics,
        *,
        identity: Identity | None = None,
        error_rules: ErrorRules = AS_RECORDED,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        decoding: Decoding | None = None,
        ledger: ByteLedger | None = None,
        request_ids: RequestIds | None = None,
    ) -> None:
        quiet_grpcio()
        self._decoding = decoding or Decoding()
        self._schema = Schema()
        self._registry = registry
        self._identity = identity
        self._calls = functools.partial(
            Calls,
            self._schema,
            access_log,
            metrics,
            error_rules=error_rules,
            stall_timeout_s=stall_timeout_s,
            decoding=self._decoding,
            ledger=ledger,
            request_ids=request_ids or RequestIds(),
        )

    def bind_inference(
        self,
        address: GrpcAddress,
        limits: GrpcLimits,
        authorize: Authorize | None = None,
        *,
        has_open_inference: bool = False,
        is_open_inference_whole: bool = False,
        sequence: SequenceHeaderNames = PLAIN_NAMES,
    ) -> GrpcListener:
        """The inference port. Raises OSError if the address cannot be bound."""
        calls = self._calls(authorize)
        inference = GrpcInference(self._schema, calls, self._registry.data_plane, sequence)
        answers = {grpc_inference.SERVICE: inference.answers()}
        if has_open_inference:
            for package in (OPEN_INFERENCE, OPEN_INFERENCE_OF_TORCHSERVE):
                service = GrpcOpenInference(
                    self._schema, self._registry, package, self._decoding, is_whole=is_open_inference_whole
                )
                answers[service.name] = service.answers()
        handlers = [calls.service(name, methods) for name, methods in answers.items()]
        return self._bind("gRPC Inference", address, limits, calls, handlers, list(answers))

    def bind_management(
        self,
        address: GrpcAddress,
        limits: GrpcLimits,
        authorize: Authorize | None = None,
        *,
        enable_model_api: bool,
        changes: Changes | None = None,
    ) -> GrpcListener:
        """The management port; `changes` as for HTTP's routes. Raises OSError if the address cannot be bound."""
        calls = self._calls(authorize)
        management = GrpcManagement(self._schema, self._registry, enable_model_api=enable_model_api, changes=changes)
        name = grpc_management.SERVICE
        handler = calls.service(name, management.answers())
        return self._bind("gRPC Management", address, limits, calls, [handler], [name])

    def _bind(
        self,
        name: str,
        address: GrpcAddress,
        limits: GrpcLimits,
        calls: Calls,
        handlers: Sequence[grpc.GenericRpcHandler],
        services: list[str],
    ) -> GrpcListener:
        check_free(address)
        server = grpc.aio.server(options=limits.options())
        shown = (*services, grpc_health.SERVICE, *grpc_reflection.SERVICES)
        health = GrpcHealth(self._registry, services, self._schema).handler()
        reflection = GrpcReflection(shown, self._schema).handlers()
        server.add_generic_rpc_handlers((*handlers, health, *reflection, calls.unknown_methods()))
        try:
            if self._identity is None:
                port = server.add_insecure_port(str(address))
            else:
                pair = (self._identity.key_pem, self._identity.chain_pem)
                port = server.add_secure_port(str(address), grpc.ssl_server_credentials([pair]))
        except RuntimeError as error:  # grpcio does not say why
            raise OSError("the port could not be had") from error
        return GrpcListener(name, GrpcAddress(address.host, port), calls, server)


def check_free(address: GrpcAddress) -> None:
    """Raise OSError, with the reason, if the address cannot be bound; grpcio gives no reason."""
    infos = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, where = infos[0]
    with socket.socket(family, kind, protocol) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)


def _milliseconds(seconds: float) -> int:
    return max(1, min(round(seconds * 1000), 2**31 - 1))
