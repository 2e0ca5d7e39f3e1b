"""The sizing of `docs/deploy/growing.md`: its formulas, the simulation that judges them, and the page's own words."""

from __future__ import annotations

import math
import sys
from importlib import import_module
from typing import Any

import pytest

from support.commands import type_in
from support.distributions import ROOT
from support.pages import block

PAGE = "docs/deploy/growing.md"


@pytest.fixture(scope="module")
def queueing() -> Any:
    """The formulas, which lie with the benchmarks."""
    return import_module("queueing")


@pytest.fixture(scope="module")
def world() -> Any:
    """The simulation."""
    return import_module("growing_world")


@pytest.fixture(scope="module")
def growing() -> Any:
    """The program."""
    return import_module("growing")


@pytest.fixture
def free(world: Any) -> Any:
    """A front end that costs nothing."""
    return world.Costs(request_s=0.0, batch_s=0.0, lane_s=0.0, scrape_s=0.0, scrape_worker_s=0.0, upkeep_worker_s=0.0)


# -------------------------------------------------------------------------------------------------------- the formulas


@pytest.mark.parametrize(("workers", "offered", "chance"), [(1, 0.5, 0.5), (2, 1.0, 1 / 3), (10, 8.0, 0.40918)])
def test_the_chance_to_wait_is_erlangs(queueing: Any, workers: int, offered: float, chance: float) -> None:
    """One worker: its utilisation. Two and ten: as tables have it."""
    assert queueing.erlang_c(workers, offered) == pytest.approx(chance, abs=1e-5)


def test_work_that_always_takes_the_same_waits_half_as_long(queueing: Any) -> None:
    """Pollaczek and Khinchine: M/D/1 beside M/M/1, which waits for rho / (mu - lambda)."""
    steady, random = queueing.Work(0.01), queueing.Work(0.01, variation=1.0)

    assert queueing.mean_wait_s(1, 80.0, random) == pytest.approx(0.8 / (100 - 80))
    assert queueing.mean_wait_s(1, 80.0, steady) == pytest.approx(0.5 * 0.8 / (100 - 80))


def test_workers_that_cannot_keep_up_are_waited_for_without_end(queueing: Any) -> None:
    """At 100 % already."""
    assert queueing.mean_wait_s(2, 200.0, queueing.Work(0.01)) == math.inf
    assert queueing.erlang_c(2, 2.0) == 1.0


# ------------------------------------------------------------------------------------------------------ the simulation


@pytest.mark.parametrize(
    ("workers", "rate", "variation", "seconds"),
    [
        (1, 70.0, 1.0, 120.0),
        (1, 70.0, 0.0, 60.0),
        (4, 320.0, 1.0, 60.0),
        pytest.param(1, 70.0, 1.0, 300.0, marks=pytest.mark.long),
        pytest.param(1, 70.0, 0.0, 300.0, marks=pytest.mark.long),
        pytest.param(4, 320.0, 1.0, 300.0, marks=pytest.mark.long),
    ],
)
def test_the_simulation_waits_as_the_formulas_say(
    queueing: Any, world: Any, free: Any, workers: int, rate: float, variation: float, seconds: float
) -> None:
    """Mean time to answer within a tenth of M/M/c, and of M/D/1, where a front end costs nothing."""
    work = queueing.Work(0.01, variation=variation)
    seen = [world.simulate(1, workers, rate, work, free, seconds, seed).mean_s for seed in (1, 2, 3)]

    expected = queueing.mean_wait_s(workers, rate, work) + 0.01
    assert sum(seen) / 3 == pytest.approx(expected, rel=0.1)


def test_one_front_end_answers_no_more_than_its_loop_has_time_for(queueing: Any, world: Any) -> None:
    """Requests of 100 µs and batches of 300 µs, one by one: 2,500 a second, however many workers there are."""
    costs = world.Costs(100e-6, 300e-6, 0.0, 0.0, 0.0, 0.0)
    seen = world.simulate(1, 1000, 2400.0, queueing.Work(0.005), costs, 2.0)
    over = world.simulate(1, 1000, 3000.0, queueing.Work(0.005), costs, 2.0)
    two = world.simulate(2, 1000, 3000.0, queueing.Work(0.005), costs, 2.0)

    assert seen.loop == pytest.approx(2400 / 2500, abs=0.03)
    assert over.loop == pytest.approx(1.0, abs=0.01)
    assert over.per_second < 2500
    assert two.per_second == pytest.approx(3000, rel=0.05)


