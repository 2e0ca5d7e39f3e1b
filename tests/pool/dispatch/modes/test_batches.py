"""Tests for batches: which worker gets the next one, what is sent ahead, and what a death gives back."""

from __future__ import annotations

from typing import Any

import pytest

from marserve.errors import NoTicket, WorkerDied
from support.mode_stage import ModeStage

GOAL = {"batch_policy": "goal", "latency_goal_s": 1.0}


def taught(*keys: str, run_s: float = 0.001, **options: Any) -> ModeStage:
    """A stage whose idle workers are known to take so long for a batch."""
    stage = ModeStage(**options)
    for key in keys:
        stage.open(key)
        for _ in range(options.get("batch_size", 1)):
            stage.submit("teach")
        while stage.flights[key]:
            stage.answer(key, run_s=run_s)
    return stage


def sent_to(stage: ModeStage, key: str) -> list[list[str]]:
    """The bodies of each batch that a worker has, oldest first."""
    return [[job.request.parts[0].body.decode() for job in flight.jobs] for flight in stage.flights[key]]


# ------------------------------------------------------------------------------------------- sending ahead


def test_a_worker_of_unknown_speed_is_sent_nothing_ahead() -> None:
    """Its first batch may take a minute; what was sent ahead would be bound to it."""
    stage = ModeStage()
    stage.open("w")

    for body in "12":
        stage.submit(body)

    assert sent_to(stage, "w") == [["1"]]


def test_a_slow_worker_is_sent_nothing_ahead() -> None:
    """What it hides is the time on the wire, and that is nothing to this handler."""
    stage = taught("w", run_s=1.0)

    for body in "12":
        stage.submit(body)

    assert sent_to(stage, "w") == [["1"]]


def test_a_quick_worker_is_sent_one_batch_ahead_and_no_more() -> None:
    """The third waits for the worker that is free first."""
    stage = taught("w")

    clients = [stage.submit(body) for body in "123"]

    assert sent_to(stage, "w") == [["1"], ["2"]]
    for _ in range(3):
        stage.answer("w")
    assert [client.body for client in clients] == [b"1", b"2", b"3"]


def test_nothing_is_sent_ahead_to_a_worker_that_runs_a_suspect() -> None:
    """An item that is run by itself after a death may kill again; what was sent ahead would wait for the next one."""
    stage = ModeStage()
    stage.open("a")
    stage.submit("suspect")
    stage.die("a")
    stage.open("b")
    stage.answer("b")  # quick, as far as is known
    stage.submit("suspect too")
    stage.die("b")
    stage.open("c")
    stage.dispatcher.lanes.by_key["c"].mean_run_s = 0.001

    stage.submit("behind")

    assert sent_to(stage, "c") == [["suspect too"]]


def test_nothing_is_sent_ahead_while_a_worker_is_idle() -> None:
    """Two workers, two requests: one each."""
    stage = taught("a")
    stage.open("b")

    for body in "12":
        stage.submit(body)

    assert len(stage.flights["a"]) == len(stage.flights["b"]) == 1


def test_the_second_batch_goes_to_the_worker_that_began_first() -> None:
    """It will be free first."""
    stage = taught("a", "b")
    stage.submit("1", now=1.0)
    first = next(key for key in "ab" if stage.flights[key])
    stage.submit("2", now=2.0)

    stage.submit("3", now=3.0)

    assert sent_to(stage, first) == [["1"], ["3"]]


def test_with_the_fixed_policy_nothing_is_sent_ahead_and_no_moment_is_waited_for() -> None:
    """A busy worker asks when it is done, as in TorchServe."""
    stage = taught("w", batch_policy="fixed", max_batch_delay_s=0.0)

    for body in "12":
        stage.submit(body)

    assert sent_to(stage, "w") == [["1"]]
    assert stage.dispatcher.next_wake() is None


def test_a_group_is_not_sent_ahead_with_a_full_batch_behind_it() -> None:
    """It may hold what kills; the batch that waits with it may go."""
    stage = taught("w", "x")
    stage.submit("suspect")
    home, other = ("w", "x") if stage.at("w") else ("x", "w")
    stage.submit("long")
    stage.die(home)

    stage.submit("behind")

    assert sent_to(stage, other) == [["long"], ["behind"]]
    stage.answer(other)
    stage.answer(other)
    assert sent_to(stage, other) == [["suspect"]]


