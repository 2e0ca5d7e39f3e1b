"""Tests for pools that find their own size, with real workers: more under load, fewer after it, none while asleep."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest

from marserve.errors import DeadlinePassed, NoWorker, QueueFull
from marserve.messages import Answer
from marserve.pool.pool import threads_for
from marserve.pool.sizing import autoscaler
from support.processes import until
from support.running_pool import RunningPool

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes by way of /proc"),
]

BROKEN = "def handle(rows, context):\n    return rows\n\n\nraise RuntimeError('never loads')\n"


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """As the server runs: on uvloop."""
    return "asyncio", {"use_uvloop": True}


async def test_requests_that_wait_bring_workers_and_calm_takes_them_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the least and the most; describe and the gauges say how many and why."""
    for name in ("UP_PAUSE_S", "UP_AFTER_S", "DOWN_AFTER_S"):
        monkeypatch.setattr(autoscaler, name, 0.2)
    async with RunningPool(tmp_path, workers=1, most=3, autoscale=True) as running:
        await running.start()
        assert running.pool.described["autoscaler"]["target"] == 1

        sent = [running.send(b"sleep 0.2") for _ in range(15)]
        await until(lambda: running.pool.ready_workers == 3, "three workers")
        assert "requests wait" in running.pool.described["autoscaler"]["reason"]
        assert running.metrics.read_gauges().workers_target == 3
        for one in sent:
            assert isinstance(await one.told(10.0), Answer)
        running.pool.scaling.autoscaler._down_after_s = 0.2
        running.pool.scaling.autoscaler._busy = 0.0
        await until(lambda: len(running.pool.workers()) == 1, "one worker again")


async def test_a_pool_at_rest_has_no_timer(tmp_path: Path) -> None:
    """Models that nobody uses cost nothing."""
    async with RunningPool(tmp_path, workers=1, most=3, autoscale=True) as running:
        await running.start()
        scaling = running.pool.scaling

        assert scaling.is_resting
        assert scaling._timer is None
        await running.ask(b"hello")
        assert scaling._timer is not None
        await until(lambda: scaling._timer is None, "no timer")
        assert scaling.is_resting


async def test_a_lone_client_does_not_keep_the_watch_from_looking(tmp_path: Path) -> None:
    """Requests that come one after the other, each to an idle pool: it is looked at all the same."""
    async with RunningPool(tmp_path, workers=1, most=3, autoscale=True) as running:
        await running.start()
        scaling = running.pool.scaling
        looks = []
        decide = scaling.autoscaler.decide
        scaling.autoscaler.decide = lambda now, seen: (looks.append(now), decide(now, seen))[1]  # type: ignore[method-assign]

        end = time.monotonic() + 1.2
        while time.monotonic() < end:
            await running.ask(b"hello")

        assert len(looks) >= 2


async def test_without_autoscaling_the_number_stays(tmp_path: Path) -> None:
    """As TorchServe: the most is only a bound for who scales by hand."""
    async with RunningPool(tmp_path, workers=1, most=3) as running:
        await running.start()

        sent = [running.send(b"sleep 0.1") for _ in range(10)]
        for one in sent:
            assert isinstance(await one.told(10.0), Answer)

        assert len(running.pool.workers()) == 1
        assert "autoscaler" not in running.pool.described


async def test_the_first_request_wakes_a_sleeping_pool_and_is_answered(tmp_path: Path) -> None:
    """It is held while the worker starts; after the idle time-out there is no worker, and later no template either."""
    async with RunningPool(tmp_path, workers=0, most=2, idle_timeout_s=0.4, autoscale=True) as running:
        await running.start()
        assert running.pool.workers() == []
        assert running.pool.described["autoscaler"]["target"] == 0

        answers = await asyncio.gather(*[running.ask(b"hello %d" % number) for number in range(5)])
        assert answers == [Answer(b"hello %d" % number) for number in range(5)]
        assert len(running.pool.workers()) == 1
        await until(lambda: not running.pool.workers(), "no workers")
        assert "no request for 0.4 s" in running.pool.described["autoscaler"]["reason"]
        await until(lambda: running.pool.launcher._template is None, "no template")
        assert running.pool.scaling._timer is None

        assert await running.ask_body(b"again") == b"again"


