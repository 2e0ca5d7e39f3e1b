"""Tests for sequences: order, affinity, bounds, ends, and what becomes of them when their worker does not live on."""

from __future__ import annotations

from typing import Any

import pytest

from marserve.errors import HandlerFailed, NoTicket, SequenceGone, SequencesFull, WorkerDied
from marserve.messages import Result
from marserve.pool.options import SequenceOptions
from support.mode_stage import ModeStage


def stage_of(*, batch_size: int = 4, use_job_ticket: bool = False, **sequences: Any) -> ModeStage:
    """A stage whose version has sequences."""
    given = {"max_idle_s": 10.0, "queue_size": 10, "most": 10, **sequences}
    return ModeStage(sequences=SequenceOptions(**given), batch_size=batch_size, use_job_ticket=use_job_ticket)


# ------------------------------------------------------------------------------------------- turns


def test_a_batch_has_one_request_of_each_sequence_in_the_order_they_came() -> None:
    """While a worker runs, a sequence's further requests wait for their turn."""
    stage = stage_of()
    stage.open("w")
    stage.submit("a1", sequence="a")
    for body in ("a2", "a3", "b1", "c1", "b2"):
        stage.submit(body, sequence=body[0])

    batches = []
    while stage.at("w"):
        batches.append(stage.at("w"))
        stage.answer("w")

    assert batches == [["a1"], ["a2", "b1", "c1"], ["a3", "b2"]]


def test_a_sequence_stays_with_its_worker_though_another_is_idle() -> None:
    """What the handler knows of it is there, and nowhere else."""
    stage = stage_of()
    stage.open("w", "x")
    stage.submit("a1", sequence="a", start=True)
    home = next(key for key in ("w", "x") if stage.at(key))
    other = "x" if home == "w" else "w"

    stage.submit("a2", sequence="a")
    waits_beside_an_idle_worker = not stage.at(other)
    stage.answer(home)

    assert waits_beside_an_idle_worker
    assert stage.at(home) == ["a2"]


def test_new_sequences_go_to_the_worker_that_has_the_fewest() -> None:
    """Sequences are sticky, so that where they begin matters."""
    stage = stage_of()
    stage.open("w", "x")
    stage.submit("a1", sequence="a")
    first = next(key for key in ("w", "x") if stage.at(key))
    stage.answer(first)

    stage.submit("b1", sequence="b")

    assert stage.at("x" if first == "w" else "w") == ["b1"]


def test_a_request_without_an_id_begins_a_sequence_of_its_own() -> None:
    """The handler finds the id that the server gave it, and that it is a beginning."""
    stage = stage_of()
    stage.open("w")

    stage.submit("one")
    told = dict(stage.flights["w"][0].jobs[0].request.server_headers)

    assert told["ts_request_sequence_id"].startswith("ts-seq-")
    assert told["ts_request_sequence_start"] == "true"


def test_two_requests_with_one_clients_id_begin_two_sequences() -> None:
    """Clients choose ids as they like; the server's key tells their requests apart."""
    stage = stage_of()
    stage.open("v")
    stage.open("w")

    stage.submit("one", key=1)
    stage.submit("two", key=2)
    flights = [flight for flights in stage.flights.values() for flight in flights]
    told = [dict(job.request.server_headers)["ts_request_sequence_id"] for flight in flights for job in flight.jobs]

    assert sorted(each.rpartition("-")[2] for each in told) == ["1", "2"]


def test_the_header_counts_in_any_case_and_the_handler_finds_it_under_its_own_name() -> None:
    """HTTP does not tell cases apart; a handler's dict does."""
    stage = stage_of(id_header="X-Conversation")
    stage.open("w")
    stage.submit("a1", headers={"x-conversation": "a"})
    stage.submit("a2", headers={"X-Conversation": "a"})

    told = [stage.flights["w"][0].jobs[0].request.server_headers]
    stage.answer("w")

    assert told == [[("X-Conversation", "a")]]
    assert stage.at("w") == ["a2"]


def test_priorities_do_not_reorder_a_sequence() -> None:
    """An urgent request is still the one after the one before."""
    stage = stage_of()
    stage.open("w")
    stage.submit("a1", sequence="a")
    stage.submit("a2", sequence="a", priority=9)
    stage.submit("a3", sequence="a", priority=0)

    stage.answer("w")

    assert stage.at("w") == ["a2"]


