"""Versions load for the first time in turns."""

from __future__ import annotations

import asyncio

import pytest

from marserve.pool.slots.first_load import FirstLoad
from support.turns import let_all_run

pytestmark = pytest.mark.anyio


class Loading:
    """A worker of a version that loads until it is told how that ended."""

    def __init__(self, version: FirstLoad) -> None:
        self.has_begun = False
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.task = asyncio.ensure_future(self._load(version))

    async def _load(self, version: FirstLoad) -> None:
        async with version.turn():
            self.has_begun = True
            await self.end


async def test_so_many_load_at_once_and_the_others_in_turn() -> None:
    """Who waited longest is next."""
    turns = asyncio.Semaphore(2)
    workers = [Loading(FirstLoad(turns)) for _ in range(4)]
    await let_all_run()
    assert [worker.has_begun for worker in workers] == [True, True, False, False]

    workers[1].end.set_result(None)
    await let_all_run()

    assert [worker.has_begun for worker in workers] == [True, True, True, False]
    for worker in workers:
        worker.task.cancel()


async def test_workers_of_one_version_share_its_turn() -> None:
    """It is given back when the last of them is done, though the first one has loaded long ago."""
    turns = asyncio.Semaphore(1)
    version, other = FirstLoad(turns), FirstLoad(turns)
    mates = [Loading(version), Loading(version)]
    waits = Loading(other)
    await let_all_run()
    assert [mate.has_begun for mate in mates] == [True, True]

    mates[0].end.set_result(None)
    await let_all_run()
    assert not waits.has_begun
    mates[1].end.set_exception(OSError("it could not"))
    await let_all_run()

    assert waits.has_begun
    assert isinstance(mates[1].task.exception(), OSError)
    waits.end.set_result(None)
    await waits.task


async def test_a_version_that_was_loaded_waits_for_nobody() -> None:
    """A worker that died is back at once, whatever else loads."""
    turns = asyncio.Semaphore(1)
    version = FirstLoad(turns)
    first = Loading(version)
    first.end.set_result(None)
    await first.task
    other = Loading(FirstLoad(turns))
    await let_all_run()
    assert other.has_begun

    again = Loading(version)
    await let_all_run()

    assert again.has_begun
    for worker in (other, again):
        worker.end.set_result(None)
        await worker.task


async def test_a_load_that_failed_takes_a_turn_again() -> None:
    """It is as long as the first one."""
    turns = asyncio.Semaphore(1)
    version = FirstLoad(turns)
    first = Loading(version)
    await let_all_run()
    first.end.set_exception(OSError("it could not"))
    await let_all_run()
    assert isinstance(first.task.exception(), OSError)
    other = Loading(FirstLoad(turns))
    await let_all_run()

    again = Loading(version)
    await let_all_run()
    assert not again.has_begun
    other.end.set_result(None)
    await let_all_run()

    assert again.has_begun
    again.end.set_result(None)
    await again.task


@pytest.mark.parametrize("hops", range(6))
async def test_who_goes_while_it_waits_leaves_no_turn_taken(hops: int) -> None:
    """At whatever moment: before its turn, or just when it comes."""
    turns = asyncio.Semaphore(1)
    first, waits = Loading(FirstLoad(turns)), Loading(FirstLoad(turns))
    await let_all_run()
    first.end.set_result(None)
    for _ in range(hops):
        await asyncio.sleep(0)
    waits.task.cancel()
    await asyncio.wait([waits.task, first.task])

    assert not turns.locked()
    assert await asyncio.wait_for(turns.acquire(), 1)


async def test_without_a_bound_nobody_waits() -> None:
    """Workers on other machines take nothing of this one."""
    workers = [Loading(FirstLoad(None)) for _ in range(50)]
    await let_all_run()

    assert all(worker.has_begun for worker in workers)
    for worker in workers:
        worker.end.set_result(None)
        await worker.task
