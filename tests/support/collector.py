"""A stand-in for a collector of OpenTelemetry: takes OTLP over HTTP or gRPC from real sockets, and decodes it."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from support.server import poll


@dataclass
class Received:
    """A span as it came; ids in hexadecimal digits, times in seconds since the epoch."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    began: float
    ended: float
    attributes: dict[str, Any]
    links: list[tuple[str, str]]
    is_error: bool
    message: str
    state: str
    resource: dict[str, Any] = field(repr=False)


class Collector:
    """Listens while the block runs. `holds`: calls are answered when that is set, if at all; `status` is the answer's.

    `protocol` is `http/protobuf` or `grpc`.
    """

    def __init__(
        self, protocol: str = "http/protobuf", status: int = 200, holds: threading.Event | None = None
    ) -> None:
        self.spans: list[Received] = []
        self.was_asked = threading.Event()
        self.status = status
        self._holds = holds
        self._protocol = protocol
        self._stop: Callable[[], Any]
        self.endpoint = ""

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which a server finds it, and sends to it soon."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.endpoint,
            "OTEL_EXPORTER_OTLP_PROTOCOL": self._protocol,
            "OTEL_BSP_SCHEDULE_DELAY": "50",
            "OTEL_SERVICE_NAME": "under-test",
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=tests",
        }

    def __enter__(self) -> Collector:
        if self._protocol == "grpc":
            self._serve_grpc()
        else:
            self._serve_http()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._holds is not None:
            self._holds.set()
        self._stop()

    def _serve_http(self) -> None:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.path == "/v1/traces"
                assert self.headers["content-type"] == "application/x-protobuf"
                collector._take(ExportTraceServiceRequest.FromString(body))
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *given: Any) -> None:
                """Nothing."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()

        def stop() -> None:
            server.shutdown()
            thread.join()
            server.server_close()

        self._stop = stop

    def _serve_grpc(self) -> None:
        def export(request: Any, context: Any) -> Any:
            self._take(request)
            return ExportTraceServiceResponse()

        server = grpc.server(ThreadPoolExecutor(2))
        handler = grpc.unary_unary_rpc_method_handler(
            export, ExportTraceServiceRequest.FromString, ExportTraceServiceResponse.SerializeToString
        )
        name = "opentelemetry.proto.collector.trace.v1.TraceService"
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {"Export": handler}),))
        self.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        self._stop = lambda: server.stop(None).wait()

    def _take(self, message: Any) -> None:
        self.was_asked.set()
        if self._holds is not None:
            self._holds.wait(60)
        for of_resource in message.resource_spans:
            resource = _attributes(of_resource.resource.attributes)
            for of_scope in of_resource.scope_spans:
                assert of_scope.scope.name == "marserve"
                self.spans += [_read(span, resource) for span in of_scope.spans]

    def wait_for(self, is_so: Callable[[list[Received]], bool], limit_s: float = 10.0) -> list[Received]:
        """All spans, once they are as they should be."""
        for _ in poll(limit_s, f"not among {[each.name for each in self.spans]}"):
            if is_so(self.spans):
                break
        return list(self.spans)

    def of_request(self, request_id: str) -> list[Received]:
        """The spans of a request's trace, the first one the request's own."""

        def find(spans: list[Received]) -> Received | None:
            return next((each for each in spans if each.attributes.get("marserve.request.id") == request_id), None)

        self.wait_for(lambda spans: find(spans) is not None)
        root = find(self.spans)
        assert root is not None
        return [root, *(each for each in self.spans if each.trace_id == root.trace_id and each is not root)]


def _read(span: Any, resource: dict[str, Any]) -> Received:
    return Received(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano / 1e9,
        span.end_time_unix_nano / 1e9,
        _attributes(span.attributes),
        [(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        span.status.code == 2,
        span.status.message,
        span.trace_state,
        resource,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
