"""A gRPC port with methods that a test commands, without services, keys and logs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from marserve.api.byte_ledger import UNBOUNDED, ByteLedger
from marserve.api.grpc.transport.limits import GrpcLimits
from marserve.api.grpc.transport.port import Port
from marserve.api.grpc.transport.status import StatusCode
from marserve.api.grpc.transport.stream import Method, Refused, Stream
from marserve.api.sockets import bind
from support.http2_client import Http2Client, http2_client


@dataclass
class House:
    """A port's methods: `Echo`, `Never`, `Large` answer one message, `Drip` writes many, `Talk` is a dialogue."""

    limits: GrpcLimits = field(default_factory=GrpcLimits)
    ledger: ByteLedger = field(default_factory=lambda: ByteLedger(UNBOUNDED))
    begun: list[Stream] = field(default_factory=list)
    over: list[int] = field(default_factory=list)
    cancelled: int = 0
    written: int = 0
    may_read: asyncio.Event = field(default_factory=asyncio.Event)
    port: Port = field(init=False)
    number: int = field(init=False)

    def __post_init__(self) -> None:
        """Bind it."""
        sock = bind("127.0.0.1", 0)
        self.number = sock.getsockname()[1]
        methods = {
            "house.Service/Echo": Method(self._echo),
            "house.Service/Never": Method(self._never),
            "house.Service/Large": Method(self._large),
            "house.Service/Drip": Method(self._drip),
            "house.Service/Talk": Method(self._talk, is_dialogue=True),
            "house.Service/Broken": Method(self._broken),
        }
        self.port = Port(sock, methods, Method(self._unknown, is_dialogue=True), self.limits, self.ledger)

    def client(self) -> contextlib.AbstractAsyncContextManager[Http2Client]:
        """A client of it."""
        return http2_client("127.0.0.1", self.number)

    def _begin(self, stream: Stream) -> None:
        self.begun.append(stream)
        stream.when_over(lambda: self.over.append(stream.number))

    async def _echo(self, stream: Stream) -> bytes:
        self._begin(stream)
        try:
            return stream.only_message().data
        except Exception as error:
            raise Refused(StatusCode.INVALID_ARGUMENT, str(error)) from None

    async def _never(self, stream: Stream) -> bytes:
        self._begin(stream)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return b""

    async def _large(self, stream: Stream) -> bytes:
        self._begin(stream)
        return b"y" * int(stream.only_message().data)

    async def _drip(self, stream: Stream) -> None:
        self._begin(stream)
        for _ in range(int(stream.only_message().data)):
            await stream.write(b"d" * 10_000)
            self.written += 1

    async def _talk(self, stream: Stream) -> None:
        self._begin(stream)
        await self.may_read.wait()
        while (came := await stream.read()) is not None:
            await stream.write(came.data)

    async def _broken(self, stream: Stream) -> bytes:
        self._begin(stream)
        raise ZeroDivisionError

    async def _unknown(self, stream: Stream) -> None:
        raise Refused(StatusCode.UNIMPLEMENTED, f"no {stream.path}")


@contextlib.asynccontextmanager
async def house(limits: GrpcLimits | None = None, ledger: ByteLedger | None = None) -> AsyncIterator[House]:
    """A port that accepts calls; nothing of them is left in the end."""
    made = House(limits or GrpcLimits(), ledger or ByteLedger(UNBOUNDED))
    made.may_read.set()
    await made.port.accept()
    try:
        yield made
    finally:
        await made.port.cut()
        assert made.port.open_calls == 0
        assert sorted(made.over) == sorted(stream.number for stream in made.begun)
        held = made.ledger.figures()
        assert set(held.values()) == {0}, held
