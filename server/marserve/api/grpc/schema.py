"""The messages and services that gRPC clients know (contract §5.1 to §5.3), read from what `protos/` was compiled to.

The `.proto` files beside it are what clients compile; `make protos` compiles them to `messages.binpb`. Health,
reflection and `google.rpc` are among them: the packages that bring these want the protobuf that they were made with.
The descriptors lie in a pool of their own, so that no other import can clash with them; reflection shows that pool.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from google.protobuf import any_pb2, descriptor_pb2, descriptor_pool, empty_pb2, message_factory

INFERENCE: Final = "org.pytorch.serve.grpc.inference"
MANAGEMENT: Final = "org.pytorch.serve.grpc.management"
# TorchServe gave the protocol's service a name of its own, which clients of the standard do not know.
OPEN_INFERENCE_OF_TORCHSERVE: Final = "org.pytorch.serve.grpc.openinference"
OPEN_INFERENCE: Final = "inference"
HEALTH: Final = "grpc.health.v1"
REFLECTION: Final = "grpc.reflection.v1"
REFLECTION_OF_OLD_TOOLS: Final = "grpc.reflection.v1alpha"
ERRORS: Final = "google.rpc"

COMPILED: Final = Path(__file__).parent / "protos" / "messages.binpb"


class Schema:
    """Message classes and method descriptions by full name."""

    def __init__(self) -> None:
        self.pool = descriptor_pool.DescriptorPool()
        for known in (any_pb2, empty_pb2):
            self.pool.AddSerializedFile(known.DESCRIPTOR.serialized_pb)
        for file in descriptor_pb2.FileDescriptorSet.FromString(COMPILED.read_bytes()).file:
            self.pool.AddSerializedFile(file.SerializeToString())

    def message(self, full_name: str) -> Any:
        """The class of a message. Raises KeyError."""
        return message_factory.GetMessageClass(self.pool.FindMessageTypeByName(full_name.removeprefix(".")))

    def methods(self, service: str) -> dict[str, Any]:
        """The methods of a service by name: protobuf's descriptions. Raises KeyError."""
        return dict(self.pool.FindServiceByName(service).methods_by_name)
