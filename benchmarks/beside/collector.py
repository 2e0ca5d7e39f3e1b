"""A collector of OpenTelemetry that takes whatever is posted to it and throws it away. Prints its port, and runs on."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Taking(BaseHTTPRequestHandler):
    """Answers 200 to all."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Take a message."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Taking)
    print(server.server_port, flush=True)
    server.serve_forever()
