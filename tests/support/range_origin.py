"""A web server as object stores are: objects with strong ETags, read in ranges, over connections that stay open."""

from __future__ import annotations

import functools
import hashlib
import re
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class RangeOrigin:
    """Its address and objects, by path, and what it was asked: method, path and range of each request."""

    url: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    connections: int = 0
    has_etags: bool = True
    has_ranges: bool = True
    redirects: dict[str, str] = field(default_factory=dict)
    on_range: Callable[[int], None] = lambda begin: None
    """Called with the first byte of each range that is asked for, once its answer is settled; one at a time."""

    @property
    def pattern(self) -> str:
        """A pattern of allowed_urls that lets everything of it through."""
        return re.escape(self.url) + "/.*"

    def put(self, path: str, data: bytes) -> str:
        """Have an object from now on; returns its URL."""
        self.objects[path] = data
        return self.url + path

    def etag(self, path: str) -> str:
        """The ETag of an object."""
        return etag_of(self.objects[path])


@functools.lru_cache(maxsize=4)
def etag_of(data: bytes) -> str:
    """A strong ETag of these bytes; made once, since bytes remember their hash."""
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


@contextmanager
def range_origin(tls: ssl.SSLContext | None = None) -> Iterator[RangeOrigin]:
    """A server on a port of this machine that the system gave, while the block runs; with `tls`, of https."""
    origin = RangeOrigin()
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def setup(self) -> None:
            with lock:
                origin.connections += 1
            super().setup()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", ""))
            with lock:
                origin.asked.append((self.command, self.path, self.headers.get("range", "")))
                data = origin.objects.get(path)
                if found is not None:
                    origin.on_range(int(found[1]))
            if path in origin.redirects:
                self._head(302, 0, location=origin.redirects[path])
                return
            if data is None:
                self._head(404, 0)
                return
            etag = etag_of(data) if origin.has_etags else ""  # of these bytes, whatever has been put there since
            condition = self.headers.get("if-range")
            if found is None or not origin.has_ranges or (condition is not None and condition != etag):
                self._head(200, len(data), etag)
                self.wfile.write(data)
                return
            begin = int(found[1])
            end = min(int(found[2]) + 1 if found[2] else len(data), len(data))
            if begin >= len(data):
                self._head(416, 0, etag, f"bytes */{len(data)}")
                return
            self._head(206, end - begin, etag, f"bytes {begin}-{end - 1}/{len(data)}")
            self.wfile.write(memoryview(data)[begin:end])

        def do_HEAD(self) -> None:
            with lock:
                origin.asked.append((self.command, self.path, ""))
            self._head(403, 0)  # as presigned addresses of a GET answer

        def _head(self, code: int, length: int, etag: str = "", content_range: str = "", location: str = "") -> None:
            self.send_response(code)
            self.send_header("content-length", str(length))
            if etag:
                self.send_header("etag", etag)
            if content_range:
                self.send_header("content-range", content_range)
            if location:
                self.send_header("location", location)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True  # connections that are kept open end with the test that keeps them
    server.handle_error = lambda request, client_address: None  # type: ignore[method-assign]
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    origin.url = f"http{'s' if tls else ''}://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield origin
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
