"""Tests for what a pool makes of workers that lose their device: real workers, a made-up torch."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from marserve.errors import FingerprintRefused, HandlerFailed, MarserveError, WorkerDied
from marserve.messages import Answer
from marserve.pool.reservation import Reservations
from support.processes import until
from support.running_pool import RunningPool

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes by way of /proc"),
]

HANDLER = Path(__file__).parents[1] / "support" / "lost_device.py"
# The same, whose rows are answered side by side; a row waits until as many run as the folder's file `together` says.
COROUTINE = f"""
import asyncio, pathlib, runpy
module = runpy.run_path({str(HANDLER)!r})
began = 0

async def handle(rows, context):
    global began
    began += 1
    file = pathlib.Path(context.system_properties["model_dir"], "together")
    while file.exists() and began < int(file.read_text()):
        await asyncio.sleep(0.005)
    return module["handle"](rows, context)
"""


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """As the server runs: on uvloop."""
    return "asyncio", {"use_uvloop": True}


def lost(running: RunningPool) -> int:
    """How many workers have lost their device, and none died otherwise."""
    deaths = {cause: count for cause, count in running.metrics.worker_deaths.items() if count}
    assert set(deaths) <= {"device_lost"}, deaths
    return deaths.get("device_lost", 0)


def text(end: Answer | MarserveError) -> str:
    """The row of an answer."""
    assert isinstance(end, Answer), end
    return bytes(end.body).decode().rpartition(" ")[0]


@pytest.mark.parametrize("guilty", ["lose", "lose alone", "lose in its answer"])
async def test_a_body_that_costs_the_device_is_refused_after_two_workers_and_its_mates_are_answered(
    tmp_path: Path, guilty: str
) -> None:
    """However the loss shows; six more of the same body cost no worker at all."""
    options: dict[str, Any] = {"batch_size": 4, "max_batch_delay_s": 2.0, "batch_policy": "fixed"}
    async with RunningPool(tmp_path, HANDLER, start="fresh", **options) as running:
        await running.start()
        sent = [running.send(body) for body in (b"a", guilty.encode(), b"b", b"c")]

        mates = [text(await sent[place].told(20)) for place in (0, 2, 3)]
        end = await sent[1].told(20)
        for _ in range(6):
            with pytest.raises(FingerprintRefused):
                running.send(guilty.encode())
        await until(lambda: running.pool.ready_workers == 1, "its replacement")

        assert mates == ["a", "b", "c"]
        assert isinstance(end, WorkerDied)
        assert end.cause == "device_lost"
        assert lost(running) == 2
        death = running.pool.last_death
        assert death is not None
        assert death.detail == (
            "device 0 is lost to the worker: AcceleratorError: CUDA error: device-side assert triggered"
        )
        assert ("device-side assert triggered" in death.traceback) == (guilty == "lose")


class Peaks(Reservations):
    """A room that hears what workers take."""

    def __init__(self) -> None:
        self.heard: list[int] = []

    def loaded_on_device(self, key: str, reserved_bytes: int) -> None:
        """At load."""
        self.heard.append(reserved_bytes)

    def peaked_on_device(self, reserved_bytes: int) -> None:
        """Since."""
        self.heard.append(reserved_bytes)


async def test_what_a_full_batch_takes_of_the_device_is_learned(tmp_path: Path) -> None:
    """A worker needs that, not what it took when it was loaded."""
    reservations = Peaks()
    options: dict[str, Any] = {"batch_size": 3, "max_batch_delay_s": 2.0, "batch_policy": "fixed", "gpu_ids": (0,)}
    async with RunningPool(tmp_path, HANDLER, start="fresh", reservations=reservations, **options) as running:
        await running.start()

        for sent in [running.send(b"a") for _ in range(3)]:
            assert text(await sent.told(20)) == "a"
        await until(lambda: len(reservations.heard) == 2, "the peak")

        assert reservations.heard == [1 << 20, 3 << 20]


async def test_a_failure_that_leaves_the_device_well_costs_no_worker(tmp_path: Path) -> None:
    """It is answered as ever, by the same process."""
    async with RunningPool(tmp_path, HANDLER, start="fresh") as running:
        await running.start()
        before = running.pids

        ends = [await running.ask(b"raise") for _ in range(3)]
        after = await running.ask(b"a")

        assert all(isinstance(end, HandlerFailed) for end in ends)
        assert text(after) == "a"
        assert running.pids == before
        assert lost(running) == 0


async def test_of_requests_that_ran_side_by_side_the_one_that_cost_the_device_is_refused(tmp_path: Path) -> None:
    """Two workers end, all others are answered."""
    options: dict[str, Any] = {"is_concurrent": True, "most_concurrent": 8}
    load = {"is_concurrent": True}
    async with RunningPool(tmp_path, COROUTINE, start="fresh", load=load, **options) as running:
        running.file("together").write_text("4")
        await running.start()
        sent = [running.send(body) for body in (b"lose", b"a", b"b", b"c")]
        await until(lambda: lost(running) == 1, "the first loss")
        running.file("together").unlink()

        mates = [text(await each.told(20)) for each in sent[1:]]
        end = await sent[0].told(20)

        assert mates == ["a", "b", "c"]
        assert isinstance(end, WorkerDied)
        assert lost(running) == 2
        with pytest.raises(FingerprintRefused):
            running.send(b"lose")


async def test_a_loss_is_no_answer_for_the_restarts_and_a_good_answer_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Workers that only lose their device are started again at growing pauses; one that has answered at once."""
    caplog.set_level(logging.INFO, "marserve.pool")
    async with RunningPool(tmp_path, HANDLER, start="fresh", retry_on_worker_death=False) as running:
        await running.start()
        pauses = []
        for body in (b"lose", b"lose", b"a", b"lose"):
            end = await running.ask(body, timeout_s=20.0)
            assert isinstance(end, Answer) == (body == b"a")
            await until(
                lambda: running.pool.ready_workers == 1 and running.metrics.worker_restarts == lost(running), "the next"
            )
            pauses.append(sum("Retry worker" in line for line in caplog.messages))

        assert pauses == [0, 1, 1, 1]
        assert lost(running) == 3
