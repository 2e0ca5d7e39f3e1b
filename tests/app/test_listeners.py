"""Which addresses are bound, and what is left of them."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import uvicorn
import uvloop
from fastapi import APIRouter, FastAPI
from starlette.responses import Response
from uvicorn.server import ServerState

from marserve.api.byte_ledger import UNBOUNDED, ByteLedger
from marserve.api.grpc.listener import GrpcAddress, GrpcListener
from marserve.api.grpc.transport.limits import GrpcLimits
from marserve.api.grpc.transport.port import Port
from marserve.app import listeners
from marserve.app.building.cannot_start import CannotStart
from marserve.app.grpc_ports import accept_grpc
from marserve.app.listeners import Listener, bind, reaches_this_machine_alone
from marserve.settings import Address, Entry, apis_by_address, load_settings

DEFAULTS = ["http://127.0.0.1:8080", "http://127.0.0.1:8081", "http://127.0.0.1:8082"]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("", [(DEFAULTS[0], ["Inference"]), (DEFAULTS[1], ["Management"]), (DEFAULTS[2], ["Metrics"])]),
        ("enable_metrics_api=false", [(DEFAULTS[0], ["Inference"]), (DEFAULTS[1], ["Management"])]),
        (
            f"management_address={DEFAULTS[0]}\nmetrics_address={DEFAULTS[0]}",
            [(DEFAULTS[0], ["Inference", "Management", "Metrics"])],
        ),
        (
            f"management_address={DEFAULTS[0]}",
            [(DEFAULTS[0], ["Inference", "Management", "Metrics"]), (DEFAULTS[2], ["Metrics"])],
        ),
        (f"management_address={DEFAULTS[0]}\nenable_metrics_api=false", [(DEFAULTS[0], ["Inference", "Management"])]),
        (
            f"metrics_address={DEFAULTS[1]}",
            [(DEFAULTS[0], ["Inference"]), (DEFAULTS[1], ["Management", "Metrics"])],
        ),
    ],
)
def test_equal_addresses_are_one_listener(tmp_path: Path, lines: str, expected: list[tuple[str, list[str]]]) -> None:
    """With inference and management on one, it has the metrics too."""
    (tmp_path / "config.properties").write_text(f"model_store=.\n{lines}\n")
    settings = load_settings("marserve", {}, {}, tmp_path)

    assert [(str(address), names) for address, names in apis_by_address(settings)] == expected


def test_a_taken_port_is_an_error_and_leaves_no_socket() -> None:
    """The other keeps its port; Python warns of a socket that nobody closed, and warnings are errors here."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError) as caught:
            bind(Address("http", "127.0.0.1", port))

    assert caught.value.errno == errno.EADDRINUSE


