"""Who is in memory, step by step: nothing watches, time is what the test says, and each figure is looked at."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from marserve.errors import NoMemoryNow, NotEnoughMemory
from marserve.memory import host_memory, waiting_line
from marserve.memory.host_memory import Doing, HostMemory, MemoryOnHost, Sizes, sizes_of
from marserve.memory.learned_memory import LearnedMemory, key_of
from marserve.memory.ledger import Ledger
from marserve.memory.needs import MIB, Learned, Need
from marserve.memory.waiting_line import WaitingLine
from marserve.pool.options import PoolOptions
from marserve.telemetry.metrics.counts import VersionMetrics

pytestmark = pytest.mark.anyio


class Pool:
    """A pool that does what it is told; its processes are numbers."""

    def __init__(self, options: PoolOptions, reservations: object) -> None:
        self.options = options
        self.reservations = reservations
        self.metrics = VersionMetrics(options.model, options.version)
        self.can_sleep = options.min_workers == 0
        self.is_in_use = self.is_loading = False
        self.is_awaited = True
        self.wanted_workers = self.ready_workers = 0
        self.pids_by_worker: list[list[int]] = []
        self.template_pids: list[int] = []
        self.told: list[str] = []

    def sleep(self, reason: str) -> None:
        """Begin to have no process."""
        self.told.append(reason)

    async def wait_until_asleep(self) -> None:
        """It is, at once."""
        self.pids_by_worker, self.ready_workers = [], 0

    def end_loading(self, why: str) -> None:
        """End what is loading."""
        self.told.append(why)


class Clock:
    """Time as the test says."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """Seconds."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the host's memory, and of the line."""
    made = Clock()
    monkeypatch.setattr(host_memory, "time", made)
    monkeypatch.setattr(waiting_line, "time", made)
    return made


class House:
    """The host's memory, which nothing watches; what is read of processes is in `sizes`."""

    def __init__(self, budget: int, *, least_residence_s: float = 0.0, shared: Sequence[int] = ()) -> None:
        self.learned = LearnedMemory(None)
        self.sizes: dict[tuple[int, ...], Sizes] = {}
        self.read: list[tuple[list[list[int]], list[int]]] = []
        self.host = HostMemory(
            WaitingLine(Ledger(budget), least_residence_s=least_residence_s),
            self.learned,
            shared_pids=lambda: list(shared),
            read_sizes=self._read,
        )

    def _read(self, workers: Sequence[Sequence[int]], template: Sequence[int]) -> Sizes:
        self.read.append(([list(pids) for pids in workers], list(template)))
        return self.sizes.get((*template, *(pid for own in workers for pid in own)), Sizes(0, 0, 0))

    def add(self, name: str, size: int | None, *, workers: int = 0, **options: Any) -> tuple[MemoryOnHost, Pool]:
        """A version that declares its size."""
        made = PoolOptions(name, "1.0", workers, max(1, workers), memory_bytes=size, **options)
        pool = self.host.house(made, lambda reservations: Pool(made, reservations))
        assert isinstance(pool, Pool)
        assert isinstance(pool.reservations, MemoryOnHost)
        assert pool.reservations.pool is pool
        return pool.reservations, pool

    async def measure(self) -> None:
        """Look at the processes once."""
        await self.host._measure()

    async def load(
        self, name: str, size: int, held: Sizes, pids: list[int], **options: Any
    ) -> tuple[MemoryOnHost, Pool]:
        """A version that is loaded, and was looked at."""
        version, pool = self.add(name, size, **options)
        if not version.reserved.workers:
            version.ask(1)
        pool.pids_by_worker, pool.ready_workers = [pids], 1
        self.sizes[tuple(pids)] = held
        version.loaded()
        await self.measure()
        return version, pool


# --------------------------------------------------------------------------------------------- words


