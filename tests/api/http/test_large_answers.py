"""Answers over 1 MiB: in pieces, whole, and on disk where their client is slow (RELIABILITY B5)."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from marserve.api.http.large_answers import PIECE_BYTES, Feed, LargeAnswers
from support.http_client import Cut, RawClient
from support.http_listener import Listening, listening
from support.processes import until

pytestmark = pytest.mark.anyio

MIB = 1024 * 1024
HELD = b"POST /predictions/held HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"


@pytest.fixture(params=[True, False], ids=["uvloop", "asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """As the server runs, and as the standard library does: their transports are not the same."""
    return "asyncio", {"use_uvloop": request.param}


def pattern(size: int) -> bytearray:
    """Bytes of which no two stretches are alike: a piece at the wrong place is seen."""
    return bytearray(numpy.arange(size // 8, dtype=">u8").tobytes() + b"x" * (size % 8))


class Bucket:
    """A client that takes what the test says."""

    def __init__(self, room: int = 0) -> None:
        self.room = room
        self.taken = bytearray()
        self.is_fed = self.is_cut = False

    @property
    def is_full(self) -> bool:
        """Whether it takes no piece now."""
        return self.room <= 0

    def take(self, piece: bytes) -> None:
        """Take a piece."""
        self.taken += piece
        self.room -= len(piece)

    def fed(self) -> None:
        """It has all."""
        self.is_fed = True

    def cut(self) -> None:
        """It gets no more."""
        self.is_cut = True


@asynccontextmanager
async def answers_in(folder: Path | None, **bounds: int) -> AsyncIterator[LargeAnswers]:
    """Large answers; nothing of them may be left at the end, in memory, on disk or open."""
    descriptors = set(os.listdir("/proc/self/fd"))
    answers = LargeAnswers(folder, **bounds)
    yield answers
    await until(lambda: (answers.in_memory_bytes, answers.on_disk_bytes) == (0, 0), "nothing is held")
    answers.close()
    assert folder is None or not os.listdir(folder)
    await until(lambda: set(os.listdir("/proc/self/fd")) <= descriptors, "no file is open")


async def put_on_disk(feed: Feed, now: float = 100.0) -> None:
    """Look twice at a client that takes nothing."""
    feed.look(now, 0)
    feed.look(now + 1, 0)
    await until(lambda: feed.is_on_disk, "it is on disk")


# ------------------------------------------------------------------------------------------------- feeding


async def test_a_quick_client_gets_all_at_once_and_nothing_is_put_on_disk(tmp_path: Path) -> None:
    """In pieces, in order, to the last byte; nothing waits when `feed` returns."""
    body = pattern(3 * MIB + 5)
    async with answers_in(tmp_path) as answers:
        bucket = Bucket(room=10 * MIB)

        feed = answers.feed(body, bucket)

        assert not feed.is_open
        assert bucket.is_fed
        assert bucket.taken == body
        assert answers.on_disk_bytes == 0


async def test_a_client_is_given_no_more_than_a_piece_beyond_what_it_takes(tmp_path: Path) -> None:
    """What it does not take is fed when it says so."""
    async with answers_in(tmp_path) as answers:
        bucket = Bucket(room=1)
        feed = answers.feed(pattern(3 * MIB), bucket)

        assert len(bucket.taken) == PIECE_BYTES
        while not bucket.is_fed:
            bucket.room = 1
            feed.go_on()

        assert bucket.taken == pattern(3 * MIB)


async def test_an_answer_for_a_slow_client_leaves_memory_and_comes_from_disk(tmp_path: Path) -> None:
    """Whole, though part of it was taken before; the file has no name."""
    body = pattern(3 * MIB + 3)
    async with answers_in(tmp_path) as answers:
        bucket = Bucket(room=1)
        feed = answers.feed(body, bucket)

        await put_on_disk(feed)

        assert answers.in_memory_bytes == 0
        assert answers.on_disk_bytes == len(body) - PIECE_BYTES
        assert not os.listdir(tmp_path)
        bucket.room = 10 * MIB
        feed.go_on()
        feed.go_on()  # told again while a thread reads: no piece comes twice
        await until(lambda: bucket.is_fed, "it has all")
        assert bucket.taken == body


async def test_what_is_on_disk_already_counts_once_against_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not free any more: counted twice, a client would be cut though its answer has room."""
    async with answers_in(tmp_path) as answers:
        first = answers.feed(pattern(3 * MIB), Bucket(room=1))
        await put_on_disk(first)
        usage = SimpleNamespace(total=100 * MIB, free=10 * MIB + 3 * MIB)
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)

        second = answers.feed(pattern(3 * MIB), Bucket(room=1))
        await put_on_disk(second)

        first.close()
        second.close()


