"""Real servers with models that sleep: the first request wakes them, and many of them weigh next to nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx
import psutil
import pytest

from support.server import Server, make_archive

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes by way of /proc")

ECHO = "def handle(rows, context):\n    return [row['body'] for row in rows] if rows else None\n"
SLEEPER = "minWorkers: 0\nmaxWorkers: 2\nidleTimeout: 60\n"
KB_PER_MODEL = 150  # three times what is promised


def test_a_sleeping_model_is_woken_by_its_first_request(tmp_path: Path) -> None:
    """It is listed without workers, ready to be asked, and says what it does."""
    store = tmp_path / "store"
    store.mkdir()
    make_archive(store / "m.mar", ECHO, config=SLEEPER)

    settings = {"load_models": "m.mar", "worker_threads": "3"}
    with Server(tmp_path, entry="marserve", store=store, settings=settings) as server:
        asleep = server.describe("m")
        answer = httpx.post(f"{server.inference}/predictions/m", content=b"hello", timeout=30.0)
        awake = server.describe("m")
        target = httpx.get(f"{server.metrics}/metrics", params={"name[]": "marserve_workers_target"}).text

    assert (asleep["workers"], asleep["state"], asleep["autoscaler"]["target"]) == ([], "idle", 0)
    assert answer.text == "hello"
    assert len(awake["workers"]) == 1
    assert (awake["autoscaler"]["target"], awake["autoscaler"]["reason"]) == (1, "woken by a request")
    assert awake["threadsPerWorker"] == 3
    assert float(target.split()[-1]) == 1


@pytest.mark.system
def test_sleeping_models_weigh_little(tmp_path: Path) -> None:
    """A hundred more, from one archive under names of their own, start no process."""
    store = tmp_path / "store"
    store.mkdir()
    make_archive(store / "m.mar", ECHO, config=SLEEPER)

    with Server(tmp_path, entry="marserve", store=store) as server:
        assert server.process is not None
        process = psutil.Process(server.process.pid)

        def register(first: int, beyond: int) -> int:
            for number in range(first, beyond):
                response = server.client.post(
                    f"{server.management}/models", params={"url": "m.mar", "model_name": f"m{number}"}
                )
                assert response.status_code == 200, response.text
            return int(process.memory_info().rss)

        before = register(0, 40)
        after = register(40, 140)
        children = process.children(recursive=True)

    assert children == []
    assert (after - before) / 100 < KB_PER_MODEL * 1024
