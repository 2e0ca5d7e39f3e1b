"""The message that our spans are sent in, beside the one that OpenTelemetry's own encoder makes of them."""

from __future__ import annotations

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from marserve.telemetry.trace_context import SAMPLED, Trace
from marserve.telemetry.traces.otlp import OtlpSender, take_made
from marserve.telemetry.traces.spans import Span

IDS = "4bf92f3577b34da6a3ce929d0e0e4736" + "00f067aa0ba902b7" + "b7ad6b7169203331"
HERE = Trace(IDS, SAMPLED, what="POST /predictions/echo HTTP/1.1")
BELOW = Trace(IDS, 0, "53995c3f42cd8ad8", True, "vendor=a,other=b", "POST /predictions/echo HTTP/1.1")
SPANS = [
    Span("POST /predictions/{model_name}", HERE, HERE.span_id, "", 1.0, 2.5, "server"),
    Span("POST /predictions/{model_name}", BELOW, BELOW.span_id, BELOW.parent_id, 1.0, 2.5, "server", error="queue"),
    Span("queue", BELOW, "0000000000000001", BELOW.span_id, 1.25, 1.5),
    Span(
        "handle",
        HERE,
        HERE.handle_id,
        HERE.span_id,
        1.5,
        2.0,
        attributes={"text": "é", "empty": "", "whole": -7, "none": 0, "part": 0.25, "yes": True, "no": False},
        links=[(BELOW.trace_id, "00000000000000ff"), (HERE.trace_id, HERE.span_id)],
        events=[("first_piece", 1.75)],
    ),
]


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_the_message_is_the_one_that_the_library_makes(protocol: str) -> None:
    """Ours is only made in less time: ids, parents, flags, states, attributes, links, events, errors are the same."""
    if protocol == "grpc":
        pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")
    sender = OtlpSender(protocol, "1.0", {})

    try:
        ours = sender.message(SPANS, 1_700_000_000_000_000_000)

        assert ours == sender.encoded_by_library(SPANS, 1_700_000_000_000_000_000)
        assert len(ours.resource_spans[0].scope_spans[0].spans) == len(SPANS)
    finally:
        sender.close()


def test_an_exporter_without_a_place_for_it_gets_the_librarys_spans() -> None:
    """A version of the library that encodes elsewhere is sent its own classes, as before."""
    assert take_made(object()) is False
