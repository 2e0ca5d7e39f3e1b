"""Addresses, keys and connections of a client."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from marserve_client import AsyncClient, BadInput, Client, key_file
from marserve_client.setup import read_address
from support.both_clients import Clients


@pytest.mark.parametrize(
    "address",
    [
        "",
        "127.0.0.1:8080",
        "ftp://host",
        "http://",
        "http://host:0",
        "http://host:99999",
        "http://h/?a=b",
        "unix:",
        "http://host\n",
        "http://host/\0",
        "http://a..b",
        "http://" + "a" * 64,
        "http://xn--",
        None,
    ],
)
def test_what_is_no_address_is_refused_when_the_client_is_made(address: str | None) -> None:
    """With the argument's name and an example."""
    with pytest.raises(BadInput, match=r"^management: .* is no address; it looks like"):
        read_address("management", address)  # type: ignore[arg-type]


def test_a_password_in_an_address_is_refused_and_not_shown() -> None:
    """It would stand in every error of a call, and take the key's place."""
    with pytest.raises(BadInput, match=r"give https://host:8443, and headers") as error:
        read_address("inference", "https://user:secret@host:8443")

    assert "secret" not in str(error.value)


def test_addresses_are_taken_as_people_write_them() -> None:
    """With a slash, a path before the API's, and that on which a server listens everywhere."""
    client = Client("http://0.0.0.0:8080/", "https://gate.example/marserve/")

    assert client._session.addresses == {
        "inference": "http://127.0.0.1:8080",
        "management": "https://gate.example/marserve",
    }


def test_this_machine_is_asked_past_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the environment does not lead here; elsewhere it is used."""
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example:3128")
    for name in ("ALL_PROXY", "HTTPS_PROXY", "NO_PROXY", "no_proxy", "http_proxy"):
        monkeypatch.delenv(name, raising=False)

    with Client("http://localhost:8080", "http://models.example:8081") as client:
        here, there = client._clients["inference"], client._clients["management"]
        assert not here._mounts
        assert there._mounts


def test_a_sockets_file_is_an_address(clients: Clients, tmp_path: Path) -> None:
    """As that of a server that listens there."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\ndone")

        thread = threading.Thread(target=serve)
        thread.start()
        assert clients(f"unix:{path}").predict("m", b"x").text == "done"
        thread.join(10)


@pytest.mark.parametrize("content", [None, b"", b"[1]", b'{"inference": 3}', b"\xff"])
def test_a_file_without_keys_has_none(tmp_path: Path, content: bytes | None) -> None:
    """The server then says that the key is missing."""
    file = tmp_path / "key_file.json"
    if content is not None:
        file.write_bytes(content)

    assert key_file(file)("inference") is None


def test_a_file_of_keys_is_read_again_only_when_it_has_changed(tmp_path: Path) -> None:
    """By its time and length, as each request asks."""
    file = tmp_path / "key_file.json"
    file.write_text('{"inference": {"key": "one"}}')
    key = key_file(file)
    assert (key("inference"), key("management")) == ("one", None)

    found = file.stat()
    file.write_text('{"inference": {"key": "two"}}')
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns + 1))

    assert key("inference") == "two"


def test_a_transport_of_ones_own_takes_httpxs_place() -> None:
    """For tests of programs that use a client."""
    import httpx

    def reply(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, text=f"{request.method} {request.url.path}")

    with Client(transport=httpx.MockTransport(reply)) as client:
        assert client.predict("m").text == "POST /predictions/m"
    assert AsyncClient(transport=httpx.MockTransport(reply))