async def test_a_need_is_estimated_by_how_workers_begin() -> None:
    """Forks of a loaded template share its weights; those on devices, in groups or of another Python do not."""
    here = House(10_000 * MIB)
    shared = here.add("shared", None, weight_bytes=100 * MIB)[0].reserved.need
    alone = [
        here.add(name, None, weight_bytes=100 * MIB, **options)[0].reserved.need
        for name, options in (
            ("fresh", {"worker_start": "fresh"}),
            ("ranks", {"parallel_type": "tp", "parallel_level": 2}),
            ("python", {"python": "/usr/bin/python3"}),
        )
    ]
    device = here.add("gpu", None, weight_bytes=100 * MIB, gpu_ids=(0,))[0].reserved.need

    assert shared == Need(360 * MIB, 48 * MIB, 360 * MIB, "estimated")
    assert [need.more_bytes for need in alone] == [360 * MIB] * 3
    assert device == Need(260 * MIB, 260 * MIB, 360 * MIB, "estimated")
    here.learned.put(("again", "1.0", 7), Learned(10, 2, 30, 1.5))
    again, _ = here.add("again", None, weight_bytes=7)
    assert again.reserved.need == Need(10, 2, 30, "learned")
    assert (again.holder.load_s, here.add("new", None, weight_bytes=8)[0].holder.load_s) == (1.5, 0.0)


async def test_describe_says_in_which_state_a_version_is() -> None:
    """Asleep, loading, loaded, leaving, waiting; with what it holds, is promised, and may be asked to do."""
    here = House(100)
    version, pool = here.add("a", 60)

    def told() -> Any:
        return version.described["memory"]

    assert told() == {
        "state": "asleep",
        "residentBytes": 0,
        "promisedBytes": 0,
        "neededBytes": 60,
        "neededForAnotherWorkerBytes": 48 * MIB,
        "source": "declared",
        "mayMakeRoom": True,
    }
    version.ask(1)
    assert (told()["state"], told()["promisedBytes"]) == ("loading", 60)
    pool.ready_workers = 1
    assert told()["state"] == "loaded"
    pool.ready_workers = 0
    here.host.line.ledger.leave(version.reserved)
    assert told()["state"] == "leaving"
    version.ask(1)
    assert told()["state"] == "waiting"
    pool.can_sleep = False
    assert told()["mayMakeRoom"] is False
    assert version.held_bytes == 0


async def test_a_pinned_version_makes_no_room_and_one_that_serves_nobody_always_does() -> None:
    """Whatever else it may."""
    here = House(100)
    pinned, _ = here.add("pinned", 10, is_pinned=True)
    always, _ = here.add("always", 10, workers=1)

    assert not pinned.holder.may_leave
    assert not always.holder.may_leave
    always.make_spare(always.close)
    assert always.holder.may_leave
    always.make_spare(None)
    assert not always.holder.may_leave


# --------------------------------------------------------------------------------------------- what is read when


async def test_a_model_that_has_just_loaded_is_read_at_once_and_settled(clock: Clock) -> None:
    """With the time that its load took; the promise falls to what it was seen to hold."""
    here = House(1000)
    version, pool = here.add("a", None, weight_bytes=0)
    version.reserved.need = Need(100, 10, 300, "estimated")
    version.ask(2)
    clock.now += 4.0
    pool.pids_by_worker, pool.template_pids, pool.ready_workers = [[1], [2]], [3], 2
    here.sizes[3, 1, 2] = Sizes(150, 30, 25)
    version.loaded()
    clock.now += 1.0
    version.loaded()

    await here.measure()

    assert version.holder.load_s == 4.0
    assert here.learned.get(key_of(version.holder.options)) == Learned(120, 30, 145, 4.0)
    assert version.reserved.need == Need(120, 30, 145, "learned")
    assert (version.reserved.promised_bytes, version.held_bytes) == (150, 150)
    assert not version.holder.is_unsettled
    assert here.read[0] == ([[1], [2]], [3])


