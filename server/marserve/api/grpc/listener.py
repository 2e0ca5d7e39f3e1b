"""The two gRPC ports: their limits and keys, and which services they have.

A listener is bound first, so that a taken port is found at the start, and accepts later. It is stopped in two steps:
calls that are being answered get their answers, then idle calls are cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from marserve.api.byte_ledger import UNBOUNDED, ByteLedger
from marserve.api.decoding import Decoding
from marserve.api.errors import AS_RECORDED, ErrorRules
from marserve.api.grpc import health as grpc_health
from marserve.api.grpc import inference as grpc_inference
from marserve.api.grpc import management as grpc_management
from marserve.api.grpc import reflection as grpc_reflection
from marserve.api.grpc.calls import STALL_TIMEOUT_S, Answers, Authorize, Calls
from marserve.api.grpc.health import GrpcHealth
from marserve.api.grpc.inference import GrpcInference
from marserve.api.grpc.management import GrpcManagement
from marserve.api.grpc.open_inference import GrpcOpenInference
from marserve.api.grpc.open_inference_control import SERVICE as CONTROL_SERVICE
from marserve.api.grpc.open_inference_control import GrpcOpenInferenceControl, ServerControl
from marserve.api.grpc.reflection import GrpcReflection
from marserve.api.grpc.schema import OPEN_INFERENCE, OPEN_INFERENCE_OF_TORCHSERVE, Schema
from marserve.api.grpc.transport.connection import LAST_CALLS_S
from marserve.api.grpc.transport.limits import GrpcLimits
from marserve.api.grpc.transport.port import Port
from marserve.api.grpc.transport.stream import Method
from marserve.api.open_inference.shared_tensors import SharedTensors
from marserve.api.request_ids import RequestIds
from marserve.api.sockets import bind
from marserve.api.tls import Identity, server_context
from marserve.desired_state.policies import Changes
from marserve.registry.intake.call_modes import PLAIN_NAMES, SequenceHeaderNames
from marserve.registry.models import Registry
from marserve.telemetry.logs.access_log import AccessLog
from marserve.telemetry.metrics.server_metrics import Metrics
from marserve.telemetry.traces.tracing import Takes, Tracing

ALPN: Final = "h2"


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
    port: Port = field(repr=False)

    async def accept(self) -> None:
        """Accept calls from now on. Raises OSError if another has listened on the port since it was bound."""
        await self.port.accept()

    async def stop(self, grace_s: float = 0.0) -> None:
        """Take no more clients, send those that are there away (GOAWAY), and give calls `grace_s` for their answers.

        The rest is cut: watches and silent dialogues would keep the port open as long as their clients like.
        """
        self.port.turn_away()
        if grace_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await asyncio.sleep(LAST_CALLS_S)
                    await self.calls.wait_until_silent()
        await self.port.cut()


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
        recorder: Takes | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._decoding = decoding or Decoding()
        self._schema = Schema()
        self._registry = registry
        self._tls = None if identity is None else server_context(identity, ALPN)
        self._ledger = ledger or ByteLedger(UNBOUNDED)
        self._stall_timeout_s = stall_timeout_s
        self._calls = functools.partial(
            Calls,
            self._schema,
            access_log,
            metrics,
            error_rules=error_rules,
            stall_timeout_s=stall_timeout_s,
            decoding=self._decoding,
            ledger=self._ledger,
            request_ids=request_ids or RequestIds(),
            recorder=recorder,
            tracing=tracing,
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
        shared_tensors: SharedTensors | None = None,
        control: ServerControl | None = None,
        authorize_control: Authorize | None = None,
        is_control_open: bool = False,
    ) -> GrpcListener:
        """The inference port. Raises OSError if the address cannot be bound.

        `control` has the Open Inference Protocol's calls that change the server; if they are open here, they ask
        `authorize_control` for the key.
        """
        calls = self._calls(authorize, message_bytes=limits.message_bytes)
        inference = GrpcInference(self._schema, calls, self._registry.data_plane, sequence)
        answers = {grpc_inference.SERVICE: inference.answers()}
        if has_open_inference:
            for package in (OPEN_INFERENCE, OPEN_INFERENCE_OF_TORCHSERVE):
                service = GrpcOpenInference(
                    self._schema,
                    calls,
                    self._registry,
                    package,
                    self._decoding,
                    is_whole=is_open_inference_whole,
                    sequence=sequence,
                    shared_tensors=shared_tensors,
                )
                answers[service.name] = service.answers()
        further: dict[str, Authorize | None] = {}
        if control is not None:
            changing = GrpcOpenInferenceControl(self._schema, control, is_open=is_control_open)
            index = changing.index() if is_control_open else {}
            answers[CONTROL_SERVICE] = {**answers[CONTROL_SERVICE], **changing.answers(), **index}
            further = dict.fromkeys(changing.answers(), authorize_control) if is_control_open else {}
        return self._bind("gRPC Inference", address, limits, calls, answers, {CONTROL_SERVICE: further})

    def bind_management(
        self,
        address: GrpcAddress,
        limits: GrpcLimits,
        authorize: Authorize | None = None,
        *,
        enable_model_api: bool,
        changes: Changes | None = None,
        control: ServerControl | None = None,
    ) -> GrpcListener:
        """The management port; `changes` as for HTTP's routes. Raises OSError if the address cannot be bound.

        With `control` it has the Open Inference Protocol's calls that change the server.
        """
        calls = self._calls(authorize, message_bytes=limits.message_bytes)
        management = GrpcManagement(self._schema, self._registry, enable_model_api=enable_model_api, changes=changes)
        answers = {grpc_management.SERVICE: management.answers()}
        if control is not None:
            changing = GrpcOpenInferenceControl(self._schema, control, is_open=True)
            answers[CONTROL_SERVICE] = {**changing.answers(), **changing.index()}
        return self._bind("gRPC Management", address, limits, calls, answers)

    def _bind(
        self,
        name: str,
        address: GrpcAddress,
        limits: GrpcLimits,
        calls: Calls,
        answers: Mapping[str, Answers],
        authorize: Mapping[str, Mapping[str, Authorize | None]] | None = None,
    ) -> GrpcListener:
        """`authorize` has the checks of keys by service and method, where they are not the port's."""
        methods: dict[str, Method] = {}
        for service, its_answers in answers.items():
            methods |= calls.service(service, its_answers, (authorize or {}).get(service))
        shown = (*answers, grpc_health.SERVICE, *grpc_reflection.SERVICES)
        methods |= GrpcHealth(self._registry, list(answers), self._schema).methods()
        methods |= GrpcReflection(shown, self._schema).methods()
        limits = replace(limits, stall_timeout_s=self._stall_timeout_s)
        sock = bind(address.host, address.port)
        port = Port(sock, methods, calls.unknown_method(), limits, self._ledger, self._tls)
        return GrpcListener(name, GrpcAddress(address.host, sock.getsockname()[1]), calls, port)


def check_free(address: GrpcAddress) -> None:
    """Raise OSError, with the reason, if the address cannot be bound."""
    bind(address.host, address.port).close()
