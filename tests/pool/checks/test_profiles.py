"""Profiles of real workers that serve: what they tell, and what happens if the worker, or the client, goes away."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from marserve.errors import BadFrame, CannotProfile
from marserve.messages import Answer, Profiled
from marserve.pool.checks.profiles import Profiles, ProfileWish
from marserve.pool.options import PoolOptions
from support.processes import until
from support.running_pool import RunningPool

pytestmark = pytest.mark.anyio

SOURCE = """
    import os
    def handle(rows, context):
        if rows is None:
            return None
        bodies = [bytes(row["body"]) for row in rows]
        if b"die" in bodies:
            os._exit(3)
        return bodies
"""
FOREVER = ProfileWish(0, 60.0, 1 << 26)


def no_matter(pids: list[int]) -> None:
    """Take the worker's processes, and do nothing with them."""


async def test_one_worker_measures_the_requests_that_it_answers_meanwhile(tmp_path: Path) -> None:
    """It ends after as many as were asked for; a second profile meanwhile is refused, and then one can be made."""
    async with RunningPool(tmp_path, SOURCE, workers=2) as running:
        await running.start()
        pool, pids = running.pool, list[int]()
        making = asyncio.create_task(pool.profile(ProfileWish(3, 60.0, 1 << 26), pids.extend))
        await until(lambda: pool.profiles.progress is not None, "a profile")
        with pytest.raises(CannotProfile, match=r"m 1\.0 is being profiled since 0 s, one at a time"):
            await pool.profile(FOREVER, lambda pids: pytest.fail("no second one is begun"))

        answers = [await running.ask(b"%d" % number) for number in range(8)]
        taken = await making

        assert answers == [Answer(b"%d" % number) for number in range(8)]
        assert [each.requests for each in taken.profiled.batches] == [1, 1, 1]
        assert taken.worker.startswith("W-")
        assert pids == [view.pid for view in pool.workers() if f"W-{view.id}-" in taken.worker]
        assert {name for name, _, _ in taken.others} == {slot.name for slot in pool.slots}
        assert pool.profiles.progress is None
        assert (await pool.profile(ProfileWish(0, 0.01, 0), no_matter)).profiled.batches == []


async def test_a_worker_that_dies_or_is_stopped_meanwhile_ends_the_profile_with_the_cause(tmp_path: Path) -> None:
    """Its requests are treated as ever, and the next worker can be profiled."""
    async with RunningPool(tmp_path, SOURCE) as running:
        await running.start()
        pool = running.pool
        making = asyncio.create_task(pool.profile(FOREVER, no_matter))
        await until(lambda: pool.profiles.progress is not None, "a profile")
        dying = asyncio.create_task(running.ask_body(b"die"))
        with pytest.raises(CannotProfile, match=r"that was profiled ended meanwhile \(exit: .*status 3"):
            await making
        with pytest.raises(Exception, match="died"):
            await dying

        await pool.wait_until_ready()
        making = asyncio.create_task(pool.profile(FOREVER, no_matter))
        await until(lambda: pool.profiles.progress is not None, "a profile")
        await pool.stop()
        with pytest.raises(CannotProfile, match="was stopped meanwhile: it was unregistered"):
            await making


async def test_a_client_that_goes_away_ends_the_profile_and_the_worker_serves_on(tmp_path: Path) -> None:
    """What it had measured is dropped."""
    async with RunningPool(tmp_path, SOURCE) as running:
        await running.start()
        making = asyncio.create_task(running.pool.profile(FOREVER, no_matter))
        await until(lambda: running.pool.profiles.progress is not None, "a profile")
        await running.ask_body(b"a")

        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making

        assert await running.ask_body(b"b") == b"b"
        assert running.pool.profiles.progress is None
        again = await running.pool.profile(ProfileWish(0, 0.01, 0), no_matter)
        assert again.profiled.batches == []


async def test_what_cannot_be_measured_is_refused_with_the_reason(tmp_path: Path) -> None:
    """A pool without workers, and one whose workers run many batches at once."""
    async with RunningPool(tmp_path, SOURCE, workers=0, most=1) as running:
        with pytest.raises(CannotProfile, match=r"no worker that has loaded it.*scale it up"):
            await running.pool.profile(FOREVER, no_matter)
    async with RunningPool(tmp_path / "many", SOURCE, is_concurrent=True) as running:
        with pytest.raises(CannotProfile, match="asyncCommunication"):
            await running.pool.profile(FOREVER, no_matter)


def test_a_profile_that_was_never_asked_for_is_a_broken_workers() -> None:
    """One that was given up comes late, and is dropped."""
    profiles = Profiles(PoolOptions("m", "1.0", 1, 1), lambda key, order: None, lambda key: 0)

    def said(number: int, *traces: int) -> Profiled:
        return Profiled(number, 0.0, 0.0, [], list(traces), 0, 1, 1, True, 0.0)

    with pytest.raises(BadFrame, match="profile 1 of 0"):
        profiles.on_profiled("9000/1", said(1), [])
    profiles._last = 2
    profiles.on_profiled("9000/1", said(1), [])
    with pytest.raises(BadFrame, match="with 1 traces"):
        profiles.on_profiled("9000/1", said(2, 0, 1), [b""])
