"""Tests for workers that run many batches at once: when they are sent, in which order they end, what a death costs."""

from __future__ import annotations

import dataclasses

import pytest

from marserve.errors import BadFrame, FingerprintRefused, HandlerFailed, NoTicket, WorkerDied
from marserve.messages import Result
from support.blind import Blind
from support.mode_stage import ModeStage


def stage_of(**options: object) -> ModeStage:
    """A stage whose workers run many batches at once."""
    return ModeStage(**{"is_concurrent": True, **options})


def test_a_busy_worker_is_sent_the_next_request_at_once_and_ends_them_in_any_order() -> None:
    """Nobody waits for a handler that waits for something else."""
    stage = stage_of()
    stage.open("w")
    clients = [stage.submit(body) for body in "abc"]

    sent = [[job.request.id for job in flight.jobs] for flight in stage.flights["w"]]
    stage.answer("w", which=2)
    stage.answer("w", which=0)

    assert sent == [["r0"], ["r1"], ["r2"]]
    assert [client.body for client in clients] == [b"a", None, b"c"]


def test_the_worker_with_the_fewest_requests_is_next() -> None:
    """Two workers share."""
    stage = stage_of()
    stage.open("w", "x")

    for body in "abcd":
        stage.submit(body)

    assert len(stage.flights["w"]) == len(stage.flights["x"]) == 2


def test_no_request_costs_a_look_at_every_worker() -> None:
    """Neither its batch nor its answer, while there is room and when there is none."""
    stage = stage_of(most_concurrent=3)
    keys = [str(number) for number in range(5)]
    stage.open(*keys)
    stage.dispatcher.lanes.by_key = Blind(stage.dispatcher.lanes.by_key)

    clients = [stage.submit("x") for _ in range(20)]
    stage.dispatcher.next_wake()
    at_most = [len(stage.flights[key]) for key in keys]
    for key in keys:
        stage.answer(key)
    stage.dispatcher.cancel(clients[-1].job)

    assert at_most == [3] * 5
    assert [len(stage.flights[key]) for key in keys] == [3] * 5
    assert stage.dispatcher.next_wake() is None
    assert sum(client.body is not None for client in clients) == 5


def test_a_worker_has_at_most_so_many_requests() -> None:
    """What is above waits, and leaves as batches when there is room."""
    stage = stage_of(most_concurrent=2, batch_size=2)
    stage.open("w")
    for body in "abcd":
        stage.submit(body)
    flights_before = len(stage.flights["w"])

    stage.answer("w")

    assert flights_before == 1
    assert stage.at("w") == ["b", "c"]


def test_with_the_fixed_policy_batches_are_collected_though_the_worker_is_busy() -> None:
    """For handlers that gain from batches: the wait is TorchServe's."""
    stage = stage_of(batch_policy="fixed", batch_size=2, max_batch_delay_s=0.1)
    stage.open("w")
    stage.submit("a", now=0.0)
    wake = stage.dispatcher.next_wake()
    stage.submit("b", now=0.05)
    stage.submit("c", now=0.06)
    stage.dispatcher.pump(0.16)

    sent = [len(flight.jobs) for flight in stage.flights["w"]]

    assert wake == pytest.approx(0.1)
    assert sent == [2, 1]


def test_a_batch_that_raises_is_split_as_ever() -> None:
    """What runs beside it goes on."""
    stage = stage_of(batch_size=2)
    bad, good = stage.submit("bad"), stage.submit("good")
    stage.open("w")

    stage.fail("w")
    while stage.flights["w"]:
        if stage.at("w") == ["bad"]:
            stage.fail("w")
        else:
            stage.answer("w")

    assert isinstance(bad.end, HandlerFailed)
    assert good.body == b"good"


def test_an_answer_to_a_batch_that_is_not_out_breaks_the_protocol() -> None:
    """Whatever order they come in, each comes once."""
    stage = stage_of()
    stage.open("w")
    stage.submit("a")
    stage.answer("w")

    with pytest.raises(BadFrame):
        stage.dispatcher.finished("w", 1, 0.0, [Result(200, "", [])], [b""], 0.0)


