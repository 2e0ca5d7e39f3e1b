"""A web server that behaves as a test tells it to: each path has a list of answers, of which the last one stays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[[BaseHTTPRequestHandler], None]


@dataclass
class FileServer:
    """The server's address, and what it was asked: pairs of path and headers."""

    url: str = ""
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)
    _answers: dict[str, list[Answer]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def on(self, path: str, *answers: Answer) -> str:
        """Answer this path so from now on; returns its URL."""
        self._answers[path] = list(answers)
        return self.url + path

    def take(self, path: str, headers: dict[str, str]) -> Answer | None:
        """The next answer for a path."""
        with self._lock:
            self.asked.append((path, headers))
            answers = self._answers.get(path)
            return None if not answers else answers.pop(0) if len(answers) > 1 else answers[0]


@contextmanager
def file_server() -> Iterator[FileServer]:
    """A server on a port of this machine that the system gave, while the block runs."""
    files = FileServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answer = files.take(self.path, {name.lower(): value for name, value in self.headers.items()})
            self.close_connection = True
            if answer is None:
                status(404)(self)
            else:
                answer(self)

        def log_message(self, format: str, *arguments: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False
    files.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield files
    finally:
        files.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


def whole(data: bytes, etag: str = "") -> Answer:
    """All of it; or, where it is asked for with the right ETag, from where the other side left off."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        begin = handler.headers.get("range", "").removeprefix("bytes=").partition("-")[0]
        if begin and etag and handler.headers.get("if-range") == etag:
            _head(handler, 206, len(data) - int(begin), etag, f"bytes {begin}-{len(data) - 1}/{len(data)}")
            handler.wfile.write(data[int(begin) :])
        else:
            _head(handler, 200, len(data), etag)
            handler.wfile.write(data)

    return answer


def cut(data: bytes, at: int, etag: str = "") -> Answer:
    """So many bytes of what was announced, and then the end."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        _head(handler, 200, len(data), etag)
        handler.wfile.write(data[:at])

    return answer


def status(code: int, **headers: str) -> Answer:
    """A status without a body."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("content-length", "0")
        handler.end_headers()

    return answer


def _head(handler: BaseHTTPRequestHandler, code: int, length: int, etag: str, content_range: str = "") -> None:
    handler.send_response(code)
    handler.send_header("content-length", str(length))
    if etag:
        handler.send_header("etag", etag)
    if content_range:
        handler.send_header("content-range", content_range)
    handler.end_headers()
