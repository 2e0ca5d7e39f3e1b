"""Tests for the server's end of the wire: batches out, what comes back to the right place, and nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from marserve import wire
from marserve.errors import BadFrame
from marserve.messages import (
    Batch,
    Hello,
    Item,
    Load,
    Loaded,
    Metrics,
    NotLoaded,
    Part,
    Piece,
    Raised,
    Request,
    Result,
    Results,
    Stop,
)
from marserve.pool.batcher import Flight
from marserve.pool.queue import Job
from support.fake_worker import FakeWorker
from support.receivers import Told

pytestmark = pytest.mark.anyio

RESULTS = Results(1, 0.5, [Result(200, "", [])])


class Ear:
    """A peer that keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []
        self.refuses = False
        self._news = asyncio.Event()

    def _hear(self, what: str, message: Any) -> None:
        self.heard.append((what, message))
        self._news.set()

    async def next(self, count: int = 1) -> list[tuple[str, Any]]:
        """Wait until that many things were heard."""
        async with asyncio.timeout(10):
            while len(self.heard) < count:
                self._news.clear()
                await self._news.wait()
        return self.heard

    def on_results(self, message: Results, bodies: list[bytes]) -> None:
        """A batch has ended."""
        if self.refuses:
            raise BadFrame("not what was running")
        self._hear("results", (message, bodies))

    def on_raised(self, message: Raised) -> None:
        """A batch has raised."""
        self._hear("raised", message)

    def on_piece(self, message: Piece, bodies: list[bytes]) -> None:
        """A piece."""
        self._hear("piece", (message, bodies))

    def on_metrics(self, message: Metrics) -> None:
        """Measured."""
        self._hear("metrics", message)

    def on_loaded(self, message: Loaded) -> None:
        """Loaded."""
        self._hear("loaded", message)

    def on_not_loaded(self, message: NotLoaded) -> None:
        """Not loaded."""
        self._hear("not loaded", message)

    def on_broken(self, error: BadFrame) -> None:
        """Broken."""
        self._hear("broken", str(error))

    def on_closed(self) -> None:
        """Closed."""
        self._hear("closed", None)


class Owner:
    """An owner that jobs need to be made."""

    def cancel(self, job: Job) -> None:
        """Nothing."""


def flight(*requests: Request) -> Flight:
    """A batch of these requests."""
    return Flight(7, [Job(request, Told(), 0.0, request.deadline, Owner()) for request in requests], False, 0.0)


async def test_a_flight_becomes_one_batch_with_its_bodies_behind_it() -> None:
    """Names, headers and deadlines in the metadata; bodies raw, in order."""
    async with FakeWorker(Ear()) as worker:
        worker.client.exchange(
            flight(
                Request("a", [Part("x", b"1", "text/plain"), Part("y", b"2")], [(b"H", b"\xff")], [("u", "p")], 9.5),
                Request("b", []),
                Request("c", [Part("body", b"3")]),
            )
        )

        batch, bodies = await worker.hear()

    items = [
        Item("a", [("x", "text/plain"), ("y", None)], [(b"H", b"\xff")], [("u", "p")], 9.5),
        Item("b", [], [], [], None),
        Item("c", [("body", None)], [], [], None),
    ]
    assert batch == Batch(7, items)
    assert bodies == [b"1", b"2", b"3"]


async def test_large_bodies_arrive_whole() -> None:
    """They are written where they lie."""
    body = bytes(range(256)) * 20_000
    async with FakeWorker(Ear()) as worker:
        worker.client.exchange(flight(Request("a", [Part("x", body), Part("y", b"small")])))

        _, bodies = await worker.hear()

    assert bodies == [body, b"small"]


async def test_orders_arrive_in_their_order() -> None:
    """Load, work, stop."""
    async with FakeWorker(Ear()) as worker:
        worker.client.load(Load("m", "1", "/m", "h", None, None, 1))
        worker.client.exchange(flight(Request("a", [])))
        worker.client.stop()

        kinds = [type((await worker.hear())[0]) for _ in range(3)]

    assert kinds == [Load, Batch, Stop]


async def test_everything_that_a_worker_says_goes_where_it_belongs() -> None:
    """In its order."""
    ear = Ear()
    raised = Raised(1, 0.1, "handler", "m", 503, "t")
    async with FakeWorker(ear) as worker:
        await worker.say(Hello(1, "3.11"))
        await worker.say(Loaded(1.5))
        await worker.say(Metrics([]))
        await worker.say(Piece(1, RESULTS.results), [b"piece"])
        await worker.say(RESULTS, [b"body"])
        await worker.say(raised)
        await worker.say(NotLoaded("k", "m", "t"))

        heard = await ear.next(6)

    assert heard[:6] == [
        ("loaded", Loaded(1.5)),
        ("metrics", Metrics([])),
        ("piece", (Piece(1, RESULTS.results), [b"piece"])),
        ("results", (RESULTS, [b"body"])),
        ("raised", raised),
        ("not loaded", NotLoaded("k", "m", "t")),
    ]


async def test_the_end_of_the_connection_is_told() -> None:
    """After all that was said before it."""
    ear = Ear()
    async with FakeWorker(ear) as worker:
        await worker.say(Loaded(1.0))
        await worker.hang_up()

        heard = await ear.next(2)

    assert [what for what, _ in heard] == ["loaded", "closed"]


async def test_noise_is_told_as_what_it_is() -> None:
    """The owner ends the worker then."""
    ear = Ear()
    async with FakeWorker(ear) as worker:
        await worker.write(b"noise" * 10)

        heard = await ear.next()

    assert heard[0][0] == "broken"
    assert "begins with" in heard[0][1]


async def test_an_answer_that_the_peer_refuses_is_told_as_broken() -> None:
    """It knows what was running."""
    ear = Ear()
    ear.refuses = True
    async with FakeWorker(ear) as worker:
        await worker.say(RESULTS, [b""])

        heard = await ear.next()

    assert heard[0] == ("broken", "not what was running")


async def test_a_frame_larger_than_its_bound_is_broken_before_it_is_there() -> None:
    """What a batch's answers may hold is known; nothing more is kept in memory."""
    ear = Ear()
    async with FakeWorker(ear, max_frame_bytes=1000) as worker:
        await worker.say(RESULTS, [bytes(1000)])
        await ear.next()
        whole = b"".join(wire.encode(RESULTS, [bytes(1001)]))
        await worker.write(whole[: wire.HEADER.size])

        heard = await ear.next(2)

    assert [what for what, _ in heard[:2]] == ["results", "broken"]


async def test_after_the_end_nothing_is_sent_and_nothing_is_raised() -> None:
    """Its owner may not have heard of the end yet."""
    ear = Ear()
    async with FakeWorker(ear) as worker:
        await worker.hang_up()
        await ear.next()

        worker.client.exchange(flight(Request("a", [])))
        worker.client.stop()
        worker.client.close()

    assert [what for what, _ in ear.heard] == ["closed"]


async def test_closing_is_at_once() -> None:
    """What was written and not yet sent is lost, as it must be for a worker that reads nothing."""
    ear = Ear()
    async with FakeWorker(ear) as worker:
        worker.client.exchange(flight(Request("a", [Part("x", bytes(50_000_000))])))
        worker.client.close()

        assert await ear.next() == [("closed", None)]