async def test_a_file_is_given_back_by_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk takes its time for large ones, and many clients may leave at once."""
    closed: list[str] = []
    close = os.close

    def watched(descriptor: int) -> None:
        closed.append(threading.current_thread().name)
        close(descriptor)

    async with answers_in(tmp_path) as answers:
        feed = answers.feed(pattern(3 * MIB), Bucket(room=1))
        await put_on_disk(feed)
        monkeypatch.setattr(os, "close", watched)

        feed.close()

        await until(lambda: closed, "it is closed")
        monkeypatch.undo()
    assert all(name.startswith("large-answers") for name in closed)


async def test_what_is_taken_while_it_is_copied_is_not_sent_again(tmp_path: Path) -> None:
    """Memory feeds until the file is whole."""
    async with answers_in(tmp_path) as answers:
        bucket = Bucket(room=1)
        feed = answers.feed(pattern(8 * MIB), bucket)
        feed.look(100.0, 0)
        feed.look(101.0, 0)
        bucket.room = 2 * MIB

        feed.go_on()
        await until(lambda: feed.is_on_disk, "it is on disk")
        bucket.room = 10 * MIB
        feed.go_on()
        await until(lambda: bucket.is_fed, "it has all")

        assert bucket.taken == pattern(8 * MIB)


async def test_a_client_that_keeps_a_good_pace_is_left_in_memory(tmp_path: Path) -> None:
    """One that will have the rest within five seconds; what the transport still holds does not count as taken."""
    async with answers_in(tmp_path) as answers:
        bucket = Bucket(room=1)
        feed = answers.feed(pattern(8 * MIB), bucket)
        feed.look(100.0, 0)
        bucket.room = 2 * MIB
        feed.go_on()

        feed.look(101.0, 0)
        assert answers.on_disk_bytes == 0
        feed.look(102.0, MIB)

        assert answers.on_disk_bytes > 0
        feed.close()


# ------------------------------------------------------------------------------------------------- bounds


async def test_over_the_bound_on_memory_the_oldest_goes_to_disk_at_once(tmp_path: Path) -> None:
    """However quick its client may be; one may always stay."""
    async with answers_in(tmp_path, memory_bytes=4 * MIB) as answers:
        feeds = [answers.feed(pattern(3 * MIB), Bucket()) for _ in range(3)]
        await until(lambda: feeds[0].is_on_disk and feeds[1].is_on_disk, "two are on disk")

        assert not feeds[2].is_on_disk
        assert answers.in_memory_bytes == 3 * MIB
        for feed in feeds:
            feed.close()


async def test_without_room_on_disk_the_oldest_is_cut(tmp_path: Path) -> None:
    """Over the bound on memory only: a slow client alone is no reason."""
    async with answers_in(tmp_path, memory_bytes=4 * MIB, disk_bytes=MIB) as answers:
        buckets = [Bucket(), Bucket()]
        first = answers.feed(pattern(3 * MIB), buckets[0])
        first.look(100.0, 0)
        first.look(101.0, 0)
        assert first.is_open
        assert not buckets[0].is_cut

        second = answers.feed(pattern(3 * MIB), buckets[1])

        assert buckets[0].is_cut
        assert not first.is_open
        assert not buckets[1].is_cut
        second.close()


async def test_where_no_file_can_be_made_the_answer_stays_in_memory(tmp_path: Path) -> None:
    """And it is given all the same."""
    no_folder = tmp_path / "file"
    no_folder.touch()
    async with answers_in(None) as answers:
        answers.folder = no_folder
        bucket = Bucket()
        feed = answers.feed(pattern(3 * MIB), bucket)
        feed.look(100.0, 0)
        feed.look(101.0, 0)
        assert answers.on_disk_bytes > 0
        await until(lambda: answers.on_disk_bytes == 0, "it was tried")

        bucket.room = 10 * MIB
        feed.go_on()

        assert bucket.is_fed
        assert bucket.taken == pattern(3 * MIB)


@pytest.mark.parametrize("moment", ["in memory", "moving", "on disk", "reading"])
async def test_a_client_that_leaves_takes_everything_along(tmp_path: Path, moment: str) -> None:
    """Wherever its answer is; `answers_in` looks that nothing is left."""
    async with answers_in(tmp_path) as answers:
        bucket = Bucket()
        feed = answers.feed(pattern(3 * MIB), bucket)
        if moment == "moving":
            feed.look(100.0, 0)
            feed.look(101.0, 0)
        elif moment != "in memory":
            await put_on_disk(feed)
        if moment == "reading":
            bucket.room = 1
            feed.go_on()

        feed.close()

        assert not feed.is_open
        assert not bucket.is_fed


# ------------------------------------------------------------------------------------------------- on a connection


async def hold_large(listener: Listening, client: RawClient, body: bytearray) -> Any:
    """Have a large answer wait for a client that reads nothing; returns the server's connection."""
    client.reader._transport.pause_reading()  # type: ignore[attr-defined]
    await client.send(HELD)
    (await listener.plane.wait_for(len(listener.plane.submitted) or 1)).answer(body)
    (connection,) = listener.table._connections
    return connection