def test_all_that_a_dead_worker_had_is_run_again_but_what_has_streamed() -> None:
    """Nobody knows whose fault it was."""
    stage = stage_of()
    stage.open("w")
    streamed, plain, unbegun = stage.submit("a"), stage.submit("b"), stage.submit("c")
    stage.piece("w", which=0)

    stage.die("w", begun=2)
    stage.open("x")
    while stage.flights["x"]:
        stage.answer("x")

    assert isinstance(streamed.end, WorkerDied)
    assert plain.body == b"b"
    assert unbegun.body == b"c"
    assert (plain.job.deaths, unbegun.job.deaths) == (1, 0)


def test_a_body_is_refused_only_if_it_was_alone_when_it_killed() -> None:
    """Of those that died with others at most one was guilty."""
    stage = stage_of()
    stage.open("v")
    for body in ("a", "b"):
        stage.submit(body)
    stage.die("v")
    stage.open("w")
    stage.die("w")
    stage.open("x")
    together = stage.submit("a")
    stage.die("x")
    stage.open("y")
    stage.die("y")
    stage.open("z")

    with pytest.raises(FingerprintRefused):
        stage.submit("a")

    assert isinstance(together.end, WorkerDied)


def test_a_body_that_its_worker_named_runs_alone_first_and_costs_two_workers() -> None:
    """Then its mates run beside each other again, and are answered; the body is refused from then on."""
    stage = stage_of()
    stage.open("w")
    mate, guilty, other = stage.submit("a"), stage.submit("deadly"), stage.submit("c")
    stage.die("w", accused=2)
    stage.open("x")
    later = stage.submit("later")
    alone = stage.at("x") == ["deadly"] and len(stage.flights["x"]) == 1
    stage.die("x", accused=1)
    stage.open("y")
    together = len(stage.flights["y"])
    while stage.flights["y"]:
        stage.answer("y")

    assert (alone, together) == (True, 3)
    assert [client.body for client in (mate, other, later)] == [b"a", b"c", b"later"]
    assert isinstance(guilty.end, WorkerDied)
    with pytest.raises(FingerprintRefused):
        stage.submit("deadly")


@pytest.mark.parametrize("named", [1, 2, 3])
@pytest.mark.parametrize("how", [{"accused": 1}, {"accused": 0}])
def test_a_body_costs_two_workers_whichever_was_named(named: int, how: dict[str, int]) -> None:
    """An error of a device may show in another's batch, and the second end may look otherwise; mates are answered."""
    stage = stage_of()
    stage.open("w")
    first, guilty, last = stage.submit("a"), stage.submit("deadly"), stage.submit("c")
    deaths = 1
    stage.die("w", accused=named)
    stage.open("x")
    at_once = []
    key = "x"
    while stage.flights.get(key):
        at_once.append(len(stage.flights[key]))
        if stage.at(key) == ["deadly"]:
            deaths += 1
            stage.die(key, **how)
            key = f"after {key}"
            stage.open(key)
        else:
            stage.answer(key)

    assert deaths == 2
    assert (first.body, last.body) == (b"a", b"c")
    assert isinstance(guilty.end, WorkerDied)
    assert at_once[0] == 1
    with pytest.raises(FingerprintRefused):
        stage.submit("deadly")


def test_a_request_that_ran_alone_is_not_blamed_for_the_end_of_its_machine() -> None:
    """It is run alone once more."""
    stage = stage_of()
    stage.open("w")
    client = stage.submit("a")
    stage.die("w", accused=1)
    stage.open("x")
    stage.die("x", is_suspect=False)
    stage.open("y")
    alone = len(stage.flights["y"])
    stage.answer("y")

    assert alone == 1
    assert client.body == b"a"
    assert (client.job.deaths, client.job.losses) == (0, 2)


def test_of_a_batch_that_is_not_there_nothing_is_concluded() -> None:
    """Whatever a worker says: that death is as any."""
    stage = stage_of()
    stage.open("w")
    clients = [stage.submit(body) for body in "ab"]

    stage.die("w", accused=99)
    stage.open("x")

    assert len(stage.flights["x"]) == 2
    assert [client.job.deaths for client in clients] == [1, 1]


def test_a_worker_whose_request_ran_alone_is_sent_others_again() -> None:
    """And one that is closed meanwhile takes nothing more."""
    stage = stage_of()
    stage.open("w")
    stage.submit("a")
    stage.die("w", accused=1)
    stage.open("x")
    waiting = [stage.submit(body) for body in "bc"]
    alone = len(stage.flights["x"])
    stage.answer("x")
    together = len(stage.flights["x"])
    while stage.flights["x"]:
        stage.answer("x")

    assert (alone, together) == (1, 2)
    assert [client.body for client in waiting] == [b"b", b"c"]


