"""gRPC listeners over a data plane that does as the test says, and clients that speak to them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from marserve.api.byte_ledger import ByteLedger
from marserve.api.errors import AS_RECORDED, ErrorRules
from marserve.api.grpc.calls import Authorize
from marserve.api.grpc.listener import GrpcAddress, GrpcListener, GrpcPorts
from marserve.api.grpc.open_inference_control import ServerControl
from marserve.api.grpc.schema import Schema
from marserve.api.grpc.transport.limits import GrpcLimits
from marserve.api.request_ids import RequestIds
from marserve.api.tls import Identity
from marserve.errors import ModelNotFound
from marserve.pool.changes import Changes
from marserve.registry.catalogue.readiness import Readiness
from marserve.telemetry.logs.access_log import Sampling
from support.fake_data_plane import FakeDataPlane, Submitted

HERE = GrpcAddress("127.0.0.1", 0)
SCHEMA = Schema()


@dataclass
class FakeRegistry(FakeDataPlane):
    """A registry that is its own data plane, and says how it is."""

    is_well: bool = True
    serving: dict[str, bool] = field(default_factory=dict)
    states: Changes = field(default_factory=Changes)

    @property
    def data_plane(self) -> FakeRegistry:
        """Itself."""
        return self

    def is_healthy(self) -> bool:
        """TorchServe's rule."""
        return self.is_well

    def takes_tensors(self, model: str, version: str | None = None) -> bool:
        """No model declares tensors: each gets the protocol's JSON."""
        return False

    def is_serving(self, model: str) -> bool:
        """As `serving` says."""
        if model not in self.serving:
            raise ModelNotFound(model)
        return self.serving[model]

    def readiness(self) -> Readiness:
        """As `/readyz` says."""
        return Readiness(is_ready=self.is_well, is_started=True, reasons=(), startup_reasons=(), remarks=())


@dataclass
class Book:
    """An access log and a counter of calls, kept for the test."""

    is_on: bool = True
    has_ids: bool = False
    sampling: Sampling | None = None
    lines: list[str] = field(default_factory=list)
    codes: list[str] = field(default_factory=list)

    def write(self, line: str) -> None:
        """A line of the access log."""
        self.lines.append(line)

    def count_call(self, code: str) -> None:
        """A call that has ended."""
        self.codes.append(code)


class Client:
    """Speaks to one listener with the schema's messages."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel

    def method(self, service: str, name: str) -> Any:
        """A method as grpcio's generated code would have it."""
        described = SCHEMA.methods(service)[name]
        request = SCHEMA.message(described.input_type.full_name)
        kinds = {
            (False, False): self.channel.unary_unary,
            (False, True): self.channel.unary_stream,
            (True, True): self.channel.stream_stream,
        }
        made = kinds[described.client_streaming, described.server_streaming](
            f"/{service}/{name}",
            request_serializer=request.SerializeToString,
            response_deserializer=SCHEMA.message(described.output_type.full_name).FromString,
        )
        if described.client_streaming:
            return lambda **options: made(**options)
        return lambda message=None, *, metadata=None, timeout=None, **fields: made(
            message if message is not None else request(**fields), metadata=metadata, timeout=timeout
        )


@asynccontextmanager
async def inference_port(
    registry: Any = None,
    *,
    book: Book | None = None,
    limits: GrpcLimits | None = None,
    authorize: Authorize | None = None,
    identity: Identity | None = None,
    has_open_inference: bool = False,
    is_open_inference_whole: bool = False,
    error_rules: ErrorRules = AS_RECORDED,
    stall_timeout_s: float = 60.0,
    ledger: ByteLedger | None = None,
    request_ids: RequestIds | None = None,
    **control: Any,
) -> AsyncIterator[GrpcListener]:
    """An inference port that accepts calls; stopped in the end. `control` are further options of the port."""
    book = book or Book()
    ports = GrpcPorts(
        registry or FakeRegistry(),
        book,
        book,
        identity=identity,
        error_rules=error_rules,
        stall_timeout_s=stall_timeout_s,
        ledger=ledger,
        request_ids=request_ids,
    )
    listener = ports.bind_inference(
        HERE,
        limits or GrpcLimits(),
        authorize,
        has_open_inference=has_open_inference,
        is_open_inference_whole=is_open_inference_whole,
        **control,
    )
    async with _accepting(listener):
        yield listener


@asynccontextmanager
async def management_port(
    registry: Any, *, enable_model_api: bool = True, control: ServerControl | None = None
) -> AsyncIterator[GrpcListener]:
    """A management port that accepts calls; stopped in the end."""
    book = Book()
    listener = GrpcPorts(registry, book, book).bind_management(
        HERE, GrpcLimits(), enable_model_api=enable_model_api, control=control
    )
    async with _accepting(listener):
        yield listener


@asynccontextmanager
async def _accepting(listener: GrpcListener) -> AsyncIterator[None]:
    await listener.accept()
    try:
        yield
    finally:
        await listener.stop()


@asynccontextmanager
async def client_of(
    listener: GrpcListener, credentials: grpc.ChannelCredentials | None = None, *, most_attempts: int = 1
) -> AsyncIterator[Client]:
    """A client of a listener, whose messages may be of any length.

    With `most_attempts` above 1 gRPC itself tries again what is UNAVAILABLE or INTERNAL, by the channel's retry policy.
    """
    options: list[tuple[str, Any]] = [("grpc.max_receive_message_length", -1)]
    if most_attempts > 1:
        options.append(("grpc.service_config", json.dumps(_retry_policy(most_attempts))))
    if credentials is None:
        channel = grpc.aio.insecure_channel(str(listener.address), options)
    else:
        channel = grpc.aio.secure_channel(str(listener.address), credentials, options)
    async with channel:
        yield Client(channel)


def _retry_policy(most_attempts: int) -> dict[str, Any]:
    policy = {
        "maxAttempts": most_attempts,
        "initialBackoff": "0.01s",
        "maxBackoff": "0.02s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE", "INTERNAL"],
    }
    return {"methodConfig": [{"name": [{}], "retryPolicy": policy}]}


async def pour(job: Submitted, piece: bytes) -> None:
    """Answer pieces whenever the worker is not held, until the job is cancelled.

    A number of pieces would not do: on a busy machine a client's library takes several MB that nobody reads.
    """
    async with asyncio.timeout(30):
        while not job.is_cancelled:
            if not job.is_held:
                job.piece(piece)
            await asyncio.sleep(0.001)


def repeats(field: Any) -> bool:
    """Whether a field may be there many times. Newer versions of protobuf warn of `label`, older ones have no other."""
    return bool(field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED)


async def refusal(call: Any) -> tuple[str, str]:
    """The status and the description of a call that fails."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or ""
    raise AssertionError("the call succeeded")
