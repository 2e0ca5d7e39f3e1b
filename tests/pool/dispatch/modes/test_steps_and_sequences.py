"""Tests for continuous batching and for sequences on their workers: which requests join a step, go on and leave, what a
worker that is to go still serves, and what a death takes along. `tests/pool/dispatch/test_sequences.py` has the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from marserve import wire
from marserve.errors import (
    DeadlinePassed,
    HandlerFailed,
    MarserveError,
    NoTicket,
    SequenceGone,
    SequencesFull,
    WorkerDied,
)
from marserve.messages import Result
from marserve.pool.options import SequenceOptions
from marserve.pool.worker_end.client import WorkerClient
from support.mode_stage import LAST, MORE, Client, ModeStage


def stage_of(batch_size: int = 2, **options: object) -> ModeStage:
    """A stage whose version runs in steps."""
    return ModeStage(continuous_batching=True, batch_size=batch_size, **options)


def sequences_of(**options: Any) -> ModeStage:
    """A stage whose version has sequences; `options` are the mode's."""
    given = SequenceOptions(max_idle_s=10.0, queue_size=10, most=10)
    return ModeStage(**{"sequences": given, "batch_size": 4, **options})


class Calls(Client):
    """A receiver that calls the test when its request ends."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()
        self._call = call

    def on_error(self, error: MarserveError) -> None:
        """The end."""
        super().on_error(error)
        self._call()


class Wrote:
    """A transport that keeps what is written to it."""

    def __init__(self) -> None:
        self.data = b""

    def is_closing(self) -> bool:
        """Never."""
        return False

    def write(self, data: bytes) -> None:
        """Keep it."""
        self.data += data


def pieces_of(client: Client) -> list[bytes]:
    """The bodies of a client's pieces."""
    return [piece.body for piece in client.pieces]


def test_a_request_stays_until_its_answer_says_that_it_has_ended() -> None:
    """Each step is a piece for its client; the last one is its end."""
    stage = stage_of()
    stage.open("w")
    client = stage.submit("a")

    stage.answer("w", results=[MORE])
    stage.answer("w", results=[MORE])
    before = list(client.ends)
    stage.answer("w")

    assert not before
    assert pieces_of(client) == [b"a", b"a", b"a"]
    assert client.body == b"a"
    assert not stage.flights["w"]


def test_an_answer_that_ends_with_its_first_step_is_an_ordinary_one() -> None:
    """It says nothing of a stream."""
    stage = stage_of()
    stage.open("w")
    client = stage.submit("a")

    stage.answer("w", results=[Result(200, "", [("ts_stream_next", "false"), ("x-a", "b")])])

    assert not client.pieces
    assert client.end is not None
    assert client.end.headers == [("x-a", "b")]  # type: ignore[union-attr]


def test_others_join_between_two_steps_up_to_the_batch_size() -> None:
    """And leave it as they end; who waits joins in the order it came."""
    stage = stage_of(batch_size=2)
    stage.open("w")
    for body in "abcd":
        stage.submit(body)

    steps = []
    for results in ([MORE], [MORE, LAST], [MORE, MORE], [LAST, LAST], [LAST]):
        steps.append(stage.at("w"))
        stage.answer("w", results=list(results))

    assert steps == [["a"], ["a", "b"], ["a", "c"], ["a", "c"], ["d"]]


def test_who_goes_on_is_sent_without_its_input() -> None:
    """The handler has seen it; what it made of it is under the request's id."""
    stage = stage_of()
    stage.open("w")
    stage.submit("a")
    stage.answer("w", results=[MORE])
    stage.submit("b")
    stage.answer("w", results=[MORE])

    wrote = Wrote()
    client = WorkerClient(wrote)  # type: ignore[arg-type]
    client.connection_made(wrote)  # type: ignore[arg-type]
    client.send(stage.flights["w"][0])
    [(batch, bodies)] = wire.worker_decoder().feed(wrote.data)

    assert [(item.id, item.parts) for item in batch.items] == [("r0", []), ("r1", [("body", None)])]  # type: ignore[union-attr]
    assert bodies == [b"b"]


def test_a_client_that_has_gone_is_left_out_of_the_next_step() -> None:
    """Its mates go on."""
    stage = stage_of()
    gone, stays = stage.submit("a"), stage.submit("b")
    stage.open("w")
    stage.answer("w", results=[MORE, MORE])

    gone.job.cancel()
    stage.answer("w", results=[MORE, MORE])

    assert stage.cancelled == [("w", 2, 0)]
    assert stage.at("w") == ["b"]
    assert pieces_of(gone) == [b"a"]
    assert pieces_of(stays) == [b"b", b"b"]


