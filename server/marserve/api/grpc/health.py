"""The health service that gRPC's load balancers and probes ask (`grpc.health.v1`). Needs no key, as HTTP's probes.

The whole server (an empty name) and every service of a listener have the health of `/readyz`: SERVING while requests
should be sent here. `Watch` polls, often enough for a probe, and writes each change that it sees.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any, Final

import grpc

from marserve.api.grpc.calls import parse_or_abort
from marserve.api.grpc.schema import HEALTH, Schema
from marserve.registry.models import Registry

SERVICE: Final = f"{HEALTH}.Health"
LOOK_S: Final = 0.2


class GrpcHealth:
    """`Check` and `Watch` for these services."""

    def __init__(self, registry: Registry, services: Collection[str], schema: Schema) -> None:
        self._registry = registry
        self._services = frozenset(("", *services))
        self._request = schema.message(f"{HEALTH}.HealthCheckRequest")
        self._response = schema.message(f"{HEALTH}.HealthCheckResponse")

    def handler(self) -> grpc.GenericRpcHandler:
        """grpcio's handler of the service. It takes bytes, so that an unreadable message is the client's error."""
        methods = {
            "Check": grpc.unary_unary_rpc_method_handler(self.check),
            "Watch": grpc.unary_stream_rpc_method_handler(self.watch),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def check(self, data: bytes, context: Any) -> bytes:
        """Answer a service's health now."""
        request = await parse_or_abort(self._request, data, context)
        status = self._status(request.service)
        if status == self._response.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"Service not found: {request.service[:200]}")
        answer: bytes = self._response(status=status).SerializeToString()
        return answer

    async def watch(self, data: bytes, context: Any) -> None:
        """Write a service's health now and after every change, until the client leaves or the server ends."""
        request = await parse_or_abort(self._request, data, context)
        sent_status = None
        while True:
            status = self._status(request.service)
            if status != sent_status:
                await context.write(self._response(status=status).SerializeToString())
                sent_status = status
            await asyncio.sleep(LOOK_S)

    def _status(self, service: str) -> int:
        if service not in self._services:
            return int(self._response.SERVICE_UNKNOWN)
        return int(self._response.SERVING if self._registry.readiness().is_ready else self._response.NOT_SERVING)