async def test_while_more_workers_load_what_is_held_counts_and_the_promise_stays(clock: Clock) -> None:
    """The first one's size is learned already."""
    here = House(1000)
    version, pool = here.add("a", 100)
    version.reserved.need = Need(100, 10, 100, "declared")
    version.ask(2)
    pool.pids_by_worker, pool.ready_workers, pool.is_loading = [[1], [2]], 1, True
    here.sizes[1, 2] = Sizes(90, 60, 5)
    version.loaded()
    before = version.reserved.promised_bytes

    await here.measure()

    assert here.learned.get(key_of(version.holder.options)) == Learned(60, 60, 65, 0.0)
    assert version.holder.is_unsettled
    assert (version.held_bytes, version.reserved.promised_bytes) == (90, before)


@pytest.mark.parametrize(
    ("change", "is_read"),
    [
        ({}, False),
        ({"now": 1029.9}, False),
        ({"now": 1030.0}, True),
        ({"requests": 1}, True),
        ({"workers": [[1], [2]]}, True),
        ({"template": [3]}, True),
        ({"is_in_use": True}, True),
    ],
    ids=str,
)
async def test_sizes_are_read_again_where_something_has_happened(
    clock: Clock, change: dict[str, Any], is_read: bool
) -> None:
    """Or half a minute later: the kernel walks a process's memory for it."""
    here = House(1000)
    version, pool = await here.load("a", 100, Sizes(90, 90, 0), [1])
    pool.is_in_use = bool(change.get("is_in_use"))
    doing = Doing(change.get("requests", 0), change.get("workers", [[1]]), change.get("template", []))

    assert version.may_hold_more(doing, change.get("now", 1000.0)) is is_read


