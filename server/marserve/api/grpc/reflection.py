"""The reflection service, by which clients without `.proto` files learn services and messages (v1alpha). Needs no key.

What is answered is grpcio's own; here are the bytes, so that a message that cannot be read is the client's fault.
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
        """An answer for each message, in their order."""

        async def requests() -> AsyncIterator[Any]:
            async for data in messages:
                yield await parse_or_abort(_Request, data, context)

        async for answer in self._answers.ServerReflectionInfo(requests(), context):
            yield answer.SerializeToString()
