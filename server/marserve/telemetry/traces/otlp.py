"""Sends spans by OpenTelemetry's own exporters. Imported only where traces are sent: extra `otlp`.

The exporters read their own environment variables (endpoint, headers, certificates, time limit, compression). Of the
SDK only the exporters and the classes of their input are used: no global tracer, no thread of its.

The exporters' message is made here of our spans: by the SDK's classes and the library's encoder it takes six times as
long, which at hundreds of traces a second is a tenth of a processor. Both make the same message, as a test holds, and
where a version of the library has no place to put ours, it makes its own.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.span import TraceState
from opentelemetry.trace.status import Status, StatusCode

from marserve.telemetry.trace_context import Trace
from marserve.telemetry.traces.spans import Span

log = logging.getLogger("marserve.traces")

# Of one sending.
MOST_WORDS = 20
_KINDS = {"server": SpanKind.SERVER, "internal": SpanKind.INTERNAL}
_VALUES: Final = {str: "string_value", bool: "bool_value", int: "int_value", float: "double_value"}
_UNSET: Final = trace_pb2.Status()
_ERROR: Final = trace_pb2.Status.STATUS_CODE_ERROR
_ENCODED_KINDS: Final = {"server": trace_pb2.Span.SPAN_KIND_SERVER, "internal": trace_pb2.Span.SPAN_KIND_INTERNAL}


class _Words(logging.Handler):
    """Keeps what the exporter complains of, so that the log has one line about it and not one for each try."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        if len(self._texts) < MOST_WORDS:
            self._texts.append(record.getMessage())

    def take(self) -> list[str]:
        """What came since this was last called."""
        texts, self._texts = self._texts, []
        return texts


class _OneResource(Resource):
    """Equal only to itself: the encoder groups spans by it, and the library's hash writes it out as JSON each time."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


class Made(list[None]):
    """Stands for so many spans before an exporter; `message` is what it is to send."""

    def __init__(self, message: ExportTraceServiceRequest, count: int) -> None:
        super().__init__([None] * count)
        self.message = message


def take_made(exporter: Any) -> bool:
    """Have the exporter's encoder take `Made`, too; False if there is no such place. All else it encodes as before."""
    module = sys.modules[type(exporter).__module__]
    encode: Any = getattr(module, "encode_spans", None)
    if encode is None:
        return False
    if not getattr(encode, "takes_made", False):

        def encode_spans(spans: Any) -> Any:
            return spans.message if isinstance(spans, Made) else encode(spans)

        encode_spans.takes_made = True  # type: ignore[attr-defined]  # a mark for the next call
        module.encode_spans = encode_spans  # type: ignore[attr-defined]  # it has one
    return True


