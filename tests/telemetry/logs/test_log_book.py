"""The logs as they are asked for and followed."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from marserve.errors import TooManyAskLogs
from marserve.telemetry.logs import log_book
from marserve.telemetry.logs.log_book import MOST_FOLLOWERS, MOST_SEARCHES, MOST_WAITING, LogBook
from marserve.telemetry.logs.recent_lines import RecentLines
from marserve.telemetry.logs.records import Record, Wanted
from marserve.telemetry.logs.search import Found


def line(text: str, at: int = 0) -> str:
    """A line of the server log."""
    return f"2026-01-31T12:00:00,{at:03} [INFO ] main x - {text}"


def texts(records: list[Record] | None) -> list[str]:
    """What stands behind the heads."""
    return [record.text.rpartition(" - ")[2] for record in records or []]


def test_files_are_searched_where_there_are_some(tmp_path: Path) -> None:
    """Else what standard output got."""
    (tmp_path / "ts_log.log").write_text(line("in the file") + "\n")
    recent = RecentLines(most_bytes=1000)
    recent.add((line("printed") + "\n").encode())

    async def play() -> None:
        assert texts((await LogBook(tmp_path, []).search(Wanted(), 10)).records) == ["in the file"]
        assert texts((await LogBook(None, [recent]).search(Wanted(), 10)).records) == ["printed"]
        assert (await LogBook(None, []).search(Wanted(), 10)).records == []

    asyncio.run(play())


def test_searches_wait_for_each_other_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few run, a few wait, the next is refused; the loop goes on."""
    go_on = threading.Event()
    running = 0

    def search(*_: object) -> Found:
        nonlocal running
        running += 1
        assert running <= MOST_SEARCHES
        assert go_on.wait(10)
        running -= 1
        return Found([], True)

    monkeypatch.setattr(log_book, "search_bytes", search)

    async def play() -> None:
        book = LogBook(None, [])
        asked = [asyncio.ensure_future(book.search(Wanted(), 1)) for _ in range(MOST_SEARCHES + MOST_WAITING)]
        await asyncio.sleep(0)
        with pytest.raises(TooManyAskLogs, match="searched by 10"):
            await book.search(Wanted(), 1)
        go_on.set()
        await asyncio.gather(*asked)
        await book.search(Wanted(), 1)

    asyncio.run(play())


def test_a_follower_gets_what_was_there_once_and_then_what_comes(tmp_path: Path) -> None:
    """A line that was written during the search comes from both."""
    (tmp_path / "ts_log.log").write_text(f"{line('one', 1)}\n{line('two', 2)}\n")
    outlet = RecentLines("server")

    async def play() -> None:
        async with LogBook(tmp_path, [outlet]).follow(Wanted(), 10) as following:
            assert texts(following.found.records) == ["one", "two"]
            outlet.add(f"{line('two', 2)}\n{line('three', 3)}\n".encode())
            assert texts(await following.next()) == ["three"]
            outlet.add(f"{line('two', 2)}\n".encode())
            assert texts(await following.next()) == ["two"]
        assert outlet.followers == ()

    asyncio.run(play())


def test_a_log_that_is_rolled_does_not_end_a_follower(tmp_path: Path) -> None:
    """It follows what is written, not a file."""
    path = tmp_path / "ts_log.log"
    path.write_text(line("one", 1) + "\n")
    outlet = RecentLines("server")

    async def play() -> None:
        async with LogBook(tmp_path, [outlet]).follow(Wanted(), 0) as following:
            path.rename(tmp_path / "ts_log.31-Jan.log.gz")
            outlet.add(f"{line('two', 2)}\n".encode())
            assert texts(await following.next()) == ["two"]

    asyncio.run(play())


def test_followers_are_bounded_and_end_with_the_server() -> None:
    """The next one is refused until another has gone."""

    async def play() -> None:
        book = LogBook(None, [RecentLines()])
        async with book.follow(Wanted(), 0) as first:
            ways = [book.follow(Wanted(), 0) for _ in range(MOST_FOLLOWERS - 1)]
            for way in ways:
                await way.__aenter__()
            with pytest.raises(TooManyAskLogs, match="followed by 16"):
                async with book.follow(Wanted(), 0):
                    pass
            await ways[0].__aexit__(None, None, None)
            async with book.follow(Wanted(), 0):
                pass
            book.end_following()
            assert await first.next() is None
            await ways[1].__aexit__(None, None, None)
            async with book.follow(Wanted(), 0) as late:
                assert await asyncio.wait_for(late.next(), 10) is None
            for way in ways[2:]:
                await way.__aexit__(None, None, None)

    asyncio.run(play())
