"""Archives that clients upload to a real server: taken whole, registered, served; or nothing of them is left."""

from __future__ import annotations

import hashlib
import json
import random
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from support.server import Server, make_archive, poll
from support.small_disk import small_disk

ECHO = "def handle(data, context):\n    return [bytes(row['body']) for row in data] if data else None\n"
MB = 1_000_000


def archive(path: Path, size: int = 0) -> bytes:
    """An echo's archive with so many bytes that do not compress."""
    return make_archive(path, ECHO, name="echo", weights=random.Random(3).randbytes(size)).read_bytes()


def put(server: Server, name: str, data: bytes | Iterator[bytes], **headers: str) -> httpx.Response:
    """Upload it."""
    return server.client.put(f"{server.management}/archives/{name}", content=data, headers=headers)


def left(folder: Path) -> list[str]:
    """The names in a folder, hidden ones too."""
    return sorted(path.name for path in folder.iterdir())


def begin(server: Server, data: bytes, length: int) -> socket.socket:
    """A client that sends the beginning of an upload, and then nothing; returned when the server has begun to write."""
    address = urlsplit(server.management)
    client = socket.create_connection((address.hostname, address.port))
    head = f"PUT /archives/slow.mar HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n"
    client.sendall(head.encode() + data)
    for _ in poll(10, "a hidden file is there"):
        if any(name.endswith(".part") for name in left(server.store)):
            return client
    raise AssertionError


def test_an_archive_is_uploaded_registered_and_served_and_what_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    """Over the limit of requests; by a client that hangs up, and by a server that stops."""
    data = archive(tmp_path / "made.mar", 12 * MB)
    with Server(tmp_path / "server", entry="marserve", settings={"max_upload_size": "20000000"}) as server:
        begin(server, data[: 2 * MB], len(data)).close()
        for _ in poll(10, "nothing is left of it"):
            if left(server.store) == []:
                break
        first = put(server, "echo.mar", data)
        unregistered = server.client.get(f"{server.management}/models").json()
        again = put(server, "echo.mar", data)
        other = put(server, "echo.mar", archive(tmp_path / "other.mar"))
        large = put(server, "large.mar", bytes(20 * MB + 1))
        registered = server.register("echo.mar")
        answer = server.predict("echo", b"here")

        with begin(server, data[:MB], len(data)) as client:
            server.stop()
            refusal = client.recv(4096)

    assert (first.status_code, again.status_code, other.status_code, large.status_code) == (201, 200, 409, 413)
    assert first.json() == {"archive": "echo.mar", "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    assert unregistered["models"] == []
    assert (registered.status_code, answer.content) == (200, b"here")
    assert refusal.startswith(b"HTTP/1.1 503 ")
    assert left(server.store) == ["echo.mar"]


@pytest.mark.system
@pytest.mark.parametrize(("settings", "status"), [({}, 404), ({"allow_uploads": "true"}, 201)])
def test_under_torchserve_a_setting_opens_uploads(tmp_path: Path, settings: dict[str, str], status: int) -> None:
    """Without it there is no such path, as recorded."""
    with Server(tmp_path / "server", settings=settings) as server:
        answer = put(server, "echo.mar", archive(tmp_path / "made.mar"))

    assert answer.status_code == status


@pytest.mark.system
def test_keys_are_asked_for_before_anything_is_read(tmp_path: Path) -> None:
    """The management key, and no other; the client need not have sent its file to learn it."""
    data = archive(tmp_path / "made.mar", 12 * MB)
    settings = {"disable_token_authorization": "false"}
    with Server(tmp_path / "server", entry="marserve", settings=settings) as server:
        keys = json.loads((tmp_path / "server" / "key_file.json").read_text())
        answers = [
            put(server, "echo.mar", data, **headers)
            for headers in (
                {},
                {"Authorization": f"Bearer {keys['inference']['key']}"},
                {"Authorization": f"Bearer {keys['management']['key']}"},
            )
        ]

    assert answers[2].status_code == 201
    assert all(400 <= answer.status_code < 404 for answer in answers[:2])


@pytest.mark.system
def test_a_watched_store_loads_what_is_uploaded(tmp_path: Path) -> None:
    """It never sees the file before it is whole."""
    data = archive(tmp_path / "made.mar", 12 * MB)
    settings = {"watch_model_store": "load", "watch_settle_time": "0.1", "default_workers_per_model": "1"}
    with Server(tmp_path / "server", entry="marserve", settings=settings) as server:
        gate = threading.Event()

        def slowly() -> Iterator[bytes]:
            yield data[: 6 * MB]
            gate.wait(30)
            yield data[6 * MB :]

        caller = threading.Thread(target=put, args=(server, "echo.mar", slowly()))
        caller.start()
        try:
            server.client.post(f"{server.management}/watches/model_store")
            seen = server.client.get(f"{server.management}/watches/model_store").json()
        finally:
            gate.set()
            caller.join()
        for _ in poll(30, "the model answers"):
            if server.predict("echo", b"x").status_code == 200:
                break

    assert seen["archiveList"] == []


@pytest.mark.system
def test_a_full_disk_leaves_nothing_of_an_upload(tmp_path: Path) -> None:
    """507, whether its length was said or not; with room again it is taken."""
    data = archive(tmp_path / "made.mar", 3 * MB)
    (tmp_path / "server").mkdir()
    with small_disk(tmp_path / "disk", 2048) as disk:
        store = disk.folder / "store"
        with Server(tmp_path / "server", entry="marserve", store=store) as server:
            said = put(server, "echo.mar", data)
            unsaid = put(server, "echo.mar", iter([data]))
            remaining = left(store)
            small = put(server, "echo.mar", archive(tmp_path / "small.mar"))

        assert (said.status_code, unsaid.status_code, remaining) == (507, 507, [])
        assert small.status_code == 201


@pytest.mark.system
def test_what_a_killed_server_left_is_gone_after_the_next_start(tmp_path: Path) -> None:
    """The hidden file has no lock any more."""
    data = archive(tmp_path / "made.mar", 12 * MB)
    server = Server(tmp_path / "server", entry="marserve")
    with server:
        with begin(server, data[: 2 * MB], len(data)):
            assert server.process is not None
            process = psutil.Process(server.process.pid)
            process.send_signal(signal.SIGKILL)
            process.wait(10)
        server.stop(check=False)
        [remained] = left(server.store)
        server.start()
        for _ in poll(10, "it is deleted"):
            if left(server.store) == []:
                break

    assert remained.endswith(".part")
