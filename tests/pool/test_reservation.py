"""Tests for pools whose memory is counted, with real workers: they ask before they start any, and tell of ends."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from marserve.errors import NoMemoryNow, NotEnoughMemory
from marserve.messages import Answer
from marserve.pool.reservation import Reservations
from marserve.pool.sizing import autoscaler
from support.processes import descendants, until
from support.running_pool import RunningPool

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes by way of /proc"),
]


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """As the server runs: on uvloop."""
    return "asyncio", {"use_uvloop": True}


class Door(Reservations):
    """Memory for `most` workers. Nobody comes in while it is shut; what it is told stands in `heard`."""

    def __init__(self, most: int = 100) -> None:
        self.most = most
        self.heard: list[str] = []
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.limit_s = 60.0

    def ask(self, workers: int) -> None:
        """Yes, up to the most."""
        self.heard.append(f"ask {workers}")
        if workers > self.most:
            raise NotEnoughMemory(
                "m", "1.0", needed_bytes=2, source="declared", could_be_had=1, budget_bytes=3, holders=[("a 1.0", 2)]
            )

    def grow(self, workers: int) -> int:
        """As many as there may be."""
        return min(workers, self.most)

    def shrink(self, workers: int) -> None:
        """Remember it."""
        self.heard.append(f"shrink {workers}")

    async def enter(self, devices: Sequence[int]) -> None:
        """Wait at the door, not for ever."""
        try:
            await asyncio.wait_for(self.is_open.wait(), self.limit_s)
        except TimeoutError:
            raise NoMemoryNow("m", retry_after_s=1.0) from None

    def loaded(self) -> None:
        """Remember it."""
        self.heard.append("loaded")

    def emptied(self) -> None:
        """Remember it."""
        self.heard.append("emptied")

    def make_spare(self, give_up: Callable[[], None] | None) -> None:
        """Remember it."""
        self.heard.append("serves" if give_up is None else "spare")

    def close(self) -> None:
        """Remember it."""
        self.heard.append("close")


async def test_a_pool_asks_before_it_starts_and_closes_when_all_is_gone(tmp_path: Path) -> None:
    """In this order."""
    door = Door()
    async with RunningPool(tmp_path, workers=2, reservations=door) as running:
        await running.start()
        assert await running.ask_body(b"echo x") is not None

    assert door.heard[0] == "ask 2"
    assert door.heard.count("loaded") == 2
    assert door.heard[-1] == "close"
    assert door.heard.count("emptied") >= 2


async def test_nothing_is_started_before_the_door_opens(tmp_path: Path) -> None:
    """The request that woke the model waits in its queue; then it is answered."""
    door = Door()
    door.is_open.clear()
    async with RunningPool(tmp_path, workers=0, most=1, idle_timeout_s=math.inf, reservations=door) as running:
        running.pool.start()
        there = descendants()
        sent = running.send(b"hello")
        await asyncio.sleep(0.2)
        started = descendants() - there
        waiting = running.pool.queued

        door.is_open.set()

        assert isinstance(await sent.told(20.0), Answer)
        assert started == set()
        assert waiting == 1
        assert running.metrics.loads_on_demand == 1


async def test_who_waits_at_a_door_that_stays_shut_hears_of_it(tmp_path: Path) -> None:
    """All of them; the model sleeps again, and the next request asks anew."""
    door = Door()
    door.is_open.clear()
    door.limit_s = 0.2
    async with RunningPool(tmp_path, workers=0, most=1, idle_timeout_s=math.inf, reservations=door) as running:
        running.pool.start()
        answers = await asyncio.gather(*(running.ask(b"hello") for _ in range(3)))
        asleep = running.pool.wanted_workers
        door.is_open.set()
        again = await running.ask(b"hello")

        assert all(isinstance(answer, NoMemoryNow) for answer in answers)
        assert asleep == 0
        assert isinstance(again, Answer)


async def test_a_request_for_what_cannot_fit_is_refused_at_once(tmp_path: Path) -> None:
    """And counted by its cause; it hears nothing of other models."""
    async with RunningPool(tmp_path, workers=0, most=1, idle_timeout_s=math.inf, reservations=Door(0)) as running:
        running.pool.start()

        with pytest.raises(NotEnoughMemory) as refused:
            running.send(b"hello")

        assert "a 1.0" not in str(refused.value)
        assert running.metrics.refused == {"no_memory": 1}
        assert running.pool.wanted_workers == 0


async def test_more_workers_than_there_is_memory_for_are_refused_and_nothing_changes(tmp_path: Path) -> None:
    """A call that scales."""
    async with RunningPool(tmp_path, workers=1, reservations=Door(2)) as running:
        await running.start()

        with pytest.raises(NotEnoughMemory):
            running.pool.scale(3, 3)

        assert (running.pool.minimum, running.pool.maximum, running.pool.wanted_workers) == (1, 1, 1)


async def test_autoscaling_stops_where_the_memory_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And describe says why."""
    for name in ("UP_PAUSE_S", "UP_AFTER_S"):
        monkeypatch.setattr(autoscaler, name, 0.1)
    async with RunningPool(tmp_path, workers=1, most=4, autoscale=True, reservations=Door(2)) as running:
        await running.start()

        sent = [running.send(b"sleep 0.1") for _ in range(25)]
        most = 0
        for one in sent:
            assert isinstance(await one.told(20.0), Answer)
            most = max(most, len(running.pool.workers()))

        assert most == 2
        assert "memory for models is used up" in running.pool.described["autoscaler"]["reason"]