def test_with_a_goal_a_batch_goes_ahead_only_to_a_worker_with_room_and_no_moment_is_waited_for() -> None:
    """A goal looks at what waits whenever a batch ends, and has no delay."""
    stage = taught("w", batch_size=1, max_batch_delay_s=0.1, **GOAL)
    for body in "123":
        stage.submit(body)

    assert sent_to(stage, "w") == [["1"], ["2"]]
    assert stage.dispatcher.next_wake() is None
    stage.answer("w")
    assert sent_to(stage, "w") == [["2"], ["3"]]


def test_with_a_goal_a_batch_that_is_not_full_is_not_sent_ahead() -> None:
    """It may grow until the worker is free."""
    stage = taught("w", batch_size=2, **GOAL)

    for body in "12":
        stage.submit(body)

    assert sent_to(stage, "w") == [["1"]]
    stage.submit("3")
    assert sent_to(stage, "w") == [["1"], ["2", "3"]]


def test_a_delay_is_waited_for_only_if_a_busy_worker_may_be_sent_a_batch() -> None:
    """Else the end of a batch is the next moment at which something changes."""
    quick, slow = (taught("w", run_s=run_s, batch_size=2, max_batch_delay_s=0.1) for run_s in (0.001, 1.0))
    for stage in (quick, slow):
        stage.submit("1", now=5.0)
        stage.submit("2", now=6.0)

    assert quick.dispatcher.next_wake() == pytest.approx(6.1)
    assert slow.dispatcher.next_wake() is None


def test_an_emptied_queue_ends_the_collecting_of_a_batch() -> None:
    """The next request has the whole delay, however the ones before it left."""
    stage = ModeStage(batch_policy="fixed", batch_size=2, max_batch_delay_s=0.1)
    stage.open("w")
    stage.submit("gone", now=0.0).job.cancel()
    stage.submit("expired", now=0.0, deadline=0.05)
    stage.dispatcher.wake(0.05)

    stage.submit("a", now=0.09)

    assert stage.dispatcher.next_wake() == pytest.approx(0.19)


# ------------------------------------------------------------------------------------------- admission


def test_there_is_a_job_ticket_for_each_idle_worker() -> None:
    """A busy one has none, though it may be sent a batch ahead."""
    stage = taught("w", "x", use_job_ticket=True)
    stage.submit("1")
    stage.submit("2")

    with pytest.raises(NoTicket):
        stage.submit("3")


# ------------------------------------------------------------------------------------------- deaths


@pytest.mark.parametrize("may_retry", [True, False])
def test_an_idle_worker_that_ends_takes_no_request_along(may_retry: bool) -> None:
    """Whatever it was ended for."""
    stage = ModeStage()
    stage.open("w")

    stage.die("w", may_retry=may_retry)
    client = stage.submit("a")

    assert not client.ends
    assert stage.dispatcher.waiting == 1


@pytest.mark.parametrize("is_suspect", [True, False])
def test_what_a_dead_worker_preprocessed_ahead_runs_by_itself_and_has_no_death(is_suspect: bool) -> None:
    """It may have ended the worker as well, unless its machine was lost; nothing is sent ahead beside it."""
    stage = ModeStage(batch_size=2)
    stage.dispatcher.open_lane("w", 0.0, overlaps=True)
    first, *ahead = [stage.submit(body) for body in "123"]

    stage.die("w", begun=1, is_suspect=is_suspect)
    stage.dispatcher.open_lane("x", 0.0, overlaps=True)
    stage.answer("x")
    stage.submit("4")
    stage.submit("5")

    assert [job.job.deaths for job in (first, *ahead)] == [int(is_suspect), 0, 0]
    assert sent_to(stage, "x") == ([["2", "3"]] if is_suspect else [["2", "3"], ["4", "5"]])


def test_of_a_worker_past_its_limit_only_the_oldest_batch_fails() -> None:
    """It was ended because of that one; what was sent ahead goes to another worker, with no death of its own."""
    stage = taught("w")
    slow, ahead = stage.submit("1"), stage.submit("2")

    stage.die("w", begun=0, may_retry=False)
    stage.open("x")

    assert isinstance(slow.end, WorkerDied)
    assert sent_to(stage, "x") == [["2"]]
    assert ahead.job.deaths == 0
