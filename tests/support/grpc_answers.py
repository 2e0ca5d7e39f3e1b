"""A stand-in for a gRPC server: grpcio's own, which answers every method as it is told and notes what it was asked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import grpc

ANSWER = b"\x0a\x02ok"
MOST_AT_ONCE = 32


class Call(NamedTuple):
    """A call as it arrived: the method's path, its message, its metadata, how much time it has left in seconds."""

    method: str
    message: bytes
    metadata: dict[str, str]
    left_s: float | None


Refusal = tuple[grpc.StatusCode, str, Sequence[tuple[str, str]]]


@dataclass
class GrpcAnswers:
    """The server's port, what it was asked, and what it does: `refuse` gives the status of a call, None for none."""

    port: int = 0
    asked: list[Call] = field(default_factory=list)
    refuse: Callable[[Call], Refusal | None] = lambda call: None
    stopped: threading.Event = field(default_factory=threading.Event)
    server: Any = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def stop(self) -> None:
        """End it: calls under way break, and its port is closed."""
        self.server.stop(None).wait()
        self.stopped.set()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        """The method of this name; there is every one."""

        def answer(message: bytes, context: Any) -> bytes:
            metadata = dict(context.invocation_metadata())
            call = Call(details.method, message, metadata, context.time_remaining())
            with self._lock:
                self.asked.append(call)
            if (refusal := self.refuse(call)) is not None:
                code, said, trailing = refusal
                context.set_trailing_metadata(tuple(trailing))
                context.abort(code, said)
            return ANSWER

        return grpc.unary_unary_rpc_method_handler(answer)


class _EveryMethod(grpc.GenericRpcHandler):
    def __init__(self, answers: GrpcAnswers) -> None:
        self._answers = answers

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return self._answers.service(handler_call_details)


@contextmanager
def grpc_answers(identity: grpc.ServerCredentials | None = None) -> Iterator[GrpcAnswers]:
    """Runs it on a port of its own, with TLS if it has an identity."""
    answers = GrpcAnswers()
    with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
        server = grpc.server(pool, handlers=[_EveryMethod(answers)], options=[("grpc.so_reuseport", 0)])
        address = "127.0.0.1:0"
        answers.port = (
            server.add_insecure_port(address) if identity is None else server.add_secure_port(address, identity)
        )
        answers.server = server
        server.start()
        try:
            yield answers
        finally:
            answers.stop()
