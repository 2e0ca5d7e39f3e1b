"""A disk that is full while the server runs: it serves on, says so once, refuses what needs room, and recovers."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import yaml

from support.file_server import file_server, whole
from support.server import Server, make_archive, poll
from support.small_disk import SmallDisk, small_disk

pytestmark = pytest.mark.system

ECHO = """
def handle(rows, context):
    if rows is None:
        return None
    return [bytes(row["body"]) for row in rows]
"""
FULL = "No space left on device"


def serves(server: Server, model: str = "echo") -> bool:
    """Whether the model answers with what it was sent."""
    answer = server.predict(model, b"x")
    return answer.status_code == 200 and answer.content == b"x"


def wait_until_it_serves(server: Server) -> None:
    """Return when the model of the start does."""
    for _ in poll(30, "the model of the start serves"):
        if serves(server):
            return


def wait_for(server: Server, words: str, within_s: float = 15) -> None:
    """Return when the server has said this."""
    for _ in poll(within_s, f"it says {words!r}"):
        if words in server.output():
            return


def on_small_disk(folder: Path, disk: SmallDisk, **further: str) -> Server:
    """A server all of whose folders that it writes lie on this disk, with further settings."""
    settings = {
        "load_models": "echo.mar",
        "log_location": str(disk.folder / "logs"),
        "state_folder": str(disk.folder / "state"),
        "config_snapshots": "true",
        **further,
    }
    (disk.folder / "tmp").mkdir()
    server = Server(folder, entry="marserve", settings=settings, environment={"TEMP": str(disk.folder / "tmp")})
    make_archive(server.store / "echo.mar", ECHO)
    return server


def test_a_disk_that_fills_up_under_a_server_stops_nobody(tmp_path: Path) -> None:
    """Logs, snapshots, unpacked archives and downloads lie there: requests go on, and each part recovers by itself."""
    weights = random.Random(0).randbytes(100_000)
    more = make_archive(tmp_path / "more.mar", ECHO, weights=weights).read_bytes()
    with small_disk(tmp_path / "disk", 1024) as disk, file_server() as origin:
        allowed = re.escape(origin.url) + "/.*"
        server = on_small_disk(tmp_path, disk, allowed_urls=allowed, download_cache=str(disk.folder / "cache"))
        make_archive(server.store / "big.mar", ECHO, weights=weights)
        url = origin.on("/more.mar", whole(more, '"1"'))
        with server:
            wait_until_it_serves(server)
            disk.fill()
            assert all(serves(server) for _ in range(200))
            refused = [server.register("big.mar"), server.register(url)]
            scaled = server.client.put(f"{server.management}/models/echo?min_worker=2&max_worker=2&synchronous=true")
            wait_for(server, f"access_log.log cannot be written ({FULL}): its lines are lost until it can")
            wait_for(server, f"A snapshot cannot be written to {disk.folder / 'logs' / 'config'}")
            assert serves(server)
            listed = server.client.get(f"{server.management}/models").json()["models"]

            disk.empty()
            assert serves(server)
            wait_for(server, "access_log.log is written again")
            accepted = [server.register("big.mar"), server.register(url)]
            wait_for(server, f"Snapshots are written to {disk.folder / 'logs' / 'config'} again")
            assert all(serves(server, model) for model in ("echo", "big", "more"))
        said = server.output()
        log = (disk.folder / "logs" / "access_log.log").read_text()
        left = list((disk.folder / "tmp").iterdir())
        kept = [path for path in (disk.folder / "cache").rglob("*") if path.is_file() and "incoming" in path.parts]

    assert [(answer.status_code, "No space is left to save model" in answer.text) for answer in refused] == 2 * [
        (507, True)
    ]
    assert scaled.status_code == 200, scaled.text
    assert [model["modelName"] for model in listed] == ["echo"]
    assert [answer.status_code for answer in accepted] == [200, 200], [answer.text for answer in accepted]
    assert said.count("access_log.log cannot be written") == 1
    assert said.count("A snapshot cannot be written") == 1
    assert re.search(r"\d+ lines of access_log.log were lost", log)
    assert "Traceback" not in said
    assert (left, kept) == ([], [])


def test_a_start_on_a_full_disk_leaves_models_out_and_names_them(tmp_path: Path) -> None:
    """Neither logs nor snapshots nor the folder of unpacked archives have room; with room the model is registered."""
    with small_disk(tmp_path / "disk", 256) as disk:
        server = on_small_disk(tmp_path, disk)
        disk.fill()
        with server:
            for _ in poll(15, "the models of the start were tried"):
                started = server.client.get(f"{server.inference}/startupz")
                if started.status_code == 200:
                    break
            disk.empty()
            registered = server.register("echo.mar")
            is_served = serves(server)

    assert "echo.mar was not loaded: No space is left to save model" in started.text
    assert registered.status_code == 200, registered.text
    assert is_served


@pytest.mark.long
def test_a_document_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    """An apply on a full disk is refused with the reason, and what was in force is; with room it is done."""
    with small_disk(tmp_path / "disk", 512) as disk:
        document = disk.folder / "models.yaml"
        state = {"models": {"echo": {"versions": {"1.0": {"url": "echo.mar", "workers": 1}}}}}
        document.write_text(yaml.safe_dump(state))
        before = document.read_bytes()
        server = Server(
            tmp_path,
            entry="marserve",
            arguments=["--desired-state", str(document)],
            settings={"state_folder": str(disk.folder / "state"), "log_location": str(disk.folder / "logs")},
        )
        make_archive(server.store / "echo.mar", ECHO)
        make_archive(server.store / "second.mar", ECHO)
        wanted = {"models": {**state["models"], "second": {"versions": {"1.0": {"url": "second.mar", "workers": 1}}}}}
        text = yaml.safe_dump(wanted)
        with server:
            wait_until_it_serves(server)
            disk.fill()
            refused = server.client.put(f"{server.management}/desired-state", content=text)
            assert serves(server)
            assert document.read_bytes() == before
            assert server.predict("second").status_code == 404

            disk.empty()
            accepted = server.client.put(f"{server.management}/desired-state", content=text)
            assert serves(server, "second")
        left = [path.name for path in disk.folder.glob(".*.part")]

    assert refused.status_code >= 500
    assert FULL in refused.text
    assert accepted.status_code == 200, accepted.text
    assert left == []