def test_a_worker_past_the_limit_is_measured_by_what_it_has_been_quiet_of_longest() -> None:
    """A piece counts as a word; when it is ended only what was overdue fails, the rest is run again."""
    stage = stage_of(response_timeout_s=10.0)
    stage.open("w")
    overdue, streams = stage.submit("a", now=0.0), stage.submit("b", now=1.0)
    stage.submit("c", now=8.0)
    stage.piece("w", now=7.0, which=1)

    quiet_since = stage.dispatcher.quiet_since("w")
    stage.die("w", now=10.0, may_retry=False)
    stage.open("x", now=10.0)

    assert quiet_since == 0.0
    assert isinstance(overdue.end, WorkerDied)
    assert isinstance(streams.end, WorkerDied)
    assert stage.at("x") == ["c"]


def test_a_job_ticket_is_room_in_a_worker() -> None:
    """A worker that runs many at once has time while it has room."""
    stage = stage_of(use_job_ticket=True, most_concurrent=2)
    stage.open("w")
    stage.submit("a")
    stage.submit("b")

    with pytest.raises(NoTicket):
        stage.submit("c")


@pytest.mark.parametrize("holds", [False, True])
def test_a_slow_client_keeps_the_others_waiting_only_where_its_worker_is_to_be_held(holds: bool) -> None:
    """Else its own connection's bound ends it."""
    stage = stage_of(holds_coroutines=holds)
    stage.open("w")
    client = stage.submit("a")

    client.job.hold()

    assert bool(stage.held) is holds


def test_a_cancelled_request_is_told_to_its_worker() -> None:
    """By the number of the batch that it is in."""
    stage = stage_of()
    stage.open("w")
    stage.submit("a")
    gone = stage.submit("b")

    gone.job.cancel()

    assert stage.cancelled == [("w", 2, 0)]


# ------------------------------------------------------------------------------------------- how many


def test_the_tickets_of_a_worker_above_its_bound_are_none_and_not_fewer() -> None:
    """A batch may be larger than the bound; it takes no ticket from another worker."""
    stage = stage_of(use_job_ticket=True, most_concurrent=2, batch_size=4, queue_size=10)
    dispatcher = stage.dispatcher
    stage.open("w")
    dispatcher.options = dataclasses.replace(dispatcher.options, use_job_ticket=False)
    dispatcher.close_lane("w")
    for body in "abcd":
        stage.submit(body)
    stage.open("x")
    dispatcher.options = dataclasses.replace(dispatcher.options, use_job_ticket=True)
    stage.open("y")

    stage.submit("e")
    stage.submit("f")

    assert stage.at("x") == ["a", "b", "c", "d"]
    assert len(stage.flights["y"]) == 1  # the next batch of up to four is beyond its bound
    with pytest.raises(NoTicket):
        stage.submit("g")


def test_an_empty_worker_takes_a_batch_that_is_larger_than_its_bound() -> None:
    """Else its requests would wait for ever."""
    stage = stage_of(most_concurrent=2, batch_size=4)
    for body in "abc":
        stage.submit(body)

    stage.open("w")

    assert stage.at("w") == ["a", "b", "c"]


def test_a_request_waits_no_time_while_a_worker_has_room_and_then_for_an_unknown_time() -> None:
    """So that a deadline refuses none."""
    stage = stage_of(most_concurrent=1)
    stage.open("w")
    free = stage.dispatcher.expected_wait_s(5, 0.0)

    stage.submit("a", deadline=1.0)

    assert free == 0.0
    assert stage.dispatcher.expected_wait_s(5, 0.0) is None


# ------------------------------------------------------------------------------------------- loans and closed workers


def test_a_worker_that_is_lent_gets_no_request_and_has_no_ticket() -> None:
    """Nor is a busy one lent before it has ended what it has."""
    stage = stage_of(use_job_ticket=True, most_concurrent=2)
    lent: list[tuple[str, int]] = []
    stage.open("w")
    client = stage.submit("a")

    stage.dispatcher.want_lane(lambda key, flight: lent.append((key, flight.number)), 0.0)
    before = list(lent)
    stage.answer("w")

    assert client.body == b"a"
    assert (before, lent) == ([], [("w", 2)])
    with pytest.raises(NoTicket):
        stage.submit("b")
    stage.dispatcher.end_loan("w", 2, 0.0)
    stage.submit("b")
    assert stage.at("w") == ["b"]


