"""Tests for continuous batching: who joins, who goes on, who leaves, and what becomes of them when a worker dies."""

from __future__ import annotations

import pytest

from marserve import wire
from marserve.errors import DeadlinePassed, HandlerFailed, SequencesFull, WorkerDied
from marserve.messages import Result
from marserve.pool.options import SequenceOptions
from marserve.pool.worker_end.client import WorkerClient
from support.mode_stage import LAST, MORE, Client, ModeStage


def stage_of(batch_size: int = 2, **options: object) -> ModeStage:
    """A stage whose version runs in steps."""
    return ModeStage(continuous_batching=True, batch_size=batch_size, **options)


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