def test_a_deadline_ends_a_stream_between_two_steps() -> None:
    """Nothing more is made for it."""
    stage = stage_of()
    late, stays = stage.submit("a", deadline=5.0), stage.submit("b")
    stage.open("w")
    stage.answer("w", now=1.0, results=[MORE, MORE])

    stage.answer("w", now=6.0, results=[MORE, MORE])

    assert isinstance(late.end, DeadlinePassed)
    assert stage.at("w") == ["b"]
    assert not stays.ends


def test_an_item_that_fails_alone_leaves_alone() -> None:
    """As in any batch."""
    stage = stage_of()
    bad, good = stage.submit("a"), stage.submit("b")
    stage.open("w")

    stage.answer("w", results=[Result(503, "Prediction failed", [], "handler"), MORE])

    assert isinstance(bad.end, HandlerFailed)
    assert stage.at("w") == ["b"]
    assert not good.ends


def test_a_step_that_raises_fails_all_who_were_in_it() -> None:
    """What the handler knew of them cannot be trusted any more."""
    stage = stage_of()
    clients = [stage.submit("a"), stage.submit("b")]
    stage.open("w")
    stage.submit("c")

    stage.fail("w")

    assert [type(client.end) for client in clients] == [HandlerFailed, HandlerFailed]
    assert stage.at("w") == ["c"]


def test_of_a_dead_worker_s_requests_those_fail_that_have_streamed() -> None:
    """Those that joined in its last step are run again, one at a time, before who came later."""
    stage = stage_of(batch_size=3)
    streamed = stage.submit("a")
    stage.open("w")
    stage.submit("b")
    stage.submit("c")
    stage.answer("w", results=[MORE])
    stage.submit("d")

    stage.die("w")
    stage.open("x")
    steps = []
    for _ in range(4):
        steps.append(stage.at("x"))
        stage.answer("x", results=[MORE] * len(steps[-1]))

    assert isinstance(streamed.end, WorkerDied)
    assert steps == [["b"], ["b", "c"], ["b", "c", "d"], ["b", "c", "d"]]


def test_what_a_dead_worker_had_not_begun_goes_back_unless_it_has_streamed() -> None:
    """Whoever has a state in the worker has lost it, though the step itself was not begun."""
    stage = stage_of()
    old = stage.submit("a")
    stage.open("w")
    stage.answer("w", results=[MORE])
    begun = stage.flights["w"][0].number - 1
    stage.die("w", begun=begun)
    stage.open("x")
    fresh = stage.submit("b")
    stage.die("x", begun=0)
    stage.open("y")

    assert isinstance(old.end, WorkerDied)
    assert fresh.job.deaths == 0
    assert stage.at("y") == ["b"]


def test_a_slow_client_does_not_keep_the_others_waiting() -> None:
    """Its own connection's bound ends it."""
    stage = stage_of()
    stage.open("w")
    client = stage.submit("a")

    client.job.hold()

    assert not stage.held


def test_explanations_and_questions_wait_until_the_batch_is_empty() -> None:
    """They cannot be rows of the same call; who came after them waits behind them."""
    stage = stage_of(batch_size=4)
    stage.open("w")
    stage.submit("a")
    stage.submit("?", is_describe=True)
    stage.submit("b")

    stage.answer("w", results=[MORE])
    alone = stage.at("w")
    stage.answer("w")
    asked = stage.at("w")
    stage.answer("w")

    assert alone == ["a"]
    assert asked == ["?"]
    assert stage.at("w") == ["b"]


def test_a_worker_that_is_to_go_ends_what_it_runs_first() -> None:
    """Nobody new joins it."""
    stage = stage_of()
    stage.open("w")
    stage.submit("a")
    stage.submit("b")

    may_go = stage.dispatcher.close_lane("w")
    stage.answer("w", results=[MORE])
    goes_on = stage.at("w")
    stage.answer("w")

    assert not may_go
    assert goes_on == ["a"]
    assert stage.emptied == ["w"]


def test_sequences_run_in_steps_as_well() -> None:
    """A sequence's next request joins when the one before has ended; the handler says when the sequence has."""
    stage = stage_of(batch_size=2, sequences=SequenceOptions(max_idle_s=10.0, queue_size=4, most=2))
    stage.open("w")
    stage.submit("a1", sequence="a")
    stage.submit("a2", sequence="a")
    stage.submit("b1", sequence="b")

    steps = []
    for results in ([MORE], [LAST, MORE], [MORE, MORE]):
        steps.append(stage.at("w"))
        stage.answer("w", results=list(results))
    with pytest.raises(SequencesFull):
        stage.submit("c1", sequence="c")
    stage.answer("w", results=[Result(200, "", [("ts_request_sequence_end", "b")]), MORE])
    stage.submit("c1", sequence="c")

    assert steps == [["a1"], ["a1", "b1"], ["b1", "a2"]]


