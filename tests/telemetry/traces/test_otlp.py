"""OpenTelemetry's exporter against collectors that answer oddly: no key goes elsewhere, no body is read."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from marserve.telemetry.happenings import Happening
from marserve.telemetry.traces.otlp import OtlpSender
from marserve.telemetry.traces.spans import spans_of

SPANS = spans_of(Happening("load", 1.0, 2.0, "m", "1", "loaded"))


@contextlib.contextmanager
def collector(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[BaseHTTPRequestHandler], object]
) -> Iterator[OtlpSender]:
    """A sender to one that answers so."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            with contextlib.suppress(OSError):
                answer(self)

        def log_message(self, format: str, *given: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "OTEL_EXPORTER_OTLP_HEADERS": "x-api-key=s3cret",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "5",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    sender = OtlpSender("http/protobuf", "1", environment)
    try:
        yield sender
    finally:
        sender.close()
        server.shutdown()
        thread.join()
        # Its connections' threads may wait for a client that has gone.
        server.socket.close()


def test_a_redirect_is_a_failure_that_names_the_address_and_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys in headers would go to another host, and nothing was taken."""
    paths = []

    def redirect(call: BaseHTTPRequestHandler) -> None:
        paths.append(call.path)
        call.send_response(307)
        call.send_header("location", "/elsewhere")
        call.send_header("content-length", "0")
        call.end_headers()

    with collector(monkeypatch, redirect) as sender:
        why = sender.send(SPANS)
    assert "status 307, it redirects to '/elsewhere', which is not followed" in why
    assert paths == ["/v1/traces"]


def test_the_body_of_an_answer_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have no end, and come a byte at a time."""
    ended = threading.Event()

    def go_on(call: BaseHTTPRequestHandler) -> None:
        call.send_response(200)
        call.end_headers()
        try:
            for _ in range(10_000):
                call.wfile.write(b"x" * 65536)
        finally:
            ended.set()

    with collector(monkeypatch, go_on) as sender:
        began = time.monotonic()
        assert sender.send(SPANS) == ""
        assert time.monotonic() - began < 4.0
        assert ended.wait(10)


def test_a_connection_is_used_again_after_an_answer_without_a_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector is sent to every second, mostly over TLS."""
    clients = []

    def take(call: BaseHTTPRequestHandler) -> None:
        clients.append(call.client_address)
        call.send_response(200)
        call.send_header("content-length", "0")
        call.end_headers()

    with collector(monkeypatch, take) as sender:
        assert [sender.send(SPANS) for _ in range(3)] == [""] * 3
    assert len(set(clients)) == 1


def test_the_cause_of_a_failure_is_said_and_not_how_often_it_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exporter's last words are of its time limit."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")

    assert "refused" in OtlpSender("http/protobuf", "1", {}).send(SPANS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "a b c"),
        ("OTEL_RESOURCE_ATTRIBUTES", "no pair"),
    ],
)
def test_a_variable_that_the_library_cannot_read_is_warned_of_or_raised(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The library before 1.45 raises, and the start tells of it. Its own logger is silent here."""
    monkeypatch.setenv(name, value)

    try:
        OtlpSender("http/protobuf", "1", {})
    except ValueError as error:
        warning = str(error)
    else:
        [warning] = [record.getMessage() for record in caplog.records if record.name == "marserve.traces"]

    assert value in warning