def test_a_lent_worker_gets_what_waits_when_it_is_given_back() -> None:
    """Not before."""
    stage = stage_of()
    stage.open("w")
    stage.dispatcher.want_lane(lambda key, flight: None, 0.0)

    stage.submit("a")
    during = stage.at("w")
    stage.dispatcher.end_loan("w", 1, 0.0)

    assert during == []
    assert stage.at("w") == ["a"]


def test_a_closed_worker_ends_what_it_has_and_gets_nothing_more() -> None:
    """One without requests goes at once."""
    stage = stage_of(use_job_ticket=True)
    stage.open("w", "idle")
    stage.submit("a")
    busy = next(key for key in ("w", "idle") if stage.at(key))
    other = "idle" if busy == "w" else "w"

    goes_at_once = stage.dispatcher.close_lane(other)
    goes_later = stage.dispatcher.close_lane(busy)
    with pytest.raises(NoTicket):
        stage.submit("b")
    stage.answer(busy)

    assert (goes_at_once, goes_later) == (True, False)
    assert stage.emptied == [busy]
    assert not stage.dispatcher.lanes.by_key


# ------------------------------------------------------------------------------------------- deaths


def test_a_suspect_waits_for_a_worker_that_has_nothing_else() -> None:
    """A mate of its would be lost with it once more."""
    stage = stage_of()
    stage.open("w")
    stage.submit("a")
    stage.open("x")
    stage.submit("long")
    stage.die("w", accused=1)
    beside = len(stage.flights["x"])

    stage.answer("x")

    assert beside == 1
    assert stage.at("x") == ["a"]


def test_what_a_client_left_behind_is_not_run_again() -> None:
    """Its mates are."""
    stage = stage_of(batch_size=2)
    gone, stays = stage.submit("a"), stage.submit("b")
    stage.open("w")
    gone.job.cancel()

    stage.die("w")
    stage.open("x")

    assert [job for flight in stage.flights["x"] for job in flight.jobs] == [stays.job]
    assert not gone.ends


def test_without_retry_all_that_a_dead_worker_had_begun_fails() -> None:
    """What it had not begun waits for another one."""
    stage = stage_of(retry_on_worker_death=False)
    stage.open("w")
    begun, unbegun = stage.submit("a"), stage.submit("b")

    stage.die("w", begun=1)
    stage.open("x")

    assert isinstance(begun.end, WorkerDied)
    assert not unbegun.ends
    assert stage.at("x") == ["b"]


def test_a_body_that_alone_had_begun_is_sure_to_have_killed() -> None:
    """What was sent and not begun is no alibi."""
    stage = stage_of()
    for key in ("v", "w"):
        stage.open(key)
        if key == "v":
            guilty = stage.submit("deadly")
        stage.submit("late")
        stage.die(key, begun=1)
    stage.open("x")

    assert isinstance(guilty.end, WorkerDied)
    with pytest.raises(FingerprintRefused):
        stage.submit("deadly")


def test_a_worker_past_its_limit_fails_what_is_overdue_though_it_had_not_begun_it() -> None:
    """By the clock at least one is: the one of which it has been quiet for longest."""
    stage = stage_of(response_timeout_s=10.0)
    stage.open("w")
    oldest, later = stage.submit("a", now=0.0), stage.submit("b", now=0.5)

    stage.die("w", now=1.0, begun=0, may_retry=False)
    stage.open("x", now=1.0)

    assert isinstance(oldest.end, WorkerDied)
    assert not later.ends
    assert stage.at("x") == ["b"]


def test_a_suspect_that_had_not_begun_is_not_the_cause_of_the_end() -> None:
    """It fails with the worker that was ended for its silence, and its body may come again."""
    stage = stage_of(response_timeout_s=10.0)
    stage.open("w")
    client = stage.submit("a")
    stage.die("w", accused=1)
    stage.open("x")

    stage.die("x", now=11.0, begun=0, may_retry=False)
    stage.open("y", now=11.0)
    stage.submit("a", now=11.0)

    assert isinstance(client.end, WorkerDied)
    assert stage.at("y") == ["a"]


def test_an_empty_worker_that_is_ended_takes_no_request_along() -> None:
    """Though it was ended for its silence."""
    stage = stage_of()
    stage.open("w")

    stage.die("w", may_retry=False)
    client = stage.submit("a")

    assert not client.ends
