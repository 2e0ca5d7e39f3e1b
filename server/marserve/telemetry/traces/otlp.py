"""Sends spans by OpenTelemetry's own exporters. Imported only where traces are sent: extra `otlp`.

The exporters read their own environment variables (endpoint, headers, certificates, time limit, compression). Of the
SDK only the exporters and the classes of their input are used: no global tracer, no thread of its.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.span import TraceState
from opentelemetry.trace.status import Status, StatusCode

from marserve.telemetry.traces.spans import Span

log = logging.getLogger("marserve.traces")

# Of one sending.
MOST_WORDS = 20
_KINDS = {"server": SpanKind.SERVER, "internal": SpanKind.INTERNAL}


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

    def send(self, spans: Sequence[Span]) -> str:
        """Send them; why they were not taken, empty if they were."""
        self._words.take()
        offset_ns = time.time_ns() - time.monotonic_ns()
        readable = [self._readable(span, offset_ns) for span in spans]
        if self._exporter.export(readable) is SpanExportResult.SUCCESS:
            return ""
        # The first one names the cause; the last one says that it was tried for long enough.
        return next(iter(self._words.take()), "the exporter does not say why")

    def close(self) -> None:
        """End a send that tries again, and all further ones."""
        self._exporter.shutdown()

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


def _ns(moment: float, offset_ns: int) -> int:
    return int(moment * 1e9) + offset_ns