def test_metrics_count_a_request_once_however_many_steps_it_takes() -> None:
    """Its wait, its answer and its time; batches are counted as they run."""
    stage = stage_of()
    stage.open("w")
    stage.submit("a", now=0.0)
    for now in (1.0, 2.0):
        stage.answer("w", now=now, results=[MORE])
    stage.answer("w", now=3.0)

    metrics = stage.metrics

    assert metrics.requests == 1
    assert metrics.answers == {200: 1}
    assert metrics.queue_seconds.count == 1
    assert metrics.total_seconds.count == 1
    assert metrics.batch_sizes.count == 3


# ------------------------------------------------------------------------------------------- what a piece is


@pytest.mark.parametrize(
    "result",
    [
        Result(200, "", [("x-other", "true")]),
        Result(200, "", [("ts_stream_next", "TRUE")]),
        Result(503, "Prediction failed", [("ts_stream_next", "true")], "handler"),
    ],
)
def test_only_the_stream_s_own_header_says_that_a_request_goes_on(result: Result) -> None:
    """And never that of an item that failed."""
    stage = stage_of()
    stage.open("w")
    client = stage.submit("a")

    stage.answer("w", results=[result])

    assert client.end is not None
    assert stage.at("w") == []


# ------------------------------------------------------------------------------------------- joining


def test_when_all_clients_of_a_step_have_left_others_take_their_place() -> None:
    """Without any the worker is idle again."""
    stage = stage_of(batch_size=1)
    stage.open("w")
    gone = stage.submit("a")
    waits = stage.submit("b")
    gone.job.cancel()

    stage.answer("w", results=[MORE])
    joined = stage.at("w")
    waits.job.cancel()
    stage.answer("w", results=[MORE])
    stage.submit("c")

    assert joined == ["b"]
    assert stage.at("w") == ["c"]


def test_what_is_run_again_joins_only_if_there_is_room() -> None:
    """It is not put upon a full batch."""
    stage = stage_of(batch_size=1)
    stage.open("w")
    stage.submit("a")
    stage.open("x")
    stage.submit("b")
    stage.die("x")

    stage.answer("w", results=[MORE])
    full = stage.at("w")
    stage.answer("w")

    assert full == ["a"]
    assert stage.at("w") == ["b"]


def test_what_is_run_again_joins_no_call_that_it_cannot_be_a_row_of() -> None:
    """An explanation waits until the predictions have ended; requests that came later wait behind it."""
    stage = stage_of(batch_size=4)
    stage.open("w")
    stage.submit("a")
    stage.open("x")
    stage.submit("why", is_explain=True)
    stage.die("x")
    stage.submit("later")

    stage.answer("w", results=[MORE])
    beside = stage.at("w")
    stage.answer("w")

    assert beside == ["a"]
    assert stage.at("w") == ["why"]


def test_a_closed_worker_takes_nothing_that_is_run_again() -> None:
    """It ends what it runs; another worker takes the rest."""
    stage = stage_of(batch_size=4)
    stage.open("w")
    stage.submit("a")
    stage.open("x")
    stage.submit("b")
    stage.dispatcher.close_lane("w")
    stage.die("x")

    stage.answer("w", results=[MORE])
    beside = stage.at("w")
    stage.open("y")

    assert beside == ["a"]
    assert stage.at("y") == ["b"]


# ------------------------------------------------------------------------------------------- admission


def test_a_request_waits_no_time_while_a_worker_is_idle_and_then_for_an_unknown_time() -> None:
    """How many steps the running ones take is not known, so that a deadline refuses none."""
    stage = stage_of()
    stage.open("w")
    idle = stage.dispatcher.expected_wait_s(5, 0.0)

    stage.submit("a", deadline=1.0)

    assert idle == 0.0
    assert stage.dispatcher.expected_wait_s(5, 0.0) is None


def test_a_sequence_has_a_job_ticket_while_its_worker_is_idle() -> None:
    """And none while that is busy, whatever other workers do."""
    stage = sequences_of(use_job_ticket=True)
    stage.open("w", "x")
    stage.submit("a1", sequence="a")
    home = next(key for key in ("w", "x") if stage.at(key))

    with pytest.raises(NoTicket):
        stage.submit("a2", sequence="a")
    stage.answer(home)
    stage.submit("a3", sequence="a")

    assert stage.at(home) == ["a3"]


