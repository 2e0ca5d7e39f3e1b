"""An endpoint of an object store that answers as a test tells it to, and remembers what it was asked."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[[BaseHTTPRequestHandler], None]
MODIFIED = "Wed, 21 Oct 2015 07:28:00 GMT"


@dataclass(frozen=True)
class Asked:
    """One request."""

    method: str
    target: str
    headers: dict[str, str]


@dataclass
class OddStore:
    """Its address, what it was asked, and how it answers: `answer` may be set anew at any time."""

    url: str
    answer: Answer
    asked: list[Asked] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)


def an_object(data: bytes, etag: str = '"1"', *, ranges: bool = True) -> Answer:
    """The object, or the range of it that is asked for, whatever the request's conditions."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        begin, _, last = handler.headers.get("range", "").removeprefix("bytes=").partition("-")
        part, status = data, 200
        if ranges and begin:
            stop = int(last) + 1 if last else len(data)
            part, status = data[int(begin) : stop], 206
        handler.send_response(status)
        handler.send_header("content-length", str(len(part)))
        handler.send_header("etag", etag)
        handler.send_header("last-modified", MODIFIED)
        if status == 206:
            handler.send_header("content-range", f"bytes {begin}-{int(begin) + len(part) - 1}/{len(data)}")
        handler.end_headers()
        if handler.command == "GET":
            handler.wfile.write(part)

    return answer


def trouble(status: int, code: str = "", more: str = "") -> Answer:
    """A status with S3's document of an error."""
    body = f"<Error><Code>{code}</Code><Message>m</Message>{more}</Error>".encode() if code else b""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("content-length", str(len(body)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(body)

    return answer


@contextmanager
def odd_store(answer: Answer, tls: ssl.SSLContext | None = None) -> Iterator[OddStore]:
    """A server on a port of this machine that the system gave, while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            self.rfile.read(length)
            headers = {name.lower(): value for name, value in self.headers.items()}
            store.asked.append(Asked(self.command, self.path, headers))
            self.close_connection = True
            store.answer(self)

        def end_headers(self) -> None:
            # Said, so that no client sends its next request into a connection that is about to end.
            self.send_header("connection", "close")
            super().end_headers()

        do_GET = do_HEAD = do_PUT = do_POST = _answer

        def log_message(self, format: str, *arguments: object) -> None:
            """Say nothing."""

    class Quiet(ThreadingHTTPServer):
        daemon_threads = False

        def handle_error(self, request: object, client_address: object) -> None:
            """Clients that hang up are what some tests are about."""

    server = Quiet(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    port = server.server_address[1]
    store = OddStore(f"{'http' if tls is None else 'https'}://127.0.0.1:{port}", answer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield store
    finally:
        store.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()
