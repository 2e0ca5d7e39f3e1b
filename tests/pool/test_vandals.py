"""Tests for handlers that turn on what their process holds: its descriptors and its shared page (C12).

The pool runs in this process as it does in the server: what would end the server ends the test run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from marserve.errors import LoadFailed, WorkerDied
from marserve.messages import Answer
from support.processes import until
from support.running_pool import RunningPool, worker_environment
from support.vandal_handler import TRICKS

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.true_starts,  # what a worker holds is what a new interpreter does
    pytest.mark.skipif(sys.platform != "linux", reason="its tricks are Linux's"),
]

VANDAL = Path(__file__).parents[1] / "support" / "vandal_handler.py"


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """As the server runs: on uvloop."""
    return "asyncio", {"use_uvloop": True}


async def survives(running: RunningPool, trick: str) -> dict[str, str]:
    """Have a worker do its trick, and see that the pool answers afterwards; what the worker said of it, if it could."""
    end = await running.ask(trick.encode())
    running.look()
    assert isinstance(end, Answer | WorkerDied), (trick, end)
    assert await running.ask_body(b"well") == b"well", trick
    said: dict[str, str] = json.loads(end.body) if isinstance(end, Answer) else {}
    return said


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("start", "tricks"),
    [
        pytest.param("fork", tuple(TRICKS), id="fork"),
        pytest.param("fresh", ("truncate", "shift"), id="fresh"),
        pytest.param("fresh", tuple(TRICKS), id="fresh, all tricks", marks=pytest.mark.long),
    ],
)
async def test_nothing_that_a_worker_does_to_what_it_holds_harms_the_server(
    tmp_path: Path, start: str, tricks: tuple[str, ...]
) -> None:
    """Each trick is tried on every descriptor of a worker of its own; the next request is answered each time."""
    async with RunningPool(
        tmp_path, VANDAL, start=start, response_timeout_s=1.0, retry_on_worker_death=False
    ) as running:
        await running.start()
        for trick in tricks:
            said = await survives(running, trick)

            assert not said or any("marserve-page" in what for what in said), (trick, said)
            deaths = sum(running.metrics.worker_deaths.values())
            for pid in running.pids:
                with contextlib.suppress(ProcessLookupError):  # the trick ended it, which is not yet seen
                    os.kill(pid, signal.SIGKILL)
            await until(
                lambda deaths=deaths: sum(running.metrics.worker_deaths.values()) > deaths,  # type: ignore[misc]
                f"the end of the worker that tried {trick}",
            )
            await until(lambda: running.pool.ready_workers == 1, f"a worker after {trick}")
            assert await running.ask_body(b"well") == b"well"  # so that the next end is the first one in a row


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.timeout(180)
@pytest.mark.parametrize("trick", ["truncate", "garbage", "shift", "rights"])
async def test_nothing_that_a_rank_does_to_what_it_holds_harms_the_server(tmp_path: Path, trick: str) -> None:
    """Ranks have sockets to each other beside what any worker has, and share one page."""
    pytest.importorskip("torch.distributed")
    async with RunningPool(
        tmp_path,
        VANDAL,
        parallel_type="tp",
        parallel_level=2,
        response_timeout_s=2.0,
        retry_on_worker_death=False,
    ) as running:
        await running.start()

        await survives(running, trick)


@pytest.mark.parametrize("trick", ["truncate", "garbage", "rights", "shut", "flags", "shift"])
async def test_nothing_that_a_template_does_to_what_it_holds_harms_the_server(tmp_path: Path, trick: str) -> None:
    """The author's code runs in it, too, beside the connection that orders to fork come on."""
    environment = worker_environment(VANDAL=trick)
    async with RunningPool(
        tmp_path, VANDAL, start="fork", environment=environment, max_restarts=0, startup_timeout_s=5.0
    ) as running:
        running.pool.start()

        try:
            await running.pool.wait_until_ready()
        except LoadFailed:
            pass
        else:
            assert await running.ask_body(b"well") == b"well"

        assert running.file("tried").exists()
