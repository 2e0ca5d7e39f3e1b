"""The health service that gRPC's load balancers and probes ask (`grpc.health.v1`). Needs no key, as HTTP's probes.

The whole server (an empty name) and every service of a listener have the health of `/readyz`: SERVING while requests
should be sent here. `Watch` polls, often enough for a probe, and writes each change that it sees.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Final

from marserve.api.grpc.calls import parse_question
from marserve.api.grpc.schema import HEALTH, Schema
from marserve.api.grpc.transport.status import StatusCode
from marserve.api.grpc.transport.stream import Method, Refused, Stream
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

    def methods(self) -> dict[str, Method]:
        """The service's methods by path."""
        return {f"{SERVICE}/Check": Method(self._check), f"{SERVICE}/Watch": Method(self._watch)}

    async def _check(self, stream: Stream) -> bytes:
        """A service's health now."""
        request = parse_question(self._request, stream.only_message())
        status = self._status(request.service)
        if status == self._response.SERVICE_UNKNOWN:
            raise Refused(StatusCode.NOT_FOUND, f"Service not found: {request.service[:200]}")
        answer: bytes = self._response(status=status).SerializeToString()
        return answer

    async def _watch(self, stream: Stream) -> None:
        """Write a service's health now and after every change, until the client leaves or the server ends."""
        request = parse_question(self._request, stream.only_message())
        sent_status = None
        while True:
            status = self._status(request.service)
            if status != sent_status:
                await stream.write(self._response(status=status).SerializeToString())
                sent_status = status
            await asyncio.sleep(LOOK_S)

    def _status(self, service: str) -> int:
        if service not in self._services:
            return int(self._response.SERVICE_UNKNOWN)
        return int(self._response.SERVING if self._registry.readiness().is_ready else self._response.NOT_SERVING)