# ------------------------------------------------------------------------------------------- sequences that end


def test_a_handler_ends_sequences_only_by_the_header_for_it_and_only_its_own() -> None:
    """By name, several in one header; those of another worker live on."""
    stage = sequences_of()
    stage.open("w")
    for name in ("a", "b", "c"):
        stage.submit(name, sequence=name)
        stage.answer("w")
    stage.open("x")
    stage.submit("d", sequence="d")
    stage.answer("x")
    stage.submit("a again", sequence="a")

    stage.answer("w", results=[Result(200, "", [("x-other", "c"), ("ts_request_sequence_end", "a; b;d")])])

    assert stage.dispatcher.describe_sequences() == {"living": 2, "most": 10, "lost": 0}


def test_a_request_that_was_to_be_run_again_and_is_cancelled_lets_the_next_of_its_sequence_run() -> None:
    """The sequence had no state."""
    stage = sequences_of()
    stage.open("w")
    first = stage.submit("a1", sequence="a")
    stage.submit("a2", sequence="a")
    stage.die("w")

    first.job.cancel()
    stage.open("x")

    assert stage.at("x") == ["a2"]


def test_a_sequence_that_was_never_run_ends_with_the_client_of_its_only_request() -> None:
    """It has no state anywhere."""
    stage = sequences_of()
    stage.open("w")
    client = stage.submit("a1", sequence="a")
    stage.die("w")

    client.job.cancel()

    assert stage.dispatcher.describe_sequences() == {"living": 0, "most": 10, "lost": 0}


def test_a_client_that_leaves_between_two_steps_lets_the_next_of_its_sequence_join() -> None:
    """The sequence has a state in that worker."""
    stage = sequences_of(continuous_batching=True)
    stage.open("w", "x")
    gone = stage.submit("a1", sequence="a")
    home = next(key for key in ("w", "x") if stage.at(key))
    stage.submit("a2", sequence="a")
    gone.job.cancel()

    stage.answer(home, results=[MORE])
    joined = stage.at(home)
    stage.flights[home][0].jobs[0].cancel()
    stage.answer(home, results=[MORE])

    assert joined == ["a2"]
    assert stage.dispatcher.describe_sequences() == {"living": 1, "most": 10, "lost": 0}


def test_requests_that_wait_in_a_lost_sequence_may_be_cancelled_while_others_of_it_are_told() -> None:
    """Then they are told nothing."""
    stage = sequences_of()
    stage.open("w")
    stage.submit("a1", sequence="a")
    stage.answer("w")
    stage.submit("a2", sequence="a")
    first = stage.submit("a3", sequence="a", client=Calls(lambda: second.job.cancel()))
    second = stage.submit("a4", sequence="a")

    stage.die("w")

    assert isinstance(first.end, SequenceGone)
    assert not second.ends
    assert stage.dispatcher.waiting == 0


# ------------------------------------------------------------------------------------------- workers that are to go


def test_an_idle_worker_that_is_closed_serves_its_sequences_and_is_lent_no_more() -> None:
    """It goes, once, when the last of them has ended."""
    stage = sequences_of()
    lent: list[str] = []
    stage.open("w")
    stage.submit("a1", sequence="a")
    stage.answer("w", now=1.0)

    goes_at_once = stage.dispatcher.close_lane("w")
    goes_again = stage.dispatcher.close_lane("w")
    stage.dispatcher.want_lane(lambda key, flight: lent.append(key), 1.0)
    stage.dispatcher.want_no_lane()
    stage.submit("b1", now=1.0, sequence="b")
    stage.submit("a2", now=2.0, sequence="a")
    served = stage.at("w")
    stage.answer("w", now=3.0)
    before = list(stage.emptied)
    stage.dispatcher.wake(13.0)
    stage.dispatcher.wake(14.0)

    assert (goes_at_once, goes_again) == (False, False)
    assert lent == []
    assert served == ["a2"]
    assert (before, stage.emptied) == ([], ["w"])
    assert not stage.dispatcher.lanes.by_key


def test_an_idle_worker_without_sequences_is_closed_at_once() -> None:
    """It has nothing to keep."""
    stage = sequences_of()
    stage.open("w")

    assert stage.dispatcher.close_lane("w")
    assert not stage.dispatcher.lanes.by_key