class OtlpSender:
    """Sends to the collector that OpenTelemetry's variables name. `protocol` is `http/protobuf` or `grpc`.

    Raises what the libraries raise: ImportError and others for a package that cannot be used, ValueError and others for
    a variable that cannot be read.
    """

    def __init__(self, protocol: str, version: str, environment: Mapping[str, str]) -> None:
        self._words = _Words()
        logger = logging.getLogger("opentelemetry")
        logger.addHandler(self._words)
        logger.propagate = False
        exporter: Any
        # Here, since only one of them is needed, and the other may not be installed.
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

            exporter = GrpcExporter()
        else:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

            exporter = HttpExporter(session=_bounded_session())
        self._exporter = exporter
        resource = Resource.create({})
        if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "marserve"}))
        own = {"service.version": version, "service.instance.id": f"{socket.gethostname()}:{os.getpid()}"}
        merged = Resource(own).merge(resource)
        for text in dict.fromkeys(self._words.take()):
            log.warning("OpenTelemetry: %s", text)
        self._resource = _OneResource(merged.attributes, merged.schema_url)
        self._scope = InstrumentationScope("marserve", version)
        self._takes_made = take_made(exporter)
        # Resource and scope are the same in each message.
        sample = Span("", Trace("0" * 64, 0), "0" * 16, "", 0.0, 0.0)
        self._empty = encode_spans([self._readable(sample, 0)])
        del self._empty.resource_spans[0].scope_spans[0].spans[:]

    def send(self, spans: Sequence[Span]) -> str:
        """Send them; why they were not taken, empty if they were."""
        self._words.take()
        offset_ns = time.time_ns() - time.monotonic_ns()
        if self._exporter.export(self._made(spans, offset_ns)) is SpanExportResult.SUCCESS:
            return ""
        # The first one names the cause; the last one says that it was tried for long enough.
        return next(iter(self._words.take()), "the exporter does not say why")

    def close(self) -> None:
        """End a send that tries again, and all further ones."""
        self._exporter.shutdown()

    def _made(self, spans: Sequence[Span], offset_ns: int) -> Sequence[ReadableSpan | None]:
        if self._takes_made:
            return Made(self.message(spans, offset_ns), len(spans))
        return [self._readable(span, offset_ns) for span in spans]

    def message(self, spans: Sequence[Span], offset_ns: int) -> ExportTraceServiceRequest:
        """What the library's encoder makes of these spans. `offset_ns` is from monotonic time to the epoch's."""
        message = ExportTraceServiceRequest()
        message.CopyFrom(self._empty)
        into = message.resource_spans[0].scope_spans[0].spans
        for span in spans:
            _encode(into, span, offset_ns)
        return message

    def encoded_by_library(self, spans: Sequence[Span], offset_ns: int) -> ExportTraceServiceRequest:
        """The same by the library."""
        return encode_spans([self._readable(span, offset_ns) for span in spans])

    def _readable(self, span: Span, offset_ns: int) -> ReadableSpan:
        trace = span.trace
        state = TraceState.from_header([trace.state]) if trace.state else None
        trace_id = int(trace.trace_id, 16)
        # Whatever its caller's flag: a span that is sent is kept.
        flags = TraceFlags(trace.flags | TraceFlags.SAMPLED)
        parent = None
        if span.parent_id:
            is_remote = trace.is_remote and span.span_id == trace.span_id
            parent = SpanContext(trace_id, int(span.parent_id, 16), is_remote, flags, state)
        return ReadableSpan(
            span.name,
            SpanContext(trace_id, int(span.span_id, 16), False, flags, state),
            parent,
            self._resource,
            span.attributes,
            [Event(name, timestamp=_ns(at, offset_ns)) for name, at in span.events],
            [
                Link(SpanContext(int(linked, 16), int(span_id, 16), False, TraceFlags(TraceFlags.SAMPLED)))
                for linked, span_id in span.links
            ],
            _KINDS[span.kind],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=_ns(span.began, offset_ns),
            end_time=_ns(span.ended, offset_ns),
            instrumentation_scope=self._scope,
        )


def _bounded_session() -> Any:
    """The connections to a collector; None for those of a credential provider that the environment names.

    The exporters would read an answer's body to its end, however long, and versions differ about redirects: some send
    keys to another host, others take a redirect for success.
    """
    if any("OTLP_HTTP" in name and name.endswith("_CREDENTIAL_PROVIDER") for name in os.environ):
        return None
    # The exporter's own library.
    from requests import Response, Session
    from requests.exceptions import TooManyRedirects

    def check(response: Response, **how: Any) -> None:
        if 300 <= response.status_code < 400:
            response.close()
            place = response.headers.get("location", "nowhere")[:200]
            raise TooManyRedirects(f"status {response.status_code}, it redirects to {place!r}, which is not followed")
        # The body says nothing that is used. Only the connection of an answer without one is used again.
        if response.headers.get("content-length") == "0":
            _ = response.content
        response.close()

    session = Session()
    session.stream = True
    session.hooks["response"].append(check)
    return session


def _encode(into: Any, span: Span, offset_ns: int) -> None:
    """Add a span to a message's. Only what it has is named: each word costs, and most spans are a stage alone."""
    trace = span.trace
    flags: int = trace_pb2.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
    if span.parent_id and trace.is_remote and span.span_id == trace.span_id:
        flags |= trace_pb2.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK
    made = into.add(
        trace_id=bytes.fromhex(trace.trace_id),
        span_id=bytes.fromhex(span.span_id),
        trace_state=trace.state,
        parent_span_id=bytes.fromhex(span.parent_id),
        name=span.name,
        kind=_ENCODED_KINDS[span.kind],
        start_time_unix_nano=_ns(span.began, offset_ns),
        end_time_unix_nano=_ns(span.ended, offset_ns),
        status=_UNSET if not span.error else trace_pb2.Status(code=_ERROR, message=span.error),
        flags=flags,
    )
    for key, value in span.attributes.items():
        made.attributes.add(key=key, value={_VALUES[type(value)]: value})
    for name, at in span.events:
        made.events.add(name=name, time_unix_nano=_ns(at, offset_ns))
    for linked, span_id in span.links:
        made.links.add(
            trace_id=bytes.fromhex(linked),
            span_id=bytes.fromhex(span_id),
            flags=trace_pb2.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK,
        )


def _ns(moment: float, offset_ns: int) -> int:
    return int(moment * 1e9) + offset_ns