@pytest.mark.parametrize(
    ("anyio_backend", "is_tls"),
    [
        pytest.param(True, False, id="uvloop-plain"),
        pytest.param(False, True, id="asyncio-tls"),
        pytest.param(True, True, id="uvloop-tls", marks=pytest.mark.long),
        pytest.param(False, False, id="asyncio-plain", marks=pytest.mark.long),
    ],
    indirect=["anyio_backend"],
)
async def test_the_server_keeps_a_piece_for_a_reader_that_takes_nothing(tmp_path: Path, is_tls: bool) -> None:
    """Of 20 MB beyond what the kernel took; then it reads on, gets every byte, and asks again."""
    body = pattern(20_000_000)
    async with listening(tls_folder=tmp_path if is_tls else None) as listener, listener.connect() as client:
        connection = await hold_large(listener, client, body)
        answers = connection.listener.large_answers
        assert connection.unsent <= MIB
        now = monotonic()
        listener.table.sweep(now)
        listener.table.sweep(now + 1)
        await until(lambda: answers.in_memory_bytes == 0, "it left memory")
        assert connection.is_busy

        client.reader._transport.resume_reading()  # type: ignore[attr-defined]
        answer = await client.read()

        assert answer.body == body
        assert answers.on_disk_bytes == 0
        assert (await client.ask(HELD.replace(b"held", b"echo"))).status == 200
        answers.close()


async def test_the_next_request_of_a_connection_waits_for_the_end_of_a_large_answer() -> None:
    """Pipelined: answers never mix."""
    async with listening() as listener, listener.connect() as client:
        await hold_large(listener, client, pattern(20_000_000))
        await client.send(
            HELD.replace(b"held", b"echo").replace(b"Content-Length: 0\r\n\r\n", b"Content-Length: 2\r\n\r\nhi")
        )
        client.reader._transport.resume_reading()  # type: ignore[attr-defined]

        answers = [await client.read(), await client.read()]

    assert [len(answer.body) for answer in answers] == [20_000_000, 2]


async def test_a_reader_of_a_large_answer_that_takes_nothing_is_cut_off_after_60_s() -> None:
    """From disk as from memory; nothing of the answer is kept."""
    async with listening() as listener, listener.connect() as client:
        connection = await hold_large(listener, client, pattern(20_000_000))
        answers = connection.listener.large_answers
        now = monotonic()
        for second in range(60):
            listener.table.sweep(now + second)
        await until(lambda: answers.in_memory_bytes == 0, "it left memory")
        assert len(listener.table) == 1

        listener.table.sweep(now + 61)
        await listener.wait_until_empty()

        await until(lambda: answers.on_disk_bytes == 0, "it left the disk")
        client.reader._transport.resume_reading()  # type: ignore[attr-defined]
        with pytest.raises((Cut, asyncio.LimitOverrunError)):
            await client.read()
        answers.close()


async def test_an_answer_without_room_breaks_the_connection_off_and_is_counted() -> None:
    """It cannot pass for a whole one."""
    async with listening() as listener, listener.connect() as first, listener.connect() as second:
        first.reader._transport.pause_reading()  # type: ignore[attr-defined]
        second.reader._transport.pause_reading()  # type: ignore[attr-defined]
        await first.send(HELD)
        (await listener.plane.wait_for(1)).answer(pattern(20_000_000))
        answers = next(iter(listener.table._connections)).listener.large_answers  # type: ignore[attr-defined]
        answers.memory_bytes = answers.disk_bytes = MIB
        await second.send(HELD)

        (await listener.plane.wait_for(2)).answer(pattern(20_000_000))
        await until(lambda: len(listener.table) == 1, "one is cut")

        first.reader._transport.resume_reading()  # type: ignore[attr-defined]
        with pytest.raises((Cut, asyncio.LimitOverrunError)):
            await first.read()
        assert listener.counts.refused == {"slow_reader": 1}