def test_a_closed_worker_serves_its_sequences_while_another_request_waits_to_be_run_again() -> None:
    """It takes that one not, and does not stop for it."""
    stage = sequences_of()
    stage.open("w")
    stage.submit("a1", sequence="a")
    stage.answer("w")
    stage.dispatcher.close_lane("w")
    stage.open("x")
    stage.submit("b1", sequence="b")
    stage.die("x")

    stage.submit("a2", sequence="a")

    assert stage.at("w") == ["a2"]


def test_a_busy_worker_that_is_closed_ends_its_step_and_keeps_its_sequences() -> None:
    """Whether these have a state shows only then."""
    stage = sequences_of()
    stage.open("w")
    stage.submit("a1", sequence="a")

    goes_at_once = stage.dispatcher.close_lane("w")
    stage.answer("w")
    stage.submit("a2", sequence="a")

    assert goes_at_once is False
    assert stage.emptied == []
    assert stage.at("w") == ["a2"]


def test_a_closed_worker_goes_when_its_handler_ends_its_last_sequence() -> None:
    """At once, and not at the next request."""
    stage = sequences_of()
    stage.open("w")
    stage.submit("a1", sequence="a")
    stage.dispatcher.close_lane("w")

    stage.answer("w", results=[Result(200, "", [("ts_request_sequence_end", "a")])])

    assert stage.emptied == ["w"]


def test_a_closed_worker_that_dies_with_its_sequences_is_gone() -> None:
    """Nothing is sent to it any more."""
    stage = sequences_of()
    stage.open("w")
    stage.submit("a1", sequence="a")
    stage.answer("w")
    stage.dispatcher.close_lane("w")

    stage.die("w")
    stage.dispatcher.wake(100.0)
    stage.submit("b1", now=100.0, sequence="b")

    assert stage.emptied == []
    assert stage.dispatcher.waiting == 1


@pytest.mark.parametrize("end", ["close", "die"])
def test_a_worker_may_end_between_two_steps(end: str) -> None:
    """A receiver that is told of its deadline has it closed, or ended: its request goes on, or fails."""
    stage = stage_of(batch_size=1)
    stage.open("w")
    goes_on = stage.submit("a")
    calls = {"close": lambda: stage.dispatcher.close_lane("w"), "die": lambda: stage.die("w")}
    stage.submit("late", client=Calls(calls[end]), deadline=5.0)

    stage.answer("w", now=6.0, results=[MORE])

    if end == "close":
        assert stage.at("w") == ["a"]
        stage.answer("w", now=6.0)
        assert stage.emptied == ["w"]
        assert goes_on.body == b"a"
    else:
        assert isinstance(goes_on.end, WorkerDied)
        assert not stage.flights.get("w")


# ------------------------------------------------------------------------------------------- deaths


def test_without_retry_what_a_dead_worker_had_begun_fails_and_the_rest_moves() -> None:
    """It had not seen the rest."""
    stage = stage_of(retry_on_worker_death=False)
    stage.open("w")
    begun = stage.submit("a")
    stage.die("w")
    stage.open("x")
    unbegun = stage.submit("b")
    stage.die("x", begun=0)
    stage.open("y")

    assert isinstance(begun.end, WorkerDied)
    assert stage.at("y") == ["b"]
    assert unbegun.job.deaths == 0


def test_a_worker_past_its_limit_fails_its_step_though_it_had_not_begun_it() -> None:
    """The step is what it was ended for."""
    stage = stage_of()
    stage.open("w")
    client = stage.submit("a")

    stage.die("w", begun=0, may_retry=False)
    stage.open("x")

    assert isinstance(client.end, WorkerDied)
    assert stage.at("x") == []


def test_what_a_client_left_behind_in_a_dead_worker_is_not_run_again() -> None:
    """Its mates are."""
    stage = stage_of()
    gone, stays = stage.submit("a"), stage.submit("b")
    stage.open("w")
    gone.job.cancel()

    stage.die("w")
    stage.open("x")

    assert stage.at("x") == ["b"]
    assert (gone.job.deaths, stays.job.deaths) == (0, 1)
    assert not gone.ends


def test_what_a_dead_worker_had_not_begun_joins_others_one_by_one() -> None:
    """It waits as before, and is no batch of its own."""
    stage = stage_of(batch_size=2)
    stage.open("w")
    stage.submit("a")
    clients = [stage.submit(body) for body in "bc"]
    stage.open("x")

    stage.die("x", begun=0)
    stage.answer("w", results=[MORE])

    assert stage.at("w") == ["a", "b"]
    assert [client.job.deaths for client in clients] == [0, 0]
