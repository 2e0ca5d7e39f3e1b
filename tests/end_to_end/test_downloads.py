"""Archives that a real server fetches: seen on their way, ended, kept, verified; and models that are not copied."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.fault_proxy import Fault, fault_proxy
from support.nginx import nginx
from support.range_origin import range_origin
from support.server import Server, make_archive, poll

ECHO = "def handle(data, context):\n    return [bytes(row['body']) for row in data] if data else None\n"
MB = 1_000_000


def archive(path: Path, size: int = 0) -> bytes:
    """An echo's archive with so many bytes that do not compress."""
    return make_archive(path, ECHO, weights=random.Random(3).randbytes(size)).read_bytes()


def downloads(server: Server) -> list[dict[str, Any]]:
    """What the server lists."""
    answer = server.client.get(f"{server.management}/downloads")
    assert answer.status_code == 200, answer.text
    listed: list[dict[str, Any]] = answer.json()["downloads"]
    return listed


def metric(server: Server, name: str) -> float:
    """A number of the metrics page."""
    found = re.search(rf"^{re.escape(name)} (\S+)$", server.client.get(f"{server.metrics}/metrics").text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


@pytest.mark.system
def test_a_download_is_seen_on_its_way_over_nginx_and_served(tmp_path: Path) -> None:
    """In ranges, with its bytes counting up, in the list and on the metrics page; then it answers."""
    root = tmp_path / "root"
    root.mkdir()
    data = archive(root / "echo.mar", 20 * MB)
    with (
        nginx(tmp_path / "nginx", root, bytes_per_s=4 * MB) as origin,
        Server(tmp_path / "server", settings={"allowed_urls": f"{origin}/.*"}) as server,
        ThreadPoolExecutor(1) as caller,
    ):
        call = caller.submit(server.register, f"{origin}/echo.mar?Signature=secret")
        seen: set[int] = set()
        for _ in poll(30, "the model is registered"):
            seen.update(each["bytes"] for each in downloads(server) if each["state"] == "downloading")
            if call.done():
                break
        answer = server.predict("echo", b"here")
        [listed] = downloads(server)
        fetched = metric(server, "marserve_download_bytes_total")
        results = metric(server, 'marserve_downloads_total{result="fetched"}')

        assert (answer.status_code, answer.content) == (200, b"here")
        assert len(seen) > 2
        assert (listed["state"], listed["bytes"], listed["size"]) == ("done", len(data), len(data))
        assert listed["url"] == f"{origin}/echo.mar?…"
        assert (fetched, results) == (len(data), 1)
        assert "secret" not in server.output() + str(downloads(server)) + str(server.describe("echo"))
        assert (tmp_path / "server" / "store" / "echo.mar").read_bytes() == data
    requests = (tmp_path / "nginx" / "access.log").read_text()
    assert requests.count(" 206 ") >= 8


def test_an_address_is_registered_unregistered_and_registered_again(tmp_path: Path) -> None:
    """As under TorchServe; a server that stops deletes nothing, and remembers what it fetched."""
    data = archive(tmp_path / "echo.mar")
    with range_origin() as origin:
        origin.put("/echo.mar", data)
        url = f"{origin.url}/echo.mar"
        with Server(tmp_path / "server", settings={"allowed_urls": f"{origin.url}/.*"}) as server:
            for _ in range(2):
                assert server.register(url).status_code == 200
                assert server.predict("echo", b"x").content == b"x"
                assert server.register(url, model_name="other").status_code == 500
                assert server.client.delete(f"{server.management}/models/echo").status_code == 200
                assert list(server.store.iterdir()) == []
            assert server.register(url).status_code == 200
        assert [path.name for path in server.store.iterdir()] == ["echo.mar"]
        [record] = (tmp_path / "server").rglob("fetched-archives.json")
        stored = server.store / "echo.mar"
        assert json.loads(record.read_text()) == {
            str(stored): {
                "sha256": hashlib.sha256(data).hexdigest(),
                "address": url,
                "inode": stored.stat().st_ino,
                "modified_ns": stored.stat().st_mtime_ns,
            },
        }


def test_a_download_is_ended_by_whoever_asks_for_it(tmp_path: Path) -> None:
    """The registration fails, nothing is left, and the same address can be registered again."""
    data = archive(tmp_path / "echo.mar", 6 * MB)
    with range_origin() as origin, fault_proxy(origin.url) as proxy:
        url = proxy.url + "/echo.mar"
        origin.put("/echo.mar", data)
        proxy.on(Fault(stall_at=100_000), times=50)
        with Server(tmp_path / "server", settings={"allowed_urls": proxy.pattern}) as server:
            with ThreadPoolExecutor(1) as caller:
                call = caller.submit(server.register, url)
                for _ in poll(20, "bytes have come"):
                    listed = downloads(server)
                    if listed and listed[0]["bytes"]:
                        break
                ended = server.client.delete(f"{server.management}/downloads/{listed[0]['id']}")
                answer = call.result(20)
            again = server.client.delete(f"{server.management}/downloads/{listed[0]['id']}")
            odd = server.client.delete(f"{server.management}/downloads/x")

            assert ended.json() == {"status": "Download 1 is cancelled"}
            assert (answer.status_code, answer.json()["type"]) == (400, "DownloadArchiveException")
            assert downloads(server)[0]["state"] == "cancelled"
            assert (again.status_code, odd.status_code) == (404, 404)
            assert list(server.store.iterdir()) == []
            proxy.clear()
            assert server.register(url).status_code == 200
            assert server.predict("echo", b"x").content == b"x"


def test_a_server_that_stops_ends_its_downloads_and_leaves_nothing(tmp_path: Path) -> None:
    """At once, though the origin says nothing."""
    data = archive(tmp_path / "echo.mar", 6 * MB)
    with range_origin() as origin, fault_proxy(origin.url) as proxy:
        origin.put("/echo.mar", data)
        proxy.on(Fault(stall_at=100_000), times=50)
        cache = tmp_path / "cache"
        settings = {"allowed_urls": proxy.pattern, "download_cache": str(cache)}
        with Server(tmp_path / "server", settings=settings) as server, ThreadPoolExecutor(1) as caller:
            call = caller.submit(
                server.client.post, f"{server.management}/models", params={"url": proxy.url + "/echo.mar"}
            )
            for _ in poll(20, "bytes have come"):
                listed = downloads(server)
                if listed and listed[0]["bytes"]:
                    break
            began = time.monotonic()
            server.stop()
            assert time.monotonic() - began < 15
            call.exception(20)
            assert list(server.store.iterdir()) == []
            assert list((cache / "incoming").iterdir()) == []
            assert list((cache / "blobs").iterdir()) == []


@pytest.mark.system
def test_a_cache_serves_the_next_start_and_a_crash_leaves_nothing_half(tmp_path: Path) -> None:
    """Killed in the middle, started again, stopped, started with an empty store: it is fetched once more, and once."""
    data = archive(tmp_path / "echo.mar", 6 * MB)
    with range_origin() as origin, fault_proxy(origin.url) as proxy:
        url = proxy.url + "/echo.mar"
        origin.put("/echo.mar", data)
        cache = tmp_path / "cache"
        settings = {"allowed_urls": proxy.pattern, "download_cache": str(cache), "load_models": url}
        server = Server(tmp_path / "server", settings=settings)
        proxy.on(Fault(stall_at=100_000), times=50)
        server.start()
        assert server.process is not None
        for _ in poll(20, "bytes have come"):
            listed = downloads(server)
            if listed and listed[0]["bytes"]:
                break
        assert len(list((cache / "incoming").iterdir())) == 1
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()
        server.process = None
        for left in server.temporary.iterdir():  # what a killed server leaves there is another test's
            subprocess.run(["rm", "-rf", str(left)], check=True)

        proxy.clear()
        with server:
            for _ in poll(20, "the model answers"):
                if server.predict("echo", b"x").status_code == 200:
                    break
            assert list((cache / "incoming").iterdir()) == []
            assert (server.store / "echo.mar").stat().st_nlink == 2
        (server.store / "echo.mar").unlink()
        proxy.asked.clear()
        with Server(tmp_path / "second", settings=settings) as second:
            for _ in poll(20, "the model answers"):
                if second.predict("echo", b"x").status_code == 200:
                    break
            assert downloads(second)[0]["fromCache"]
        assert [asked for _, _, asked in proxy.asked] == ["bytes=0-0"]


def test_a_digest_decides(tmp_path: Path) -> None:
    """A wrong one is a refusal that names both, and nothing is kept; so with an archive of the store."""
    data = archive(tmp_path / "echo.mar")
    right, wrong = hashlib.sha256(data).hexdigest(), "0" * 64
    with range_origin() as origin:
        url = origin.put("/echo.mar", data)
        with Server(tmp_path / "server", settings={"allowed_urls": origin.pattern}) as server:
            refused = server.register(f"{url}#sha256={wrong}")
            assert list(server.store.iterdir()) == []
            taken = server.register(f"{url}#sha256={right}")
            twice = server.register(f"{url}#sha256={right}", model_name="second")
            local = server.register(f"echo.mar#sha256={wrong}", model_name="third")
            well = server.register(f"echo.mar#sha256={right}", model_name="fourth")

            assert refused.status_code == 400
            assert right in refused.json()["message"]
            assert [answer.status_code for answer in (taken, twice, local, well)] == [200, 200, 400, 200]
            assert len(origin.asked) == 2
            described = server.client.get(f"{server.management}/models").json()["models"]
            assert [model["modelName"] for model in described] == ["echo", "fourth", "second"]


@pytest.mark.system
def test_a_folder_below_a_further_root_is_served_where_it_is(tmp_path: Path) -> None:
    """Nothing of it is copied or deleted; links that lead out and other paths are refused."""
    roots = tmp_path / "roots"
    model = roots / "team" / "echo"
    model.mkdir(parents=True)
    subprocess.run(
        [sys.executable, "-m", "zipfile", "-e", str(make_archive(tmp_path / "echo.mar", ECHO)), str(model)], check=True
    )
    (model / "weights.bin").write_bytes(b"")
    (model / "weights.dat").write_bytes(bytes(20 * MB))
    outside = tmp_path / "outside.mar"
    outside.write_bytes(archive(tmp_path / "other.mar"))
    (roots / "link.mar").symlink_to(outside)
    (roots / "inside.mar").write_bytes(archive(tmp_path / "inside.mar"))
    with Server(tmp_path / "server", settings={"model_roots": str(roots)}) as server:
        before = written(server)
        answer = server.register(str(model))
        assert written(server) - before < MB
        assert answer.status_code == 200, answer.text
        assert server.predict("echo", b"x").content == b"x"
        assert not list(server.temporary.rglob("weights.dat"))
        assert server.register(str(roots / "inside.mar")).status_code == 200
        for path in (roots / "link.mar", outside, tmp_path / "roots2" / "echo.mar", roots / "gone.mar"):
            assert server.register(str(path)).status_code == 404, path
        assert server.client.delete(f"{server.management}/models/echo").status_code == 200
    assert (model / "weights.dat").stat().st_size == 20 * MB


def written(server: Server) -> int:
    """Bytes that the server's processes have written."""
    total = 0
    for process in server.family():
        total += int(re.findall(r"wchar: (\d+)", Path(f"/proc/{process.pid}/io").read_text())[0])
    return total


@pytest.mark.parametrize("entry", ["marserve", "torchserve"])
def test_an_archive_that_appears_late_is_waited_for_by_marserve(tmp_path: Path, entry: str) -> None:
    """Two seconds if not set; TorchServe's clients are told at once."""
    with range_origin() as origin, fault_proxy(origin.url) as proxy:
        origin.put("/echo.mar", archive(tmp_path / "echo.mar"))
        proxy.on(Fault(status=404), times=2)
        settings = {"allowed_urls": proxy.pattern}
        with Server(tmp_path / "server", entry=entry, settings=settings) as server:
            answer = server.register(proxy.url + "/echo.mar")

    assert answer.status_code == (200 if entry == "marserve" else 400)
