"""The reflection service (v1alpha): clients without `.proto` files ask it for services and messages. Needs no key.

grpcio's servicer makes the answers. This file reads the bytes, so that an unreadable message is the client's error.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from typing import Any, Final

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection, reflection_pb2

from marserve.api.grpc.calls import parse_or_abort

SERVICE: Final[str] = reflection.SERVICE_NAME

_Request = reflection_pb2.ServerReflectionRequest


class GrpcReflection:
    """Shows these services, and the messages of `pool`."""

    def __init__(self, services: Collection[str], pool: DescriptorPool) -> None:
        self._answers = reflection.aio.ReflectionServicer(services, pool=pool)

    def handler(self) -> grpc.GenericRpcHandler:
        """grpcio's handler of the service."""
        methods = {"ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(self.info)}
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def info(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Yield an answer for each message, in order."""

        async def requests() -> AsyncIterator[Any]:
            async for data in messages:
                yield await parse_or_abort(_Request, data, context)

        async for answer in self._answers.ServerReflectionInfo(requests(), context):
            yield answer.SerializeToString()
