"""Tests for the server's end of the wire: batches out, what comes back to the right place, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from marserve import wire
from marserve.errors import BadFrame
from marserve.messages import (
    MAX_METRIC_VALUES,
    AskLengths,
    Batch,
    Batches,
    Exited,
    Forked,
    Hello,
    Item,
    Lengths,
    Load,
    Loaded,
    Metric,
    Metrics,
    NotLoaded,
    OutOfStep,
    Part,
    Piece,
    Raised,
    Request,
    Result,
    Results,
    Stop,
    Templated,
    ToServer,
    pack_head,
)
from marserve.pool.dispatch.jobs import Flight, Job, Question
from marserve.pool.worker_end.client import (
    MAX_KEPT_HEAD_BYTES,
    MAX_KEPT_HEADS,
    MAX_METRICS_UNANSWERED,
    SHARED_FRAME_BYTES,
    PackedHeads,
    WorkerClient,
)
from support.fake_worker import FakeWorker
from support.processes import until
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

    def on_lengths(self, message: Lengths) -> None:
        """The handler has said lengths."""
        self._hear("lengths", message)

    def on_results(self, ended: Sequence[tuple[Results, list[bytes]]]) -> None:
        """Batches have ended."""
        if self.refuses:
            raise BadFrame("not what was running")
        for message, bodies in ended:
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
        worker.client.send(
            flight(
                Request("a", [Part("x", b"1", "text/plain"), Part("y", b"2")], [(b"H", b"\xff")], [("u", "p")], 9.5),
                Request("b", []),
                Request("c", [Part("body", b"3")]),
            )
        )

        batch, bodies = await worker.hear()

    items = [
        Item("a", [("x", "text/plain"), ("y", None)], pack_head([(b"H", b"\xff")], [("u", "p")]), 9.5),
        Item("b", [], pack_head([], []), None),
        Item("c", [("body", None)], pack_head([], []), None),
    ]
    assert batch == Batch(7, items)
    assert bodies == [b"1", b"2", b"3"]


async def test_large_bodies_arrive_whole() -> None:
    """They are written where they lie."""
    body = bytes(range(256)) * 20_000
    async with FakeWorker(Ear()) as worker:
        worker.client.send(flight(Request("a", [Part("x", body), Part("y", b"small")])))

        _, bodies = await worker.hear()

    assert bodies == [body, b"small"]


def ahead(number: int, *bodies: bytes) -> Flight:
    """A batch for a worker that is busy with another."""
    found = flight(*(Request(f"{number}-{index}", [Part("body", body)]) for index, body in enumerate(bodies)))
    found.number, found.is_ahead = number, True
    return found


def test_headers_that_requests_share_are_packed_once() -> None:
    """By which lists they are, not by what is in them; others are packed for themselves."""
    heads = PackedHeads()
    shared, added = [(b"Host", b"a")], [("url_path", "")]

    first = heads.pack(shared, added)

    assert heads.pack(shared, added) is first
    assert heads.pack([(b"Host", b"b")], added) == pack_head([(b"Host", b"b")], added)
    item = Item("id", [], first, None)
    assert (list(item.headers), list(item.server_headers)) == (shared, added)


def test_packed_headers_are_kept_within_bounds() -> None:
    """Neither many nor large ones; and no list that was kept can be mistaken for a new one."""
    heads = PackedHeads()

    for number in range(3 * MAX_KEPT_HEADS):
        headers = [(b"N", str(number).encode())]
        assert heads.pack(headers, []) == pack_head(headers, [])
    large = [(b"N", bytes(MAX_KEPT_HEAD_BYTES))]

    assert heads.pack(large, []) is not heads.pack(large, [])
    assert heads.kept <= MAX_KEPT_HEADS


async def test_small_batches_that_go_ahead_together_share_a_frame() -> None:
    """One write and one encoding for what one turn of the event loop brings; each keeps its number and its bodies."""
    async with FakeWorker(Ear()) as worker:
        worker.client.send(ahead(1, b"a"))
        worker.client.send(ahead(2, b"b", b"c"))

        together, bodies = await worker.hear()

    assert isinstance(together, Batches)
    assert [(batch.number, [item.id for item in batch.items]) for batch in together.batches] == [
        (1, ["1-0"]),
        (2, ["2-0", "2-1"]),
    ]
    assert bodies == [b"a", b"b", b"c"]


async def test_a_batch_for_a_worker_that_waits_leaves_at_once() -> None:
    """And with it, before it, what was gathered: order is kept."""
    async with FakeWorker(Ear()) as worker:
        worker.client.send(ahead(1, b"a"))
        waited_for = flight(Request("now", [Part("body", b"b")]))

        worker.client.send(waited_for)
        sent = worker.client.gathered
        message, _ = await worker.hear()

    assert sent == 0
    assert isinstance(message, Batches)
    assert [batch.number for batch in message.batches] == [1, 7]


async def test_large_batches_do_not_share_a_frame() -> None:
    """The worker would have to wait for the last of them to begin the first."""
    large = bytes(SHARED_FRAME_BYTES)
    async with FakeWorker(Ear()) as worker:
        for number in (1, 2, 3):
            worker.client.send(ahead(number, large))

        heard = [(await worker.hear())[0] for _ in range(3)]

    assert [(type(batch), batch.number) for batch in heard] == [(Batch, 1), (Batch, 2), (Batch, 3)]


async def test_batches_that_ended_together_are_told_together_and_answered_with_one_frame() -> None:
    """What the pool sends on while it hears of them leaves as one frame when it has heard all."""

    class Pool(Ear):
        """A pool that has the next batch ready for each that ended."""

        client: WorkerClient

        def on_results(self, ended: Sequence[tuple[Results, list[bytes]]]) -> None:
            """Note how many came together, and send as many."""
            self._hear("together", [message.number for message, _ in ended])
            for message, _ in ended:
                self.client.send(ahead(message.number + 10, b"next"))

    pool = Pool()
    async with FakeWorker(pool) as worker:
        pool.client = worker.client
        one = [b"".join(wire.encode(Results(n, 0.1, [Result(200, "", [])]), [b"x"])) for n in (1, 2, 3)]

        await worker.write(b"".join(one))
        message, bodies = await worker.hear()

    assert pool.heard[0] == ("together", [1, 2, 3])
    assert [batch.number for batch in message.batches] == [11, 12, 13]
    assert bodies == [b"next"] * 3


async def test_orders_arrive_in_their_order() -> None:
    """Load, work, stop."""
    async with FakeWorker(Ear()) as worker:
        worker.client.load(Load("m", "1", "/m", "h", None, None, 1))
        worker.client.send(flight(Request("a", [])))
        worker.client.stop()

        kinds = [type((await worker.hear())[0]) for _ in range(3)]

    assert kinds == [Load, Batch, Stop]


async def test_a_question_for_lengths_carries_the_bodies() -> None:
    """As a batch does, and the number of the batch that it goes before."""
    jobs = flight(Request("a", [Part("body", b"one", "text/plain")]), Request("b", [Part("body", b"two")])).jobs
    async with FakeWorker(Ear()) as worker:
        worker.client.ask_lengths(Question(4, jobs, [b"", b""], 0.5))

        message, bodies = await worker.hear()

    assert isinstance(message, AskLengths)
    assert (message.number, message.limit_s) == (4, 0.5)
    assert [item.parts for item in message.items] == [[("body", "text/plain")], [("body", None)]]
    assert bodies == [b"one", b"two"]


async def test_everything_that_a_worker_says_goes_where_it_belongs() -> None:
    """In its order."""
    ear = Ear()
    raised = Raised(1, 0.1, "handler", "m", 503, "t")
    async with FakeWorker(ear) as worker:
        await worker.say(Hello(1, "3.11"))
        await worker.say(Loaded(1.5))
        await worker.say(Metrics([]))
        await worker.say(Lengths(1, 0.1, [3, -1]))
        await worker.say(Piece(1, RESULTS.results), [b"piece"])
        await worker.say(RESULTS, [b"body"])
        await worker.say(raised)
        await worker.say(NotLoaded("k", "m", "t"))

        heard = await ear.next(7)

    assert heard[:7] == [
        ("loaded", Loaded(1.5)),
        ("metrics", Metrics([])),
        ("lengths", Lengths(1, 0.1, [3, -1])),
        ("piece", (Piece(1, RESULTS.results), [b"piece"])),
        ("results", (RESULTS, [b"body"])),
        ("raised", raised),
        ("not loaded", NotLoaded("k", "m", "t")),
    ]


@pytest.mark.parametrize(
    "message",
    [Hello(1, "3.11"), Loaded(1.5), NotLoaded("k", "m", "t"), Templated(1.0), Forked("w", 7), Exited(7, 0)],
    ids=lambda message: type(message).__name__,
)
async def test_what_a_worker_says_once_or_never_is_broken_the_next_time(message: ToServer) -> None:
    """A flood of honest messages would keep the server busy as well as one of noise."""
    ear = Ear()
    async with FakeWorker(ear) as worker:
        await worker.say(message)
        await worker.say(message)

        heard = await ear.next(2 if isinstance(message, Loaded | NotLoaded) else 1)

    broken = [words for what, words in heard if what == "broken"]
    assert broken
    assert type(message).__name__ in broken[0]


async def test_a_worker_that_measures_without_end_is_broken() -> None:
    """It measures once before each answer; what it has answered counts anew."""
    ear = Ear()
    async with FakeWorker(ear) as worker:
        for _ in range(MAX_METRICS_UNANSWERED):
            await worker.say(Metrics([]))
        await worker.say(RESULTS, [b""])
        for _ in range(MAX_METRICS_UNANSWERED + 1):
            await worker.say(Metrics([]))

        heard = await ear.next(2 * MAX_METRICS_UNANSWERED + 2)

    told = ["metrics"] * MAX_METRICS_UNANSWERED
    assert [what for what, _ in heard][: 2 * len(told) + 2] == [*told, "results", *told, "broken"]


@pytest.mark.parametrize(
    "message",
    [
        Results(1, -1.0, []),
        Results(1, float("inf"), []),
        Results(1, float("nan"), []),
        Results(1, 0.1, [Result(99, "", [])]),
        Results(1, 0.1, [Result(1000, "", [])]),
        Results(1, 0.1, [Result(-5, "", [])]),
        Raised(1, 0.1, "handler", "m", 10**18, "t"),
        Loaded(float("nan")),
        Loaded(1.0, device_bytes=-1),
        Lengths(1, float("inf"), []),
        Metrics([Metric("n", 1.0, "u", "gauge", [], "")] * (MAX_METRIC_VALUES + 1)),
        NotLoaded("k", "m" * 5000, "t"),
        NotLoaded("k", "m", "\n" * 1_000_000),
        Raised(1, 0.1, "k", "m", 503, "\n" * 1_000_000),
        Raised(1, 0.1, "k", "m" * 3_000_000, 503, "t"),
        OutOfStep("d", "\n" * 1_000_000),
        Results(1, 0.1, [Result(200, "r" * 3_000_000, [])]),
    ],
    ids=lambda message: str(message)[:40],
)
async def test_numbers_and_lengths_that_cannot_be_are_broken(message: ToServer) -> None:
    """They are refused as they are decoded, before anything is reckoned with them."""
    ear = Ear()
    async with FakeWorker(ear) as worker:
        await worker.say(message)

        heard = await ear.next()

    assert heard[0][0] == "broken"


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

        worker.client.send(flight(Request("a", [])))
        worker.client.stop()
        worker.client.close()

    assert [what for what, _ in ear.heard] == ["closed"]


async def test_closing_is_at_once() -> None:
    """What was written and not yet sent is lost, as it must be for a worker that reads nothing."""
    ear = Ear()
    async with FakeWorker(ear) as worker:
        worker.client.send(flight(Request("a", [Part("x", bytes(50_000_000))])))
        worker.client.close()

        assert await ear.next() == [("closed", None)]


async def test_what_is_sent_after_closing_is_dropped() -> None:
    """A worker that is ended by force may be asked to stop in the same breath."""
    ear = Ear()
    async with FakeWorker(ear) as worker:
        worker.client.close()

        worker.client.stop()
        worker.client.send(flight(Request("a", [])))
        worker.client.close()

        assert (await ear.next())[-1] == ("closed", None)


@pytest.mark.parametrize("end", ["hung up", "closed"])
async def test_nothing_is_kept_of_an_answer_whose_worker_has_gone(end: str) -> None:
    """Client and peer refer to each other: what they kept would stay until a collection of the oldest generation."""
    ear = Ear()
    async with FakeWorker(ear) as worker:
        await worker.say(Loaded(1.0))
        worker.client._heads.pack([(b"a", b"b")], [])
        await worker.write(b"".join(wire.encode(RESULTS, [bytes(200_000)]))[:150_000])
        await until(lambda: not worker.client._decoder.is_between_frames, "a part of the answer")

        if end == "closed":
            worker.client.close()
        else:
            await worker.hang_up()
        await ear.next(2)

        assert worker.client._decoder.is_between_frames
        assert worker.client._heads.kept == 0