def test_a_batch_is_what_waits_when_a_worker_is_idle(queueing: Any, world: Any, free: Any) -> None:
    """Few requests run alone; where workers are scarce batches grow as large as they may."""
    work = queueing.Work(0.010, 0.001, batch=8)
    quiet = world.simulate(1, 4, 10.0, work, free, 30.0)
    busy = world.simulate(1, 1, 600.0, work, free, 10.0)

    assert quiet.together == pytest.approx(1.0, abs=0.02)
    assert busy.together == pytest.approx(8.0, abs=0.1)
    assert busy.per_second == pytest.approx(work.per_worker, rel=0.03)


def test_a_scheduler_that_takes_longer_for_each_worker_limits_a_pool(queueing: Any, world: Any, growing: Any) -> None:
    """While requests wait. The formula says how large a pool may be, and the simulation agrees on both sides of it."""
    costs = world.Costs(20e-6, 30e-6, 150e-9, 0.0, 0.0, 0.0)
    work = growing.FULL_WORK
    most = growing.busiest_pool(work, costs)

    def share_answered(workers: int) -> float:
        seen = world.simulate(1, workers, 1.2 * workers * work.per_worker, work, costs, 2.0)
        return float(seen.per_second / (workers * work.per_worker))

    assert share_answered(most // 2) > 0.9
    assert share_answered(2 * most) < 0.5
    of_requests_alone = growing.busiest_pool(work, world.Costs(20e-6, 30e-6, 0.0, 0.0, 0.0, 0.0))
    assert of_requests_alone == math.floor(1 / (work.per_worker * (20e-6 + 30e-6 / work.batch)))


def test_upkeep_takes_no_more_than_its_part_however_many_workers_there_are(world: Any) -> None:
    """Sizes are read for a fiftieth of the time at most, as `memory/host_memory.py` has it."""
    from marserve.memory.host_memory import PAUSE_PER_READING

    costs = world.Costs(0.0, 0.0, 0.0, 0.0, 0.0, 100e-6)

    assert pytest.approx(1 / PAUSE_PER_READING) == world.MOST_UPKEEP
    assert costs.upkeep(100) == pytest.approx(0.01)
    assert costs.parts(1.0, 1.0, 10_000)["upkeep"] == world.MOST_UPKEEP


def test_a_scrape_is_waited_for(queueing: Any, world: Any) -> None:
    """Who comes while the loop writes a page of metrics waits until it is written."""
    costs = world.Costs(10e-6, 10e-6, 0.0, 0.0, 100e-6, 0.0)
    work = queueing.Work(0.001)
    without = world.simulate(1, 1000, 500.0, work, costs, 2.0)
    scraped = world.simulate(1, 1000, 500.0, work, costs, 2.0, scrape_at_s=1.0)

    assert scraped.scraped_s == pytest.approx(0.1)
    assert without.p99_s < 0.01
    assert scraped.p99_s > 0.05


# ---------------------------------------------------------------------------------------------------------- the sizing


@pytest.mark.parametrize(
    ("rate", "words", "wait_s"),
    [
        pytest.param(50.0, {"fixed_s": 0.02}, 0.05, marks=pytest.mark.long),
        (400.0, {"fixed_s": 0.02, "variation": 1.0}, 0.02),
        (4000.0, {"fixed_s": 0.02, "item_s": 0.002, "batch": 16}, 0.1),
    ],
)
def test_a_sizing_keeps_its_word_and_needs_what_it_asks_for(
    queueing: Any, growing: Any, world: Any, rate: float, words: dict[str, Any], wait_s: float
) -> None:
    """With another seed and longer, 99 of 100 wait no longer than a tenth more; a fifth fewer workers would not do."""
    work = queueing.Work(**words)
    sized = growing.size(rate, work, wait_s)

    seen = world.simulate(sized.front_ends, sized.workers, rate, work, growing.MEASURED, 20_000 / rate, seed=9)
    fewer = max(1, math.floor(0.8 * sized.workers))
    less = world.simulate(sized.front_ends, fewer, rate, work, growing.MEASURED, 20_000 / rate, seed=9)

    assert seen.wait_p99_s <= 1.1 * wait_s + 0.1 * work.service_s()
    assert less.wait_p99_s > wait_s or rate / fewer / work.per_worker > growing.MOST_USED


def test_more_front_ends_where_one_is_full(queueing: Any, growing: Any) -> None:
    """At 200,000 requests a second of quick work."""
    assert growing.size(200_000.0, queueing.Work(0.002), 0.01).front_ends > 4


@pytest.mark.parametrize("words", [(0.0, 0.02, 0.1), (10.0, 0.02, 0.0)])
def test_what_cannot_be_sized_is_refused(queueing: Any, growing: Any, words: tuple[float, float, float]) -> None:
    """No rate, no wait."""
    rate, service_s, wait_s = words
    with pytest.raises(ValueError, match="above 0"):
        growing.size(rate, queueing.Work(service_s), wait_s)


@pytest.mark.parametrize("said", ["soon", "-1ms", "inf"])
def test_a_time_that_is_none_is_a_usage_error(growing: Any, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The sentence has the word and what to write."""
    with pytest.raises(SystemExit) as ended:
        growing.main(["size", "--rate", "10", f"--service={said}", "--wait", "10ms"])

    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_the_real_dispatcher_is_what_the_scheduler_is_measured_on(growing: Any) -> None:
    """Each size has a time; it is the slope between the smallest and the largest that is used."""
    taken = growing.scheduler_lane_s(sizes=(2, 200), requests=50)

    assert set(taken) == {2, 200}
    assert min(taken.values()) > 0
    assert growing.slope({10: 1e-6, 110: 3e-6}) == pytest.approx(2e-8)


@pytest.mark.parametrize("kind", ["idle", "waiting", "ahead", "deadlines"])
def test_the_stand_ins_are_what_they_are_called(kind: Any) -> None:
    """How many workers are idle, how many requests wait, and how many batches were sent ahead, in the steady state."""
    scheduler = import_module("scheduler")
    stand_in = scheduler.StandIn(kind, 20)

    stand_in.answer(100)

    dispatcher = stand_in._dispatcher
    seen = {"busy": dispatcher.busy_lanes, "running": dispatcher.running, "waiting": dispatcher.waiting}
    assert (
        seen
        == {
            "idle": {"busy": 10, "running": 10, "waiting": 0},
            "waiting": {"busy": 20, "running": 20, "waiting": 20},
            "ahead": {"busy": 20, "running": 40, "waiting": 40},
            "deadlines": {"busy": 20, "running": 20, "waiting": 20},
        }[kind]
    )
    assert (dispatcher._mode._free_order is not None) == (kind == "deadlines")


# ------------------------------------------------------------------------------------------------------------ the page


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        (block(PAGE, "alone"), block(PAGE, "alone-answer")),
        (block(PAGE, "together"), block(PAGE, "together-answer")),
        pytest.param(block(PAGE, "split"), block(PAGE, "split-answer"), marks=pytest.mark.long),
    ],
    ids=["alone", "together", "split"],
)
def test_the_pages_sizings_are_what_the_program_prints(typed: str, answer: str) -> None:
    """Word for word: the simulation's dice are its own."""
    ran = type_in(typed.replace("python ", f"{sys.executable} "), ROOT, ROOT)

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == answer


@pytest.mark.long
def test_the_pages_table_goes_to_ten_thousand_workers_and_a_million_requests() -> None:
    """As the program prints it."""
    ran = type_in(block(PAGE, "paper").replace("python ", f"{sys.executable} "), ROOT, ROOT)

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == block(PAGE, "paper-answer")
    last = ran.stdout.splitlines()[-2].replace(",", "").split()
    assert (int(last[0]), int(last[1])) == (10_000, 1_000_000)
