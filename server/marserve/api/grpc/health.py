"""The health service that gRPC's load balancers and probes ask (`grpc.health.v1`). Needs no key, as HTTP's probes.

The whole server (an empty name) and every service of a listener have the health of `/readyz`: SERVING while requests
should be sent here. A model's name has that of the model. `Watch` waits for the registry's news and polls nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Final

from marserve.api.grpc.calls import parse_question
from marserve.api.grpc.schema import HEALTH, Schema
from marserve.api.grpc.transport.status import StatusCode
from marserve.api.grpc.transport.stream import Method, Refused, Stream
from marserve.errors import ModelNotFound
from marserve.registry.models import Registry

SERVICE: Final = f"{HEALTH}.Health"
# The most watches of one port at once: each of the registry's news wakes them all.
MOST_WATCHES: Final = 1024
# News come in showers, at a start above all: a watch looks at them once in so long.
SHOWER_S: Final = 0.05


class GrpcHealth:
    """`Check` and `Watch` for these services."""

    def __init__(self, registry: Registry, services: Collection[str], schema: Schema) -> None:
        self._registry = registry
        self._services = frozenset(("", *services))
        self._watches = 0
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
        if self._watches >= MOST_WATCHES:
            raise Refused(
                StatusCode.RESOURCE_EXHAUSTED,
                f"{MOST_WATCHES} watches are open at this port, and there may be no more; ask Check, or come again.",
            )
        self._watches += 1
        try:
            sent_status = None
            while True:
                status = self._status(request.service)
                if status == sent_status:
                    await self._registry.states.wait()
                    await asyncio.sleep(SHOWER_S)
                    continue
                await stream.write(self._response(status=status).SerializeToString())
                sent_status = status
        finally:
            self._watches -= 1

    def _status(self, service: str) -> int:
        if service in self._services:
            is_serving = self._registry.readiness().is_ready
        else:
            try:
                is_serving = self._registry.is_serving(service)
            except ModelNotFound:
                return int(self._response.SERVICE_UNKNOWN)
        return int(self._response.SERVING if is_serving else self._response.NOT_SERVING)