def test_a_question_to_the_handler_itself_belongs_to_no_sequence() -> None:
    """It comes alone, counts for no bound, and any worker may be asked."""
    stage = stage_of(most=1)
    stage.open("w")
    stage.submit("a1", sequence="a")

    asked = stage.submit("?", is_describe=True)
    stage.answer("w")
    alone = stage.at("w")
    stage.answer("w")

    assert alone == ["?"]
    assert asked.body == b"?"


def test_a_client_that_left_lets_the_next_request_of_its_sequence_go_when_the_worker_is_done() -> None:
    """Order holds though nobody waits for the one before."""
    stage = stage_of()
    stage.open("w")
    first = stage.submit("a1", sequence="a")
    gone = stage.submit("a2", sequence="a")
    stage.submit("a3", sequence="a")

    first.job.cancel()
    gone.job.cancel()
    still = stage.at("w")
    stage.answer("w")

    assert still == ["a1"]
    assert stage.at("w") == ["a3"]
    assert not first.ends
    assert not gone.ends


def test_a_batch_that_raises_fails_whole_and_its_sequences_go_on() -> None:
    """Running a row again would tell the handler twice."""
    stage = stage_of()
    clients = [stage.submit("a1", sequence="a"), stage.submit("b1", sequence="b")]
    stage.open("w")
    stage.submit("a2", sequence="a")

    stage.fail("w")

    assert [type(client.end) for client in clients] == [HandlerFailed, HandlerFailed]
    assert stage.at("w") == ["a2"]


# ------------------------------------------------------------------------------------------- bounds


def test_a_sequence_s_line_is_bounded() -> None:
    """What runs does not count."""
    stage = stage_of(queue_size=1)
    stage.open("w")
    stage.submit("a1", sequence="a")
    stage.submit("a2", sequence="a")

    with pytest.raises(SequencesFull) as refused:
        stage.submit("a3", sequence="a")

    assert refused.value.cause == "sequence_queue_full"
    assert stage.metrics.refused == {"sequence_queue_full": 1}


def test_only_so_many_sequences_live_at_a_time() -> None:
    """A client's word that it was the last request frees nothing, as in TorchServe; time does."""
    stage = stage_of(most=1, max_idle_s=3.0)
    stage.open("w")
    stage.submit("a1", now=0.0, sequence="a", end=True)
    stage.answer("w", now=1.0)

    with pytest.raises(SequencesFull) as refused:
        stage.submit("b1", now=3.9, sequence="b")
    later = stage.submit("b1", now=4.0, sequence="b")

    assert refused.value.cause == "too_many_sequences"
    assert later.job is not None


def test_the_end_header_frees_a_sequence_where_the_model_says_so() -> None:
    """`freeEndedSequences`: its place is free when the last request is answered."""
    stage = stage_of(most=1, frees_ended=True)
    stage.open("w")
    stage.submit("a1", sequence="a", end=True)
    stage.answer("w")

    stage.submit("b1", sequence="b")

    assert stage.at("w") == ["b1"]


def test_the_handler_ends_sequences_by_a_response_header() -> None:
    """Several ids, separated by semicolons; who still waits in one is told."""
    stage = stage_of(most=2)
    stage.open("w")
    stage.submit("a1", sequence="a")
    waits = stage.submit("a2", sequence="a")
    stage.submit("b1", sequence="b")

    stage.answer("w", results=[Result(200, "", [("ts_request_sequence_end", "a;nobody")])])
    stage.submit("c1", sequence="c")

    assert isinstance(waits.end, SequenceGone)
    assert waits.end.cause == "sequence_ended"
    assert stage.dispatcher.describe_sequences() == {"living": 2, "most": 2, "lost": 0}


def test_a_sequence_ends_so_long_after_its_first_request_whatever_waits() -> None:
    """`sequenceTimeoutMSec`: what runs has its answer, what waits is told."""
    stage = stage_of(timeout_s=5.0)
    stage.open("w")
    runs = stage.submit("a1", now=0.0, sequence="a")
    waits = stage.submit("a2", now=1.0, sequence="a")

    woken_at = stage.dispatcher.next_wake()
    stage.dispatcher.pump(5.0)
    stage.answer("w", now=6.0)

    assert woken_at == 5.0
    assert isinstance(waits.end, SequenceGone)
    assert waits.end.cause == "sequence_expired"
    assert runs.body == b"a1"


def test_without_an_idle_limit_every_request_is_refused() -> None:
    """TorchServe's rule: such sequences would never end."""
    stage = stage_of(max_idle_s=0.0)
    stage.open("w")

    with pytest.raises(SequenceGone):
        stage.submit("a1", sequence="a")


