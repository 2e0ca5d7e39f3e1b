"""The health service that gRPC's load balancers and probes ask (`grpc.health.v1`). Needs no key, as HTTP's probes.

The whole server (an empty name) and every service of a listener have the health of `/readyz`: SERVING while requests
should be sent here. `Watch` polls, often enough for a probe, and writes each change that it sees.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2

from marserve.api.grpc.calls import parse_or_abort
from marserve.registry.models import Registry

SERVICE: Final[str] = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
LOOK_S: Final = 0.2

_Request = health_pb2.HealthCheckRequest
_Response = health_pb2.HealthCheckResponse


class GrpcHealth:
    """`Check` and `Watch` for these services."""

    def __init__(self, registry: Registry, services: Collection[str]) -> None:
        self._registry = registry
        self._services = frozenset(("", *services))

    def handler(self) -> grpc.GenericRpcHandler:
        """grpcio's handler of the service. It takes bytes, so that an unreadable message is the client's error."""
        methods = {
            "Check": grpc.unary_unary_rpc_method_handler(self.check),
            "Watch": grpc.unary_stream_rpc_method_handler(self.watch),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def check(self, data: bytes, context: Any) -> bytes:
        """Answer a service's health now."""
        request = await parse_or_abort(_Request, data, context)
        status = self._status(request.service)
        if status == _Response.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"Service not found: {request.service[:200]}")
        answer: bytes = _Response(status=status).SerializeToString()
        return answer

    async def watch(self, data: bytes, context: Any) -> None:
        """Write a service's health now and after every change, until the client leaves or the server ends."""
        request = await parse_or_abort(_Request, data, context)
        sent_status = None
        while True:
            status = self._status(request.service)
            if status != sent_status:
                await context.write(_Response(status=status).SerializeToString())
                sent_status = status
            await asyncio.sleep(LOOK_S)

    def _status(self, service: str) -> int:
        if service not in self._services:
            return int(_Response.SERVICE_UNKNOWN)
        return int(_Response.SERVING if self._registry.readiness().is_ready else _Response.NOT_SERVING)