async def test_all_are_read_every_five_seconds_and_less_often_where_that_is_dear(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fifty times as long as a reading takes nothing is read again; shared processes are read with all."""
    here = House(1000, shared=[77])
    here.sizes[77,] = Sizes(40, 0, 0)
    _, pool = await here.load("a", 100, Sizes(90, 90, 0), [1])
    assert here.host.line.ledger.shared_bytes == 40
    pool.is_in_use = True
    here.read.clear()

    clock.now += 4.99
    await here.measure()
    assert here.read == []
    clock.now += 0.01
    await here.measure()
    assert here.read == [([[1]], []), ([], [77])]

    slow = here.host._read_sizes

    def read(workers: Sequence[Sequence[int]], template: Sequence[int]) -> Sizes:
        clock.now += 1.0
        return slow(workers, template)

    monkeypatch.setattr(here.host, "_read_sizes", read)
    clock.now += 5.0
    await here.measure()
    here.read.clear()
    clock.now += 99.0
    await here.measure()
    assert here.read == []
    clock.now += 1.0
    await here.measure()
    assert here.read != []


async def test_what_was_read_before_something_changed_does_not_count(clock: Clock) -> None:
    """Processes ended, or another loaded, while a thread was reading."""
    here = House(1000)
    version, pool = here.add("a", 100)
    version.ask(1)
    pool.pids_by_worker, pool.ready_workers = [[1]], 1

    def read(workers: Sequence[Sequence[int]], template: Sequence[int]) -> Sizes:
        pool.pids_by_worker, pool.ready_workers = [], 0
        version.emptied()
        return Sizes(500, 500, 0)

    here.host._read_sizes = read
    version.loaded()
    await here.measure()

    assert version.held_bytes == 0
    assert version.holder.is_unsettled
    assert here.learned.get(key_of(version.holder.options)) is None


async def test_who_is_leaving_or_waiting_is_not_read(clock: Clock) -> None:
    """Its processes are about to end, or there are none."""
    here = House(100)
    leaving, leaver = await here.load("leaving", 60, Sizes(60, 60, 0), [1])
    waiting, waiter = here.add("waiting", 90)
    waiting.ask(1)
    leaver.is_in_use = waiter.is_in_use = True
    waiter.pids_by_worker = [[2]]
    here.read.clear()
    clock.now += 100

    await here.measure()

    assert leaver.told == ["asleep: it made room, for waiting 1.0 needs 0 MiB"]
    assert leaver.metrics.evictions == 1
    assert here.read == [([], [])]  # shared processes, of which there are none
    await here.host.close_all()
    assert not waiting.reserved.is_waiting
    assert leaving.holder.loaded_at is None


@pytest.mark.parametrize("kind", ["worker", "template", "none"])
async def test_a_version_is_empty_when_its_last_process_has_ended(kind: str) -> None:
    """A template that is still there holds the model."""
    here = House(1000)
    version, pool = await here.load("a", 100, Sizes(90, 90, 0), [1])
    pool.pids_by_worker = [[1]] if kind == "worker" else []
    pool.template_pids = [2] if kind == "template" else []

    version.emptied()

    assert (version.held_bytes == 0) is (kind == "none")
    assert (version.holder.loaded_at is None) is (kind == "none")


# --------------------------------------------------------------------------------------------- who may come in


async def test_who_finds_no_room_waits_until_its_time_is_up_and_then_is_promised_nothing() -> None:
    """The next try asks again; what could never be had is said, and no reason for more tries at once."""
    here = House(100)
    busy, busy_pool = await here.load("busy", 80, Sizes(80, 80, 0), [1])
    busy_pool.is_in_use = True
    new, pool = here.add("new", 50, startup_timeout_s=0.01)
    new.ask(1)

    with pytest.raises(NoMemoryNow) as refused:
        await new.enter(())
    assert refused.value.retry_after_s == 1.0
    assert (new.reserved.is_waiting, new.reserved.promised_bytes) == (False, 0)

    pool.wanted_workers = 1
    entering = asyncio.create_task(new.enter(()))
    await asyncio.sleep(0)
    assert new.reserved.is_waiting
    with pytest.raises(NoMemoryNow):
        await entering
    busy_pool.can_sleep = False
    with pytest.raises(NoMemoryNow) as never:
        await new.enter(())
    assert never.value.retry_after_s == 1.0
    assert here.host.refused == 1
    busy.close()
    await asyncio.wait_for(new.enter(()), 5)
    assert new.reserved.promised_bytes == 50


async def test_a_model_that_nobody_waits_for_any_more_stands_in_nobodys_way(clock: Clock) -> None:
    """A quarter of a second after the last one left; who asks meanwhile begins the wait anew."""
    here = House(100)
    _, busy = await here.load("busy", 80, Sizes(80, 80, 0), [1])
    busy.is_in_use = True
    new, pool = here.add("new", 50)
    new.ask(1)
    forget = here.host.line.forget_unawaited

    pool.is_awaited = False
    forget()
    clock.now += 0.24
    forget()
    pool.is_awaited = True
    forget()
    pool.is_awaited = False
    forget()
    clock.now += 0.24
    forget()
    assert pool.told == []
    clock.now += 0.01
    forget()

    assert pool.told == ["asleep: no request waits for it any more"]
    assert not new.reserved.is_waiting
    other, other_pool = here.add("always", 15, workers=1)
    assert not other.reserved.is_waiting
    assert other_pool.told == []


async def test_the_least_residence_is_counted_from_the_load(clock: Clock) -> None:
    """Until then nobody is told to leave for another; a growth waits for it, too."""
    here = House(100, least_residence_s=10.0)
    old, old_pool = await here.load("old", 60, Sizes(60, 60, 0), [1])
    new, _ = here.add("new", 60)
    new.ask(1)
    clock.now += 9.9
    here.host.settle()
    assert old_pool.told == []

    clock.now += 0.1
    here.host.settle()

    assert len(old_pool.told) == 1
    await here.host.close_all()
    assert not new.reserved.is_waiting
    assert old.reserved.leaving_bytes == 0


async def test_spare_versions_leave_first_and_only_as_many_as_are_needed() -> None:
    """Each is told once, and what it held is on the books until it has gone."""
    here = House(300)
    told: list[str] = []
    spare = []
    for number, name in enumerate("abc"):
        version, _ = await here.load(name, 100, Sizes(100, 100, 0), [number], workers=1)
        version.make_spare(lambda name=name: told.append(name))
        spare.append(version)

    new, _ = here.add("new", 150, workers=1)

    assert told == ["a", "b"]
    assert new.reserved.is_waiting
    assert [version.reserved.leaving_bytes for version in spare] == [100, 100, 0]
    assert spare[0].holder.loaded_at is None
    assert not spare[0].holder.is_unsettled
    here.host.look_soon()
    here.host.settle()
    assert told == ["a", "b"]


async def test_more_workers_want_only_what_is_neither_free_nor_about_to_be() -> None:
    """A spare version is told to end for the rest, and for nothing else."""
    here = House(100)
    told: list[str] = []
    spare, _ = await here.load("spare", 50, Sizes(50, 50, 0), [1], workers=1)
    spare.make_spare(lambda: told.append("spare"))

    here.host.line.give_up_spare(0)
    assert told == []
    here.host.line.give_up_spare(1)
    assert told == ["spare"]
    again, _ = await here.load("again", 10, Sizes(10, 10, 0), [2], workers=1)
    again.make_spare(lambda: told.append("again"))
    here.host.line.give_up_spare(0)
    assert told == ["spare"]


async def test_a_load_that_takes_more_than_it_was_promised_is_ended_and_the_others_are_said_once(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Where nothing may be put to sleep it is said that models hold too much: once, until they do no longer."""
    here = House(100 * MIB)
    version, pool = await here.load("busy", 60 * MIB, Sizes(60 * MIB, 60 * MIB, 0), [1])
    pool.is_in_use = True
    version.reserved.measured_bytes = 150 * MIB

    for _ in range(3):
        here.host.settle()
    assert caplog.text.count("Models hold 50 MiB more than model_memory, 100 MiB") == 1
    version.reserved.measured_bytes = 60 * MIB
    here.host.settle()
    version.reserved.measured_bytes = 110 * MIB
    here.host.settle()
    assert caplog.text.count("Models hold 10 MiB more than model_memory") == 1

    pool.is_loading = True
    here.host.settle()
    assert pool.told == [
        "while it was loaded it took 110 MiB, more than the 60 MiB that were declared, and there is no more for it"
    ]
    assert version.held_bytes == 0


async def test_demand_is_what_came_since_it_was_counted() -> None:
    """Who was asked for more of late stays."""
    here = House(200)
    _, often = await here.load("often", 90, Sizes(90, 90, 0), [1])
    _, seldom = await here.load("seldom", 90, Sizes(90, 90, 0), [2])
    often.metrics.requests, seldom.metrics.requests = 50, 5
    here.host.line._count_demand()
    here.host.line._count_demand()

    new, _ = here.add("new", 60)
    new.ask(1)

    assert (len(often.told), len(seldom.told)) == (0, 1)
    await here.host.close_all()


@pytest.mark.parametrize(
    ("state", "pause_s"),
    [("nothing", None), ("loaded", 5.0), ("learned", 5.0), ("loading", 0.25), ("waiting", 0.02)],
)
async def test_the_watch_looks_as_often_as_there_is_reason_to(state: str, pause_s: float | None) -> None:
    """Not at all while no model is there."""
    here = House(100)
    version, pool = here.add("a", 60)
    if state != "nothing":
        version.ask(1)
    if state == "learned":
        here.learned.put(("m", "1", 1), Learned(1, 1, 1, 1.0))
    pool.is_loading = state == "loading"
    if state == "waiting":
        pool.is_in_use = pool.is_loading = True
        version.holder.loaded_at = None
        here.add("b", 90)[0].ask(1)

    assert here.host._pause_s() == pause_s


async def test_a_dry_run_weighs_the_version_of_that_name_that_serves(clock: Clock) -> None:
    """More workers cost what is missing; in another's place, what is left when that has gone."""
    here = House(100)
    serves, _ = await here.load("m", 40, Sizes(40, 40, 0), [1], workers=1)
    options = serves.holder.options

    assert here.host.foresee(options, 1, 1)["moreBytes"] == 0
    assert here.host.foresee(options, None, 1)["moreBytes"] == 40
    assert here.host.foresee(replace(options, memory_bytes=90), None, 1, options)["moreBytes"] == 50
    serves.make_spare(serves.close)
    assert here.host.foresee(options, 1, 1)["moreBytes"] == 40
    with pytest.raises(NotEnoughMemory):
        here.host.foresee(replace(options, memory_bytes=101), None, 1)
    assert here.host.refused == 0


@pytest.mark.parametrize("leaves", ["idle", "spare"])
async def test_a_growth_for_which_another_leaves_is_no_shortage(caplog: pytest.LogCaptureFixture, leaves: str) -> None:
    """Nothing that loads is ended for it, and nothing is said."""
    here = House(100 * MIB)
    other, other_pool = await here.load("other", 40 * MIB, Sizes(40 * MIB, 40 * MIB, 0), [1])
    told: list[str] = []
    if leaves == "spare":
        other.make_spare(lambda: told.append("spare"))
    grows, pool = await here.load("grows", 50 * MIB, Sizes(50 * MIB, 50 * MIB, 0), [2])
    pool.is_in_use = pool.is_loading = True
    grows.reserved.measured_bytes = 90 * MIB

    here.host.settle()

    assert len(told) + len(other_pool.told) == 1
    assert pool.told == []
    assert "none of them may be put to sleep" not in caplog.text
    await here.host.close_all()


async def test_what_one_worker_takes_with_its_template_is_all_that_there_is(clock: Clock) -> None:
    """A further one takes what the largest holds by itself."""
    here = House(1000)

    version, _ = await here.load("a", 100, Sizes(150, 30, 5), [1])

    assert here.learned.get(key_of(version.holder.options)) == Learned(150, 30, 155, 0.0)


async def test_the_end_waits_for_those_that_are_leaving() -> None:
    """Their processes hold memory until they have ended."""
    here = House(100)
    old, pool = await here.load("old", 60, Sizes(60, 60, 0), [1])
    may_end = asyncio.Event()
    pool.wait_until_asleep = may_end.wait  # type: ignore[method-assign,assignment]
    here.add("new", 60)[0].ask(1)

    ending = asyncio.create_task(here.host.close_all())
    done, _ = await asyncio.wait([ending], timeout=0.05)
    assert not done
    assert old.reserved.leaving_bytes == 60
    may_end.set()
    await asyncio.wait_for(ending, 5)

    assert old.reserved.leaving_bytes == 0
    assert pool.metrics.evictions == 1


# --------------------------------------------------------------------------------------------- what is left alone


async def test_more_workers_want_what_they_lack_and_not_what_their_version_has() -> None:
    """A spare version stays where what is about to come free is enough for them."""
    here = House(200)
    told: list[str] = []
    grows, _ = await here.load("grows", 80, Sizes(80, 80, 0), [1], workers=1)
    leaves, _ = await here.load("leaves", 60, Sizes(60, 60, 0), [2])
    spare, _ = await here.load("spare", 60, Sizes(60, 60, 0), [3], workers=1)
    grows.reserved.need = Need(80, 30, 80, "declared")
    spare.make_spare(lambda: told.append("spare"))
    here.host.line.ledger.leave(leaves.reserved)

    assert grows.grow(2) == 1

    assert told == []


async def test_a_version_that_has_its_memory_asks_for_no_more_when_its_pool_enters() -> None:
    """Only one whose wait was given up asks anew."""
    here = House(100)
    version, pool = here.add("a", 50)
    version.reserved.need = Need(50, 30, 50, "declared")
    version.ask(1)
    pool.wanted_workers = 2

    await version.enter(())

    assert (version.reserved.workers, version.reserved.promised_bytes) == (1, 50)


async def test_a_version_that_was_let_in_once_waits_when_it_asks_again() -> None:
    """It has slept since, and another has taken its memory."""
    here = House(100)
    again, _ = await here.load("again", 60, Sizes(60, 60, 0), [1], startup_timeout_s=0.01)
    await again.enter(())
    ledger = here.host.line.ledger
    ledger.gone(again.reserved, ledger.leave(again.reserved))
    _, busy = await here.load("busy", 80, Sizes(80, 80, 0), [2])
    busy.is_in_use = True

    again.ask(1)

    with pytest.raises(NoMemoryNow):
        await again.enter(())


@pytest.mark.parametrize("change", ["ask", "loaded", "emptied", "close"])
async def test_every_change_has_the_watch_look_at_once(change: str) -> None:
    """It may be asleep for as long as there is nothing to see."""
    here = House(100)
    version, _ = here.add("a", 60)
    changes = {"ask": lambda: version.ask(1)}
    here.host._soon.clear()

    changes.get(change, getattr(version, change, None))()  # type: ignore[misc]

    assert here.host._soon.is_set()


async def test_a_model_that_waits_a_second_time_has_its_patience_anew(clock: Clock) -> None:
    """The moment when its clients left the first time is forgotten."""
    here = House(100)
    _, busy = await here.load("busy", 80, Sizes(80, 80, 0), [1])
    busy.is_in_use = True
    new, pool = here.add("new", 50)
    pool.is_awaited = False
    new.ask(1)
    here.host.line.forget_unawaited()
    clock.now += 0.25
    here.host.line.forget_unawaited()
    assert len(pool.told) == 1

    new.ask(1)
    here.host.line.forget_unawaited()

    assert new.reserved.is_waiting
    assert len(pool.told) == 1


async def test_what_spare_versions_free_is_not_taken_from_others_too() -> None:
    """One that may sleep leaves for the rest of what is needed."""
    here = House(100)
    told: list[str] = []
    spare, _ = await here.load("spare", 30, Sizes(30, 30, 0), [1], workers=1)
    spare.make_spare(lambda: told.append("spare"))
    _, idle = await here.load("idle", 20, Sizes(20, 20, 0), [2])
    _, busy = await here.load("busy", 50, Sizes(50, 50, 0), [3])
    busy.is_in_use = True

    here.add("new", 50)[0].ask(1)

    assert told == ["spare"]
    assert (len(idle.told), len(busy.told)) == (1, 0)
    await here.host.close_all()


async def test_a_spare_version_that_frees_exactly_enough_goes_alone() -> None:
    """The next one serves as soon as it is wanted again."""
    here = House(200)
    told: list[str] = []
    for number, name in enumerate("ab"):
        version, _ = await here.load(name, 100, Sizes(100, 100, 0), [number], workers=1)
        version.make_spare(lambda name=name: told.append(name))

    here.add("new", 100, workers=1)

    assert told == ["a"]


async def test_of_a_version_that_has_left_nothing_is_kept() -> None:
    """A server that swaps models for months would hold a task for each."""
    here = House(100)
    await here.load("old", 60, Sizes(60, 60, 0), [1])
    here.add("new", 60)[0].ask(1)
    assert len(here.host.line._leaving) == 1

    await here.host.close_all()
    await asyncio.sleep(0)

    assert not here.host.line._leaving


async def test_a_version_whose_pool_is_still_being_made_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    """By the shortage, by the watch, and by what looks for models that no client waits for."""
    here = House(100 * MIB)
    busy, pool = await here.load("busy", 60 * MIB, Sizes(60 * MIB, 60 * MIB, 0), [1])
    pool.is_in_use = True
    made = here.host.admit(PoolOptions("made", "1.0", 0, 1, memory_bytes=50 * MIB))
    made.ask(1)

    busy.reserved.measured_bytes = 150 * MIB
    here.host.settle()
    here.host.line.forget_unawaited()
    assert made.reserved.is_waiting
    assert caplog.text.count("Models hold 50 MiB more than model_memory") == 1

    here.host.line.withdraw(made.holder)
    assert here.host._pause_s() == 5.0


async def test_the_watch_looks_at_one_model_in_memory_beside_others_that_sleep() -> None:
    """One is enough."""
    here = House(100)
    here.add("asleep", 10)
    await here.load("loaded", 60, Sizes(60, 60, 0), [1])

    assert here.host._pause_s() == 5.0


async def test_what_was_read_of_a_load_that_was_ended_meanwhile_does_not_count() -> None:
    """Its processes are about to go, and its memory is not on the books a second time."""
    here = House(100)
    version, pool = here.add("liar", 50)
    version.ask(1)
    pool.pids_by_worker, pool.is_loading, pool.is_in_use = [[1]], True, True

    def read(workers: Sequence[Sequence[int]], template: Sequence[int]) -> Sizes:
        if workers:
            version.reserved.measured_bytes = 400
            here.host.settle()
            pool.is_loading = False
        return Sizes(400 * len(workers), 0, 0)

    here.host._read_sizes = read
    await here.measure()

    assert len(pool.told) == 1
    assert version.held_bytes == 0


async def test_what_was_read_of_a_version_that_was_closed_meanwhile_teaches_nothing() -> None:
    """Its processes were ending while they were read."""
    here = House(100)
    version, pool = here.add("a", 50)
    version.ask(1)
    pool.pids_by_worker, pool.ready_workers = [[1]], 1

    def read(workers: Sequence[Sequence[int]], template: Sequence[int]) -> Sizes:
        version.close()
        return Sizes(20, 20, 0)

    here.host._read_sizes = read
    version.loaded()
    await here.measure()

    assert here.learned.get(key_of(version.holder.options)) is None


async def test_sizes_are_those_of_processes_where_nothing_else_is_said() -> None:
    """A template by itself is no worker; without a process there is nothing."""
    options = PoolOptions("m", "1.0", 0, 1, memory_bytes=MIB)
    made = HostMemory(WaitingLine(Ledger(10_000 * MIB), least_residence_s=0.0), LearnedMemory(None))
    pool = made.house(options, lambda reservations: Pool(options, reservations))
    version = pool.reservations
    assert isinstance(version, MemoryOnHost)
    version.ask(1)
    pool.pids_by_worker, pool.ready_workers = [[os.getpid()]], 1
    version.loaded()

    await made._measure()

    assert version.held_bytes > 5 * MIB
    assert sizes_of([], [os.getpid()]).largest_worker == 0
    assert sizes_of([], []) == Sizes(0, 0, 0)


async def test_what_was_learned_is_written_at_once_and_then_every_five_seconds(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A fleet that loads models all day does not write a file for each."""
    monkeypatch.setattr(host_memory, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(host_memory, "PAUSE_PER_READING", 0.0)
    learned = LearnedMemory(tmp_path / "memory.json")
    looks: list[float] = []
    made = HostMemory(
        WaitingLine(Ledger(100), least_residence_s=0.0),
        learned,
        shared_pids=lambda: looks.append(clock.now) or [],  # type: ignore[func-returns-value]
        read_sizes=lambda *_: Sizes(0, 0, 0),
    )
    watch = asyncio.create_task(made.run())

    async def look() -> None:
        for _ in range(2):  # the first may have begun before
            seen = len(looks)
            made.look_soon()
            async with asyncio.timeout(5):
                while len(looks) == seen:
                    await asyncio.sleep(0)

    learned.put(("a", "1.0", 1), Learned(1, 1, 1, 1.0))
    await look()
    await look()
    assert not learned.is_changed
    learned.put(("b", "1.0", 1), Learned(1, 1, 1, 1.0))
    clock.now += 4.99
    await look()
    await look()
    assert learned.is_changed
    clock.now += 0.02
    await look()
    await look()
    assert not learned.is_changed
    watch.cancel()
    await asyncio.wait([watch])