def test_a_job_ticket_is_one_for_the_sequence_s_own_worker() -> None:
    """That another is idle helps nobody."""
    stage = stage_of(use_job_ticket=True)
    stage.open("w", "x")
    stage.submit("a1", sequence="a")

    with pytest.raises(NoTicket):
        stage.submit("a2", sequence="a")
    stage.submit("b1", sequence="b")

    assert sorted([*stage.at("w"), *stage.at("x")]) == ["a1", "b1"]


# ------------------------------------------------------------------------------------------- deaths


def test_with_its_worker_a_sequence_is_lost_and_the_rest_of_it_is_refused() -> None:
    """No other worker knows what this one knew, and none is asked as though it did."""
    stage = stage_of()
    stage.open("w")
    stage.submit("a1", sequence="a", start=True)
    stage.answer("w")
    runs, waits = stage.submit("a2", sequence="a"), stage.submit("a3", sequence="a")

    stage.die("w")
    stage.open("x")

    assert isinstance(runs.end, WorkerDied)
    assert isinstance(waits.end, SequenceGone)
    assert waits.end.cause == "sequence_lost"
    with pytest.raises(SequenceGone):
        stage.submit("a4", sequence="a")
    assert not stage.at("x")


def test_a_lost_sequence_may_be_begun_anew() -> None:
    """That the client says so is all that is asked."""
    stage = stage_of()
    stage.open("w", "x")
    stage.submit("a1", sequence="a", start=True)
    home = next(key for key in ("w", "x") if stage.at(key))
    stage.answer(home)
    stage.die(home)

    stage.submit("a1", sequence="a", start=True)
    other = "x" if home == "w" else "w"
    stage.answer(other)
    stage.submit("a2", sequence="a")

    assert stage.at(other) == ["a2"]


def test_a_lost_sequence_is_forgotten_when_it_would_have_ended_anyway() -> None:
    """After so long idle any id is a new one, as it is with a worker that lives."""
    stage = stage_of(max_idle_s=3.0)
    stage.open("w")
    stage.submit("a1", now=0.0, sequence="a")
    stage.answer("w", now=0.0)
    stage.die("w", now=1.0)
    stage.open("x", now=1.0)

    with pytest.raises(SequenceGone):
        stage.submit("a2", now=3.9, sequence="a")
    stage.submit("a2", now=4.0, sequence="a")

    assert stage.at("x") == ["a2"]


def test_the_first_request_of_a_sequence_is_run_again_elsewhere() -> None:
    """There was nothing to lose: what came after it waits, and follows it."""
    stage = stage_of()
    stage.open("w")
    first = stage.submit("a1", sequence="a", start=True)
    stage.submit("a2", sequence="a")

    stage.die("w")
    stage.open("x")
    again = stage.at("x")
    stage.answer("x")

    assert again == ["a1"]
    assert first.body == b"a1"
    assert stage.at("x") == ["a2"]


def test_a_first_request_that_kills_two_workers_takes_its_sequence_along() -> None:
    """It costs two workers, and what waited behind it is told."""
    stage = stage_of()
    stage.open("w")
    first, waits = stage.submit("a1", sequence="a"), stage.submit("a2", sequence="a")

    stage.die("w")
    stage.open("x")
    stage.die("x")
    stage.open("y")

    assert isinstance(first.end, WorkerDied)
    assert isinstance(waits.end, SequenceGone)
    assert not stage.at("y")


# ------------------------------------------------------------------------------------------- going


def test_a_worker_that_is_to_go_has_its_sequences_until_they_end_and_no_new_ones() -> None:
    """Scaling down and recycling lose nobody's conversation."""
    stage = stage_of(max_idle_s=3.0)
    stage.open("w")
    stage.submit("a1", now=0.0, sequence="a")
    stage.answer("w", now=0.0)

    may_go_at_once = stage.dispatcher.close_lane("w")
    stage.submit("b1", now=1.0, sequence="b")
    stage.submit("a2", now=1.0, sequence="a")
    served = stage.at("w")
    stage.answer("w", now=1.0)
    emptied_before = list(stage.emptied)
    stage.dispatcher.pump(4.0)

    assert not may_go_at_once
    assert served == ["a2"]
    assert not emptied_before
    assert stage.emptied == ["w"]
    assert stage.dispatcher.next_wake() is not None  # b waits, and its time is looked after
