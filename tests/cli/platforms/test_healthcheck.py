"""How an image asks its own server for its health, without a library and without curl."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from socketserver import UnixStreamServer

import pytest
import trustme

from marserve.cli.platforms.healthcheck import ask, container_arguments, inference_address
from marserve.settings import Address


class Answer(BaseHTTPRequestHandler):
    """Answers as the class says."""

    status = 200
    body = b'{"reasons": []}'

    def do_GET(self) -> None:
        """One answer."""
        assert self.path == "/readyz"
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class SocketFileServer(UnixStreamServer):
    """An HTTP server at a socket file."""

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:  # type: ignore[override]
        """The request, with an address that the handler can show."""
        request, _ = super().get_request()
        return request, ("unix", 0)


@contextmanager
def serving(server: HTTPServer | UnixStreamServer) -> Iterator[None]:
    """Answers until the end of the block."""
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def answering(status: int, body: bytes) -> type[Answer]:
    """A handler that gives this answer."""
    return type("Given", (Answer,), {"status": status, "body": body})


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_ready_server_is_healthy(host: str) -> None:
    """Also where it listens on all addresses."""
    server = ThreadingHTTPServer((host, 0), Answer)
    with serving(server):
        assert ask(Address("http", host, server.server_port)) == (True, "The server is ready.")


def test_a_server_that_is_not_ready_tells_why() -> None:
    """Engines keep what the check printed."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), answering(503, b'{"reasons": ["digits is loading"]}'))
    with serving(server):
        is_ready, sentence = ask(Address("http", "127.0.0.1", server.server_port))

    assert not is_ready
    assert sentence.endswith("is not ready (503): digits is loading")


def test_what_answers_otherwise_is_not_healthy() -> None:
    """It may be anybody."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), answering(404, b"nothing here"))
    with serving(server):
        is_ready, sentence = ask(Address("http", "127.0.0.1", server.server_port))

    assert not is_ready
    assert "(404)" in sentence


def test_nobody_is_not_healthy() -> None:
    """A server that has gone."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        is_ready, sentence = ask(Address("http", "127.0.0.1", sock.getsockname()[1]))

    assert not is_ready
    assert "No server answers at http://127.0.0.1:" in sentence


def test_a_socket_file_is_asked(tmp_path: Path) -> None:
    """As the settings name it."""
    place = str(tmp_path / "socket")
    with serving(SocketFileServer(place, Answer)):
        assert ask(Address("unix", path=place))[0]


def test_tls_is_spoken_with_whatever_certificate_the_server_has() -> None:
    """It asks itself."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("elsewhere.example").configure_cert(context)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    with serving(server):
        assert ask(Address("https", "127.0.0.1", server.server_port))[0]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A container's folder, whose settings name one port and whose further file names another."""
    (tmp_path / "store").mkdir()
    (tmp_path / "config.properties").write_text("model_store=store\ninference_address=http://0.0.0.0:8080\n")
    (tmp_path / "other").write_text("model_store=store\ninference_address=https://127.0.0.1:8443\n")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "address"),
    [
        ([], "http://0.0.0.0:8080"),
        (["serve", "--models", "all"], "http://0.0.0.0:8080"),
        (["serve", "--ts-config", "other"], "https://127.0.0.1:8443"),
        (["torchserve", "--start", "--ts-config=other"], "https://127.0.0.1:8443"),
        (["torchserve", "--start", "--models", "a=a.mar", "b=b.mar"], "http://0.0.0.0:8080"),
        (["marserve", "start", "--config", "other"], "https://127.0.0.1:8443"),
        (["marserve", "start", "--inference-address", "http://127.0.0.1:9"], "http://127.0.0.1:9"),
        (["marserve", "start", "--set", "inference_address=http://127.0.0.1:9"], "http://127.0.0.1:9"),
        (["sh", "-c", "torchserve --start"], "http://0.0.0.0:8080"),
    ],
)
def test_the_address_is_the_one_that_the_arguments_mean(home: Path, arguments: list[str], address: str) -> None:
    """As the server that they start finds it."""
    assert str(inference_address(arguments, {}, home)) == address


def test_sagemakers_port_is_asked_on_sagemaker(home: Path) -> None:
    """There `serve` means another thing."""
    environment = {"SAGEMAKER_BIND_TO_PORT": "8765", "SAGEMAKER_BASE_DIR": str(home / "ml")}

    assert str(inference_address(["serve"], environment, home)) == "http://0.0.0.0:8765"


def test_the_arguments_are_those_of_the_first_process(tmp_path: Path) -> None:
    """What stands behind the entry point's name; another first process has none."""
    line = tmp_path / "cmdline"
    line.write_bytes(b"/home/venv/bin/python\0-P\0-m\0marserve.cli.container\0serve\0--models\0a b\0")
    assert container_arguments(line) == ["serve", "--models", "a b"]

    line.write_bytes(b"/bin/bash\0")
    assert container_arguments(line) == []
    assert container_arguments(tmp_path / "none") == []