def test_a_socket_file_that_a_dead_server_left_is_replaced(tmp_path: Path) -> None:
    """And one that cannot be made is an error."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.is_socket()

    with bind(Address("unix", path=str(path))) as sock:
        assert sock.getsockname() == str(path)
    with pytest.raises(OSError):
        bind(Address("unix", path=str(tmp_path / "no folder" / "s")))


class Greeting(asyncio.Protocol):
    """Greets whoever connects, and hangs up."""

    def __init__(self, **_: Any) -> None:
        """What uvicorn gives its protocols is not needed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet."""
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(b"hello")
        transport.close()


@pytest.mark.anyio
@pytest.mark.parametrize("scheme", ["http", "unix"])
async def test_a_listener_accepts_when_it_is_told_to_and_leaves_nothing(tmp_path: Path, scheme: str) -> None:
    """Bound is not yet open: until then a client is refused. After it, the port is free and the file is gone."""
    path = tmp_path / "s"
    address = Address("unix", path=str(path)) if scheme == "unix" else Address("http", "127.0.0.1", 0)
    config = uvicorn.Config("", http=Greeting, ws="none", lifespan="off", log_config=None)
    config.http_protocol_class, config.ssl = Greeting, None
    listener = Listener(address, ["Inference"], bind(address), config, ServerState())
    where = listener.sock.getsockname()

    async def greeting() -> bytes:
        opening = asyncio.open_unix_connection(where) if scheme == "unix" else asyncio.open_connection(*where)
        reader, writer = await opening
        try:
            return await reader.read()
        finally:
            writer.close()
            await writer.wait_closed()

    try:
        with pytest.raises(ConnectionRefusedError):
            await greeting()
        await listener.accept()
        assert await greeting() == b"hello"
        await listener.turn_away()
    finally:
        listener.close()

    with pytest.raises((ConnectionRefusedError, FileNotFoundError)):
        await greeting()
    assert not path.exists()


def test_a_listener_whose_port_another_server_has_taken_since_it_was_bound_is_an_error() -> None:
    """Two that start at once can both bind it. uvloop, which serves, would say nothing, and nobody would answer."""
    config = uvicorn.Config("", http=Greeting, ws="none", lifespan="off", log_config=None)
    config.http_protocol_class, config.ssl = Greeting, None
    sock = bind(Address("http", "127.0.0.1", 0))
    address = Address("http", "127.0.0.1", sock.getsockname()[1])
    listener = Listener(address, ["Management"], sock, config, ServerState())
    try:
        with bind(address) as other:
            other.listen()
            with pytest.raises(CannotStart, match=rf"{address} \(Address .*Set management_address to a free one"):
                uvloop.run(listener.accept())
    finally:
        listener.close()


def test_a_grpc_port_that_another_server_has_taken_since_it_was_bound_is_an_error() -> None:
    """As a listener over HTTP is."""

    async def accept(sock: socket.socket) -> None:
        port = Port(sock, {}, cast("Any", None), GrpcLimits(), ByteLedger(UNBOUNDED))
        address = GrpcAddress("127.0.0.1", sock.getsockname()[1])
        await accept_grpc(GrpcListener("gRPC Inference", address, cast("Any", None), port))

    said = "Set grpc_inference_port or grpc_inference_address to a free one"
    with bind(Address("http", "127.0.0.1", 0)) as sock:
        address = Address("http", "127.0.0.1", sock.getsockname()[1])
        with bind(address) as other:
            other.listen()
            with pytest.raises(CannotStart, match=said):
                uvloop.run(accept(sock))


@pytest.mark.anyio
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system does not tell who waits")
async def test_a_loop_that_was_held_up_takes_in_who_waits_before_it_closes() -> None:
    """On a busy machine a rest is over before the loop has looked at its sockets: nobody who waits there is reset."""
    config = uvicorn.Config("", http=Greeting, ws="none", lifespan="off", log_config=None)  # type: ignore[arg-type]
    config.http_protocol_class, config.ssl = Greeting, None
    address = Address("http", "127.0.0.1", 0)
    listener = Listener(address, ["Inference"], bind(address), config, ServerState())
    await listener.accept()
    accept = listener.sock.dup()  # nobody looks at this one's queue while the loop is held up
    loop = asyncio.get_running_loop()
    loop.remove_reader(listener.sock)
    clients = [socket.create_connection(listener.sock.getsockname()) for _ in range(50)]
    assert listener._waiting == 50

    turning = asyncio.ensure_future(listener.turn_away())
    await asyncio.sleep(0.05)
    assert not turning.done()
    accept.setblocking(False)
    taken = [accept.accept()[0] for _ in clients]
    await turning
    listener.close()

    for sock in (accept, *clients, *taken):
        sock.close()


@pytest.mark.anyio
async def test_a_request_that_came_with_its_connection_is_read_before_the_listener_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A connection that is accepted in the last moment must not be closed as an idle one."""
    seen: list[bytes] = []

    class Noting(asyncio.Protocol):
        def __init__(self, **_: Any) -> None:
            pass

        def data_received(self, data: bytes) -> None:
            seen.append(data)

    monkeypatch.setattr(listeners, "ACCEPT_REST_S", 0.0)  # the shortest rest: the moment comes for certain
    config = uvicorn.Config("", http=Noting, ws="none", lifespan="off", log_config=None)  # type: ignore[arg-type]
    config.http_protocol_class, config.ssl = Noting, None
    address = Address("http", "127.0.0.1", 0)
    listener = Listener(address, ["Inference"], bind(address), config, ServerState())
    await listener.accept()
    with socket.create_connection(listener.sock.getsockname()) as client:
        client.sendall(b"a request")
        await listener.turn_away()
        listener.close()

        assert seen == [b"a request"]


def test_a_handshake_that_is_half_done_is_not_lost_when_new_connections_are_turned_away() -> None:
    """Across a network a connection takes a while to open; who began before the end is answered, who comes is not."""
    if os.geteuid() != 0 or not Path("/dev/net/tun").exists() or shutil.which("unshare") is None:
        pytest.skip("a network namespace and a TUN device are root's")
    command = ["unshare", "-n", sys.executable, "-m", "support.far_client"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env=environment)
    if "Operation not permitted" in done.stderr:
        pytest.skip("a network namespace is not to be had here")

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["connected", "a request"]


@pytest.mark.parametrize(
    ("address", "answer"),
    [
        (Address("http", "127.0.0.1", 8080), True),
        (Address("http", "127.3.2.1", 8080), True),
        (Address("http", "localhost", 8080), True),
        (Address("https", "::1", 8080), True),
        (Address("http", "0.0.0.0", 8080), False),
        (Address("http", "::", 8080), False),
        (Address("http", "no.such.host.invalid", 8080), False),
        (Address("unix", path="socket"), False),
    ],
)
def test_what_reaches_this_machine_alone_is_what_its_host_resolves_to(address: Address, answer: bool) -> None:
    """Its names are known, so that other hosts are foreign; no browser reaches a socket's file."""
    assert reaches_this_machine_alone(address) is answer


@pytest.mark.anyio
@pytest.mark.parametrize(("entry", "is_document"), [("marserve", False), ("torchserve", True)])
async def test_a_preflight_gets_no_document_where_torchserves_answers_are_not_kept(
    tmp_path: Path, entry: Entry, is_document: bool
) -> None:
    """Without `cors_allowed_origin` as well; an `OPTIONS` that is no preflight gets it under both."""
    router = APIRouter()

    @router.options("/described")
    async def describe() -> Response:
        return Response(b"document")

    app = FastAPI()
    app.include_router(router)
    (tmp_path / "store").mkdir()
    flags = {"model_store": "store", "disable_token_authorization": True}
    parts = cast("Any", SimpleNamespace(settings=load_settings(entry, flags, {}, tmp_path)))
    guard = listeners._guard(cast("Any", None), ["Metrics"], cast("Any", [(router, None)]), parts, cast("Any", None))
    transport = httpx.ASGITransport(app if guard is None else guard(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        asks = {"Origin": "https://a.example", "Access-Control-Request-Method": "PUT"}
        preflight = await client.options("/described", headers=asks)
        plain = await client.options("/described")

    assert (preflight.status_code, preflight.content) == (200, b"document" if is_document else b"")
    assert plain.content == b"document"
