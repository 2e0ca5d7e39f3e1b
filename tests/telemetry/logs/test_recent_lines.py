"""What an outlet has just written: kept within bounds, and passed to followers."""

from __future__ import annotations

import asyncio
import threading

from marserve.telemetry.logs.recent_lines import Follower, RecentLines, ShownSink


class Sink:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.data = b""
        self.is_closed = False

    def write(self, data: bytes, give_up: threading.Event) -> None:
        """Keep it."""
        self.data += data

    def close(self) -> None:
        """Note it."""
        self.is_closed = True


def test_what_is_written_is_kept_too() -> None:
    """In order, up to a bound; then the oldest is forgotten."""
    sink, recent = Sink(), RecentLines(most_bytes=8)
    shown = ShownSink(sink, recent)

    shown.write(b"one\n", threading.Event())
    shown.write(b"two\n", threading.Event())
    assert recent.kept() == (b"one\ntwo\n", True)
    shown.write(b"three\n", threading.Event())
    shown.close()

    assert recent.kept() == (b"three\n", False)
    assert (sink.data, sink.is_closed) == (b"one\ntwo\nthree\n", True)


def test_without_room_nothing_is_kept() -> None:
    """A file has it."""
    recent = RecentLines("model")
    recent.add(b"one\n")

    assert recent.kept() == (b"", True)


def test_a_follower_gets_what_comes_from_any_thread() -> None:
    """With the log that it came from."""

    async def play() -> list[tuple[str | None, bytes]]:
        follower, recent = Follower(), RecentLines("model")
        recent.followers = (follower,)
        await asyncio.to_thread(recent.add, b"one\n")
        await asyncio.to_thread(recent.add, b"two\n")
        return list(await follower.next())

    assert asyncio.run(play()) == [("model", b"one\n"), ("model", b"two\n")]


def test_a_follower_is_woken_for_what_it_may_want_alone() -> None:
    """The rest costs one look at its bytes."""

    async def play() -> list[bytes]:
        follower = Follower([b"r-1"])
        follower.take(None, b"about r-2\n")
        waiting = asyncio.ensure_future(follower.next())
        await asyncio.sleep(0)
        assert not waiting.done()
        follower.take(None, b"about r-1\n")
        return [data for _, data in await waiting]

    assert asyncio.run(play()) == [b"about r-1\n"]


def test_a_follower_that_is_too_slow_gets_no_more() -> None:
    """What waits for it stays bounded; it is told after what it has."""

    async def play() -> None:
        follower = Follower(most_bytes=6)
        for data in (b"one\n", b"two\n", b"x"):
            follower.take(None, data)
        assert await follower.next() == [(None, b"one\n")]
        assert await follower.next() == []
        assert follower.is_too_slow

    asyncio.run(play())


def test_a_closed_follower_ends() -> None:
    """The server stops."""

    async def play() -> None:
        follower = Follower()
        waiting = asyncio.ensure_future(follower.next())
        await asyncio.sleep(0)
        follower.close()
        assert await waiting == []
        assert not follower.is_too_slow

    asyncio.run(play())
