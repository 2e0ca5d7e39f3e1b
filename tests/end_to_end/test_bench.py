"""`marserve bench` and a real server: whether a slower version is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.command_line import marserve
from support.server import Server, make_archive

HANDLER = """
import time

def handle(data, context):
    if data is None:
        return None
    time.sleep({seconds})
    return ["ok"] * len(data)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A model of 5 ms, once more, one that is a fifth slower, and one that takes four times as long."""
    store = tmp_path / "store"
    store.mkdir()
    versions = {"1.0": 0.005, "2.0": 0.005, "3.0": 0.0063, "4.0": 0.02}
    for version, seconds in versions.items():
        make_archive(store / f"m{version}.mar", HANDLER.format(seconds=seconds), name="m", version=version)
    with Server(tmp_path, store=store) as running:
        for version in versions:
            assert running.register(f"m{version}.mar").status_code == 200
        yield running


def _status(server: Server, version: str, requests: int = 300) -> int:
    (inputs := server.folder / "input.txt").write_text("hello")
    ran = marserve(
        *("bench", "m", "--inputs", inputs, "--version", version, "--baseline", "1.0", "--requests", requests),
        *("--inference", server.inference),
    )
    return ran.status


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_version_a_fifth_slower_is_caught_ten_times_of_ten_and_an_equal_one_in_none_of_twenty(server: Server) -> None:
    """Each by three hundred requests in turns."""
    assert [_status(server, "3.0") for _ in range(10)] == [1] * 10
    assert [_status(server, "2.0") for _ in range(20)] == [0] * 20


@pytest.mark.system
def test_a_slower_version_is_noticed_and_an_equal_one_is_not(server: Server) -> None:
    """The short case, which has to hold on a machine that other tests use: a fifth of 5 ms is lost there."""
    assert _status(server, "4.0", 150) == 1
    assert _status(server, "2.0", 150) == 0