async def test_a_request_soon_after_is_answered_by_a_fork_of_the_old_template(tmp_path: Path) -> None:
    """The model is not loaded anew."""
    async with RunningPool(tmp_path, workers=0, most=1, idle_timeout_s=0.5, autoscale=True) as running:
        await running.start()
        await running.ask_body(b"hello")
        template = running.pool.launcher._template
        await until(lambda: not running.pool.workers(), "no workers")

        await running.ask_body(b"again")

        assert template is not None
        assert running.pool.launcher._template is template


async def test_who_cannot_be_loaded_is_not_waited_for(tmp_path: Path) -> None:
    """The held requests fail with the first try, and later ones are refused at once until a try succeeds."""
    async with RunningPool(tmp_path, BROKEN, workers=0, most=1, idle_timeout_s=60.0) as running:
        await running.start()

        first = [running.send(b"hello") for _ in range(3)]
        for one in first:
            assert isinstance(await one.told(10.0), NoWorker)
        with pytest.raises(NoWorker):
            running.send(b"hello")


async def test_while_it_wakes_deadlines_cancels_and_the_bound_hold(tmp_path: Path) -> None:
    """Held requests are ordinary waiting requests."""
    waits = (
        "import os, time\nwhile not os.path.exists('go'):\n    time.sleep(0.01)\n\n\n"
        "def handle(rows, context):\n    return [row['body'] for row in rows or []]\n"
    )
    async with RunningPool(tmp_path, waits, workers=0, most=1, idle_timeout_s=60.0, queue_size=3) as running:
        await running.start()
        dated = running.send(b"dated", deadline=time.monotonic() + 0.2)
        gone = running.send(b"gone")
        kept = running.send(b"kept")
        with pytest.raises(QueueFull):
            running.send(b"too many")
        gone.job.cancel()

        assert isinstance(await dated.told(10.0), DeadlinePassed)  # the model still loads
        running.file("go").touch()
        assert await kept.told(20.0) == Answer(b"kept")
        assert gone.end is None


async def test_scaling_to_nothing_by_hand_is_no_sleep(tmp_path: Path) -> None:
    """Who scales to 0 at most wants no worker, whoever asks."""
    async with RunningPool(tmp_path, workers=0, most=1, idle_timeout_s=60.0) as running:
        await running.start()
        await running.ask_body(b"hello")

        running.pool.scale(0, 0)

        with pytest.raises(NoWorker):
            running.send(b"hello")
        running.pool.scale(0, 1)
        assert await running.ask_body(b"hello") == b"hello"


def test_threads_are_the_cores_divided_among_the_workers() -> None:
    """As many as the container may keep busy; the operator's word comes first."""
    assert threads_for(2, 8, None) == 4
    assert threads_for(3, 8, None) == 2
    assert threads_for(16, 8, None) == 1
    assert threads_for(0, 8, None) == 8
    assert threads_for(4, 8, "3") == 3
    assert threads_for(4, 8, "many") == 2


async def test_memory_that_is_not_there_brings_no_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever waits: what a worker takes must be there, and some must be left."""
    monkeypatch.setattr(autoscaler, "UP_AFTER_S", 0.3)
    async with RunningPool(tmp_path, workers=1, most=3, autoscale=True) as running:
        running.pool.scaling._read_available = lambda: 100 << 20
        running.pool.scaling._read_own = lambda pid: 200 << 20
        await running.start()

        sent = [running.send(b"sleep 0.1") for _ in range(12)]
        await until(lambda: "MiB" in running.pool.scaling.autoscaler.reason, "a reason")
        for one in sent:
            assert isinstance(await one.told(10.0), Answer)

        assert len(running.pool.workers()) == 1
        assert "200 MiB" in running.pool.described["autoscaler"]["reason"]


async def test_a_pool_with_a_goal_learns_what_its_workers_need(tmp_path: Path) -> None:
    """Real batches of a handler that takes 20 ms an item; describe says what they cost."""
    async with RunningPool(tmp_path, workers=1, batch_size=16, batch_policy="goal", latency_goal_s=0.2) as running:
        await running.start()

        for _ in range(5):
            sent = [running.send(b"sleep 0.02") for _ in range(6)]
            for one in sent:
                assert isinstance(await one.told(10.0), Answer)

        goal = running.pool.described["goal"]
        assert goal["latencyGoalMs"] == 200.0
        assert goal["p95Ms"] >= 20.0
        assert 15.0 < goal["costs"][0]["itemMs"] + goal["costs"][0]["batchMs"] < 100.0
        assert len(running.calls()) > 5
