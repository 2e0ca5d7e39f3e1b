"""Calls over gRPC, many at a time on one connection; grpcio has to be installed.

Messages are made before the load and answers are not read, so that a call costs this machine what grpcio costs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import grpc
import grpc.aio

from marserve.tuning.load import Line, Reason, Tally
from marserve.tuning.payloads import Payload

_OPTIONS: Final = (
    ("grpc.use_local_subchannel_pool", 1),  # a baseline at the same address has a connection of its own
    ("grpc.enable_retries", 0),  # a call that was tried again would be timed as one
    ("grpc.enable_http_proxy", 0),  # a proxy would be measured, too
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)
# Statuses that grpcio itself gives a call without an answer, with words of these.
_OF_GRPCIO: Final = {
    grpc.StatusCode.UNAVAILABLE: re.compile(
        "connect|socket closed|stream removed|recvmsg|goaway|reset|broken pipe|resolution|endpoint|transport|keepalive",
        re.IGNORECASE,
    ),
    grpc.StatusCode.DEADLINE_EXCEEDED: re.compile("deadline exceeded", re.IGNORECASE),
}


class Call(NamedTuple):
    """A call: its method's path, and the message as bytes."""

    path: str
    message: bytes


@dataclass(frozen=True, slots=True)
class GrpcTarget:
    """Where calls go, `HOST:PORT`, and how a payload becomes one.

    `roots` are the certificates that are trusted, as PEM; None: no TLS. `name` is what the server's has to be for, the
    host if it is empty. `metadata` go with each call.
    """

    address: str
    call_of: Callable[[Payload], Call]
    roots: bytes | None = None
    name: str = ""
    metadata: tuple[tuple[str, str], ...] = ()

    def line(self, payloads: Sequence[Payload], timeout_s: float) -> GrpcLine:
        """A connection that sends these."""
        return GrpcLine(self, payloads, timeout_s)

    def channel(self, module: Any = grpc) -> Any:
        """A channel of `grpc`, or of `grpc.aio`."""
        options = [*_OPTIONS, *([("grpc.ssl_target_name_override", self.name)] if self.name else [])]
        if self.roots is None:
            return module.insecure_channel(self.address, options=options)
        return module.secure_channel(self.address, grpc.ssl_channel_credentials(self.roots), options=options)


class GrpcLine(Line):
    """One connection, which is opened with the first call."""

    def __init__(self, target: GrpcTarget, payloads: Sequence[Payload], timeout_s: float) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._calls = [target.call_of(payload) for payload in payloads]
        self._channel: Any = None
        self._ask: list[Any] = []

    def _connect(self) -> None:
        self._channel = self._target.channel(grpc.aio)
        by_path = {call.path: self._channel.unary_unary(call.path) for call in self._calls}
        self._ask = [by_path[call.path] for call in self._calls]

    async def ask(self, number: int, due: float | None, tally: Tally) -> None:
        """See `Line.ask`."""
        if self._channel is None:
            self._connect()
        place = number % len(self._calls)
        tally.sent += 1
        begun = time.perf_counter() if due is None else due
        try:
            await self._ask[place](
                self._calls[place].message, timeout=self._timeout_s, metadata=self._target.metadata or None
            )
        except grpc.aio.AioRpcError as error:
            reason = reason_of(error, self._timeout_s)
            tally.fail(reason, error.details() or "")
        else:
            tally.answer(time.perf_counter() - begun)

    async def close(self) -> None:
        """Close the connection."""
        if self._channel is not None:
            await self._channel.close()
            self._channel = None


class Failed(NamedTuple):
    """A call that failed: its method, the name of the status, the words beside it, and whether the server gave it."""

    method: str
    code: str
    details: str
    is_answer: bool


def call_once(target: GrpcTarget, payload: Payload, timeout_s: float) -> Failed | None:
    """Send one call on a connection of its own. Returns how it failed, if it did."""
    path, message = target.call_of(payload)
    with target.channel() as channel:
        try:
            channel.unary_unary(path)(message, timeout=timeout_s, metadata=target.metadata or None)
        except grpc.RpcError as error:
            failed: Any = error
            return Failed(path.rpartition("/")[2], failed.code().name, failed.details() or "", is_answer(failed))
    return None


def is_answer(error: Any) -> bool:
    """Whether a server answered with this status, and grpcio did not make it for want of an answer.

    Servers may send something behind a status, as marserve does; grpcio has nothing there.
    """
    words = _OF_GRPCIO.get(error.code())
    return bool(error.trailing_metadata()) or words is None or not words.search(error.details() or "")


def reason_of(error: Any, timeout_s: float) -> Reason:
    """Why a call failed: the status that the server gave, else why there was no answer."""
    details = error.details() or ""
    if is_answer(error):
        given = dict(error.trailing_metadata() or ())
        return Reason(error.code().name, str(given.get("x-marserve-cause", "no reason given")))
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Reason(None, f"no answer within {timeout_s:g} s")
    if "Connection refused" in details:
        return Reason(None, "connection refused")
    return Reason(None, "no gRPC" if "Failed parsing HTTP/2" in details else "the connection broke")
