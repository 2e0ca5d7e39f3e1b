"""A proxy before an origin that does to answers what networks and stores do: late, cut, corrupt, hidden, replaced.

It speaks HTTP/1.1 both ways and passes every method, header and body on, so that clients of object stores work through
it. What it does to which answer, rules say; a request that no rule fits is passed on as it is.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Fault:
    """What is done to one answer. All may come together, in this order.

    `delay_s`: how long nothing comes. `status`: answered in the origin's place (503; 404 hides an object). `etag`: in
    the place of the origin's. `corrupt_at`: the byte of the body, counted from 0, that comes with its bits turned.
    `cut_at`: after so many bytes of the body the connection ends; with `reset` by RST. `stall_at`: after so many
    nothing comes any more until the proxy ends. `bytes_per_s`: how fast the body comes. `without_range`: the origin is
    asked for the whole.
    """

    delay_s: float = 0.0
    status: int = 0
    etag: str = ""
    corrupt_at: int = -1
    cut_at: int = -1
    reset: bool = False
    stall_at: int = -1
    bytes_per_s: float = 0.0
    without_range: bool = False


@dataclass
class _Rule:
    fault: Fault
    path: re.Pattern[str]
    begin: int | None
    left: float


@dataclass
class FaultProxy:
    """Its address, and how many answers it did something to."""

    url: str = ""
    origin: str = ""
    faults: int = 0
    busy: int = 0
    most_busy: int = 0
    most_allowed: int = 1_000_000
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)
    _rules: list[_Rule] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def pattern(self) -> str:
        """A pattern of allowed_urls that lets everything behind it through."""
        return re.escape(self.url) + "/.*"

    def on(self, fault: Fault, *, path: str = ".*", begin: int | None = None, times: float = 1) -> None:
        """Do this to the next `times` requests whose path fits (and whose range begins at `begin`)."""
        with self._lock:
            self._rules.append(_Rule(fault, re.compile(path), begin, times))

    def clear(self) -> None:
        """Pass everything on from now on."""
        with self._lock:
            self._rules.clear()

    def take(self, method: str, path: str, asked_range: str) -> Fault:
        """What is done to this request."""
        found = re.match(r"bytes=(\d+)", asked_range)
        begin = int(found[1]) if found else 0
        with self._lock:
            self.asked.append((method, path, asked_range))
            for rule in self._rules:
                if rule.left >= 1 and rule.path.search(path) and rule.begin in (None, begin):
                    rule.left -= 1
                    self.faults += 1
                    return rule.fault
        return Fault()

    def enter(self) -> bool:
        """One more request is answered now; says whether there may be so many."""
        with self._lock:
            if self.busy >= self.most_allowed:
                return False
            self.busy += 1
            self.most_busy = max(self.most_busy, self.busy)
            return True

    def leave(self) -> None:
        """It is answered."""
        with self._lock:
            self.busy -= 1


@contextmanager
def fault_proxy(origin: str) -> Iterator[FaultProxy]:
    """A proxy on a port that the system gave, before the origin at this URL, while the block runs."""
    proxy = FaultProxy(origin=origin)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(proxy))
    server.daemon_threads = True
    server.handle_error = lambda request, client_address: None  # type: ignore[method-assign]
    proxy.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield proxy
    finally:
        proxy.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(proxy: FaultProxy) -> type[BaseHTTPRequestHandler]:
    where = urlsplit(proxy.origin)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            is_allowed = proxy.enter()
            try:
                self._answer(is_allowed=is_allowed)
            finally:
                if is_allowed:
                    proxy.leave()

        do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

        def _answer(self, *, is_allowed: bool) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", "0")))
            fault = proxy.take(self.command, self.path, self.headers.get("range", ""))
            if fault.delay_s and proxy.closing.wait(fault.delay_s):
                self.close_connection = True
                return
            if fault.status or not is_allowed:
                self._say(fault.status or 503, {"content-length": "0"})
                return
            upstream = http.client.HTTPConnection(where.hostname or "", where.port, timeout=30)
            try:
                headers = dict(self.headers.items())
                if fault.without_range:
                    headers = {name: value for name, value in headers.items() if name.lower() != "range"}
                upstream.request(self.command, self.path, body or None, headers)
                answer = upstream.getresponse()
                data = answer.read()
            finally:
                upstream.close()
            headers = {name.lower(): value for name, value in answer.getheaders()}
            headers.pop("transfer-encoding", None)
            headers.pop("connection", None)
            if self.command != "HEAD":
                headers["content-length"] = str(len(data))
            if fault.etag:
                headers["etag"] = fault.etag
            self._say(answer.status, headers)
            if self.command != "HEAD":
                self._send(data, fault)

        def _say(self, status: int, headers: dict[str, str]) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

        def _send(self, data: bytes, fault: Fault) -> None:
            if 0 <= fault.corrupt_at < len(data):
                at = fault.corrupt_at
                data = data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]
            ends = [at for at in (fault.cut_at, fault.stall_at) if at >= 0]
            part = data[: min(ends)] if ends else data
            self._pace(part, fault.bytes_per_s)
            if fault.stall_at >= 0:
                proxy.closing.wait()
            if ends:
                self.close_connection = True
                if fault.reset:
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.connection.close()

        def _pace(self, data: bytes, bytes_per_s: float) -> None:
            if not bytes_per_s:
                self.wfile.write(data)
                return
            each = max(1, int(bytes_per_s / 50))
            for at in range(0, len(data), each):
                self.wfile.write(data[at : at + each])
                if proxy.closing.wait(each / bytes_per_s):
                    return

        def finish(self) -> None:
            with contextlib.suppress(OSError, ValueError):
                super().finish()

        def log_message(self, format: str, *arguments: object) -> None:
            """Say nothing."""

    return Handler
