"""A model's memory dies with its process: rounds of registering and unregistering leave the server as it was."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from support.server import Server, make_archive, poll

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes by way of /proc"),
]

ECHO = "def handle(rows, context):\n    return [row['body'] for row in rows] if rows else None\n"
MB = 10**6


def grown_by(folder: Path, first_rounds: int, rounds: int) -> int:
    """Bytes that the server has grown by in so many rounds after the first ones; proves that nothing else is left.

    What a server's own caches grow to in its first rounds is no leak.

    Each round has a model of a name that was never there before: what is kept of names has a bound.
    """
    store = folder / "store"
    store.mkdir()
    make_archive(store / "m.mar", ECHO, weights=b"x" * 100_000)
    # The flight recorder is full after the first rounds, too: of 8 MiB, its default, it would take some in each.
    settings = {"flight_recorder_size": "65536"}
    with Server(folder, entry="marserve", store=store, settings=settings) as server:
        assert server.process is not None
        process = psutil.Process(server.process.pid)

        def play(count: int, first: int) -> int:
            for number in range(first, first + count):
                name = f"m{number}"
                registered = server.register("m.mar", model_name=name)
                assert registered.status_code == 200, registered.text
                assert server.predict(name, b"hello").text == "hello"
                gone = server.client.delete(f"{server.management}/models/{name}")
                assert gone.status_code == 200, gone.text
            return int(process.memory_info().rss)

        descriptors = process.num_fds
        before = play(first_rounds, 0)
        files, threads = descriptors(), process.num_threads()
        after = play(rounds, first_rounds)
        for _ in poll(10, "all processes are gone"):
            if not process.children(recursive=True):
                break
        assert descriptors() <= files + 2
        assert process.num_threads() <= threads + 32
        left = [path for path in server.temporary.rglob("*") if path.is_dir() and path.parent.name == "models"]
        assert left == []
    return after - before


def test_rounds_of_registering_leave_the_server_as_it_was(tmp_path: Path) -> None:
    """Ten, each with a model that answers; the full promise is played in the long suite."""
    assert grown_by(tmp_path, 15, 10) < 3 * MB  # ten times its part of the full promise: allocators round up


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_two_thousand_rounds_grow_the_server_by_under_10_mb(tmp_path: Path) -> None:
    """And leave no folder, no process and no descriptor."""
    assert grown_by(tmp_path, 60, 2000) < 10 * MB