async def test_a_pool_that_is_put_to_sleep_leaves_no_process(tmp_path: Path) -> None:
    """Neither a worker nor the template; the next request has it loaded again."""
    door = Door()
    async with RunningPool(tmp_path, workers=0, most=1, idle_timeout_s=math.inf, reservations=door) as running:
        running.pool.start()
        assert isinstance(await running.ask(b"hello"), Answer)
        running.look()
        was_in_use = running.pool.is_in_use

        running.pool.sleep("somebody else needs the memory")
        await asyncio.wait_for(running.pool.wait_until_asleep(), 10)

        assert not was_in_use
        assert running.pool.pids_by_worker == running.pool.template_pids == []
        assert running.pool.described["autoscaler"]["reason"] == "somebody else needs the memory"
        assert isinstance(await running.ask(b"hello"), Answer)
        assert running.metrics.loads_on_demand == 2


async def test_the_first_request_brings_as_many_workers_as_there_are_while_awake(tmp_path: Path) -> None:
    """`minWorkers` of a model that is loaded on demand."""
    async with RunningPool(tmp_path, workers=0, most=3, idle_timeout_s=math.inf, least_awake=2) as running:
        running.pool.start()

        assert isinstance(await running.ask(b"hello"), Answer)
        await until(lambda: running.pool.ready_workers == 2, "two workers")


async def test_a_worker_is_replaced_in_its_place_where_there_is_no_memory_beside_it(tmp_path: Path) -> None:
    """Requests wait for the replacement, and none is lost."""
    async with RunningPool(tmp_path, workers=1, max_requests_per_worker=5, reservations=Door(1)) as running:
        await running.start()
        pids, end = set(), time.monotonic() + 20
        while len(pids) < 3 and time.monotonic() < end:
            answer = await running.ask(b"pid")
            assert isinstance(answer, Answer)
            pids.add(bytes(answer.body))
            running.look()
            assert len(running.pool.workers()) == 1

        assert len(pids) == 3
        assert running.metrics.worker_recycles["requests"] >= 2
        assert running.metrics.worker_restarts == 0


async def test_a_pool_that_serves_nobody_says_so_and_goes_on(tmp_path: Path) -> None:
    """Whoever keeps the books may have it ended; its workers stay until then."""
    door = Door()
    async with RunningPool(tmp_path, workers=1, reservations=door) as running:
        await running.start()
        pids = running.pool.pids_by_worker

        running.pool.make_spare(lambda: None)
        running.pool.make_spare(None)

        assert door.heard[-2:] == ["spare", "serves"]
        assert running.pool.pids_by_worker == pids
