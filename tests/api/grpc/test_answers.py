"""Tests for the receiver of gRPC calls: pieces in order, a worker held for a slow client, nothing after a cancel."""

from __future__ import annotations

import asyncio

import pytest

from marserve.api.grpc.answers import HOLD_ABOVE_BYTES, MOST_WAITING_BYTES, Pieces
from marserve.api.grpc.errors import SlowReader
from marserve.errors import ModelNotFound, WorkerDied
from marserve.messages import Part, Request
from support.fake_data_plane import FakeDataPlane, Submitted

pytestmark = pytest.mark.anyio


def begin(plane: FakeDataPlane, model: str = "m") -> tuple[Pieces, Submitted]:
    """A request under way."""
    request = Request("id", [Part("body", b"x")])
    pieces = Pieces.of(lambda pieces: plane.submit(model, None, request, pieces))
    return pieces, plane.submitted[-1]


async def test_an_answer_is_one_piece() -> None:
    """Also when it came before `submit` returned."""
    pieces, _ = begin(FakeDataPlane(), "echo")

    assert [await pieces.next(), await pieces.next()] == [b"x", None]


async def test_pieces_come_in_order_as_they_are_made() -> None:
    """The last one may be waited for."""
    pieces, job = begin(FakeDataPlane())
    job.piece(b"one")
    job.piece(b"two")

    assert [await pieces.next(), await pieces.next()] == [b"one", b"two"]
    waiting = asyncio.create_task(pieces.next())
    await asyncio.sleep(0)
    job.piece(b"three", last=True)
    assert await waiting == b"three"
    assert await pieces.next() is None


async def test_what_came_before_an_error_is_given_first() -> None:
    """Then the error."""
    pieces, job = begin(FakeDataPlane())
    job.piece(b"one")
    job.fail(WorkerDied("killed"))

    assert await pieces.next() == b"one"
    with pytest.raises(WorkerDied):
        await pieces.next()


async def test_a_refusal_is_raised_at_once() -> None:
    """No pieces exist then."""
    with pytest.raises(ModelNotFound):
        begin(FakeDataPlane(errors={"gone": ModelNotFound("gone")}), "gone")


async def test_a_worker_is_held_while_its_client_is_slow() -> None:
    """And goes on as soon as little waits."""
    pieces, job = begin(FakeDataPlane())

    job.piece(b"p" * HOLD_ABOVE_BYTES)
    assert not job.is_held
    job.piece(b"p")
    assert job.is_held

    await pieces.next()
    assert not job.is_held


async def test_a_client_that_takes_nothing_loses_its_stream() -> None:
    """Memory is bounded though the worker does not stop."""
    pieces, job = begin(FakeDataPlane())

    for _ in range(MOST_WAITING_BYTES // 2**20 + 1):
        job.piece(b"p" * 2**20)

    assert job.is_cancelled
    with pytest.raises(SlowReader):
        await pieces.next()


async def test_cancel_reaches_the_job_once_and_not_after_its_end() -> None:
    """As the data plane asks."""
    plane = FakeDataPlane()
    pieces, job = begin(plane)
    pieces.cancel()
    pieces.cancel()
    ended, answered = begin(plane)
    answered.answer(b"x")
    ended.cancel()

    assert (job.is_cancelled, answered.is_cancelled) == (True, False)
