"""Pools whose devices are lost and answer again, with real workers: they move, wait, say so, and go on."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from marserve.errors import LoadFailed, NoWorker
from marserve.memory.device_moves import Site, choose_site
from marserve.pool.reservation import Reservations
from support.processes import until
from support.running_pool import RunningPool

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes by way of /proc"),
]


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """As the server runs: on uvloop."""
    return "asyncio", {"use_uvloop": True}


class Places(Reservations):
    """Two devices, of which these are lost."""

    def __init__(self) -> None:
        self.lost: set[int] = set()
        self.has_changed = asyncio.Event()

    def set_lost(self, running: RunningPool, *lost: int) -> None:
        """A reading has found so."""
        self.lost = set(lost)
        self.has_changed.set()
        self.has_changed = asyncio.Event()
        running.pool.devices_read()

    def site_for(self, devices: Sequence[int], home: Sequence[int]) -> tuple[int, ...] | None:
        """As the server's room decides."""
        sites = [Site((device,), is_sound=device not in self.lost) for device in (0, 1)]
        return choose_site(tuple(devices), tuple(home), sites)

    def why_none(self) -> str:
        """What is lost."""
        return f"lost: {sorted(self.lost)}" if self.lost else ""

    async def find_site(self, devices: Sequence[int], home: Sequence[int]) -> tuple[int, ...]:
        """Wait for one."""
        while (site := self.site_for(devices, home)) is None:
            await self.has_changed.wait()
        return site


def pool_on(tmp_path: Path, places: Places) -> RunningPool:
    """One worker on one of two devices."""
    return RunningPool(tmp_path, start="fresh", reservations=places, gpu_ids=(0, 1))


def where(running: RunningPool) -> tuple[str, int | None, str]:
    """Of the worker: status, device, and what it waits for."""
    (view,) = running.pool.workers()
    return view.status, view.gpu_id, view.waits_for


async def test_a_worker_moves_from_a_lost_device_and_back_when_it_answers_again(tmp_path: Path) -> None:
    """With its replacement first, each time; no request is lost."""
    places = Places()
    async with pool_on(tmp_path, places) as running:
        await running.start()
        assert where(running) == ("READY", 0, "")
        for lost, device in (([0], 1), ([], 0)):
            places.set_lost(running, *lost)
            async with asyncio.timeout(20):
                while where(running)[:2] != ("READY", device):
                    assert await running.ask_body(b"echo x") is not None
                    await asyncio.sleep(0.01)

        assert running.metrics.worker_recycles == {"device": 2}
        assert running.metrics.worker_restarts == 0
        running.look()


async def test_a_worker_waits_where_all_devices_are_lost(tmp_path: Path) -> None:
    """Requests are refused with the reason, the pool is not healthy; the next reading that finds a device starts it."""
    places = Places()
    async with pool_on(tmp_path, places) as running:
        await running.start()
        places.set_lost(running, 0, 1)
        assert await running.ask_body(b"echo x") is not None  # a worker that lives is not ended for what is read
        os.kill(running.pids[0], signal.SIGKILL)
        await until(lambda: where(running)[2], "it waits")

        assert where(running) == ("LOADING", 0, "lost: [0, 1]")
        assert not running.pool.is_healthy
        assert not running.pool.is_loading
        with pytest.raises(NoWorker, match=r"they wait for a device \(lost: \[0, 1\]\)"):
            running.send(b"echo x")
        with pytest.raises(LoadFailed) as error:
            await running.pool.wait_until_ready()
        assert (error.value.cause, error.value.reason) == ("device_lost", "its workers wait for a device: lost: [0, 1]")

        places.set_lost(running, 0)
        await until(lambda: not where(running)[2], "it waits no more")
        assert await running.ask_body(b"echo x") is not None  # held while it loads
        assert where(running) == ("READY", 1, "")
        running.look()


async def test_a_worker_that_cannot_start_is_tried_at_once_elsewhere(tmp_path: Path) -> None:
    """It was given up before a reading said why: with that it is tried again."""
    source = "import os\nclass H:\n  def initialize(self, context):\n    if context.system_properties['gpu_id'] == 0:\n"
    source += "      raise RuntimeError('no such device')\n  def handle(self, rows, context):\n    return rows\n"
    places = Places()
    never = {"max_retry_timeout_s": 0.0, "retry_failed_every_s": math.inf}
    async with RunningPool(tmp_path, source, start="fresh", reservations=places, gpu_ids=(0, 1), **never) as running:
        running.pool.start()
        slot = running.pool.slots[0]
        await until(lambda: slot.has_given_up and slot.next_start_at is not None, "it is given up")

        places.set_lost(running, 0)

        await until(lambda: where(running)[:2] == ("READY", 1), "it has started elsewhere")
        running.look()


async def test_a_pool_stops_while_a_worker_waits_for_a_device(tmp_path: Path) -> None:
    """Nothing is left of it."""
    places = Places()
    places.lost = {0, 1}
    async with pool_on(tmp_path, places) as running:
        running.pool.start()
        await until(lambda: where(running)[2], "it waits")

        await asyncio.wait_for(running.pool.stop(), 5)

        assert running.metrics.worker_deaths == {}
