"""The logs as they are asked for and followed: files where there are some, else what standard output just got.

It runs on the event loop. Searches run in threads, a few at a time, and each for a bounded time.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from marserve.errors import TooManyAskLogs
from marserve.telemetry.logs.recent_lines import Follower, RecentLines
from marserve.telemetry.logs.records import LogName, Record, Wanted
from marserve.telemetry.logs.search import Found, search_bytes, search_files, wanted_of

# How many searches run at a time, and how many wait for them.
MOST_SEARCHES, MOST_WAITING = 2, 8
MOST_FOLLOWERS = 16
SEARCH_S = 3.0
# How long after a search its lines may still come from the writing threads.
TWICE_S = 2.0


class LogBook:
    """`folder` has the files; None if there are none. `outlets` are those whose lines can be followed."""

    def __init__(self, folder: Path | None, outlets: Sequence[RecentLines]) -> None:
        self._folder = folder
        self._outlets = outlets
        self._followers: set[Follower] = set()
        self._searches = 0
        self._is_over = False
        self._turns = asyncio.Semaphore(MOST_SEARCHES)

    async def search(self, wanted: Wanted, tail: int) -> Found:
        """The newest `tail` wanted records. Raises TooManyAskLogs."""
        if self._searches >= MOST_SEARCHES + MOST_WAITING:
            raise TooManyAskLogs("searched", MOST_SEARCHES + MOST_WAITING)
        self._searches += 1
        try:
            async with self._turns:
                return await asyncio.to_thread(self._search, wanted, tail)
        finally:
            self._searches -= 1

    def _search(self, wanted: Wanted, tail: int) -> Found:
        if self._folder is not None:
            return search_files(self._folder, wanted, tail, time.monotonic() + SEARCH_S)
        [outlet] = self._outlets or [RecentLines()]
        data, is_all = outlet.kept()
        return search_bytes(data, is_all, wanted, tail)

    @asynccontextmanager
    async def follow(self, wanted: Wanted, tail: int) -> AsyncIterator[Following]:
        """The newest `tail` wanted records, and those that come from now on. Raises TooManyAskLogs."""
        if len(self._followers) >= MOST_FOLLOWERS:
            raise TooManyAskLogs("followed", MOST_FOLLOWERS)
        follower = Follower(wanted.needles())
        self._followers.add(follower)
        self._pass_on()
        if self._is_over:
            follower.close()  # it gets what there is, and the server stops
        try:
            yield Following(follower, wanted, await self.search(wanted, tail) if tail else Found([], True))
        finally:
            follower.close()
            self._followers.discard(follower)
            self._pass_on()

    def end_following(self) -> None:
        """End all followers, and those that come from now on: the server stops."""
        self._is_over = True
        for follower in self._followers:
            follower.close()

    def _pass_on(self) -> None:
        for outlet in self._outlets:
            outlet.followers = tuple(self._followers)


class Following:
    """One follower: `found` was there, `next` gives what comes."""

    def __init__(self, follower: Follower, wanted: Wanted, found: Found) -> None:
        self.found = found
        self._follower = follower
        self._wanted = wanted
        # What was written while the files were searched comes a second time.
        self._known = Counter(record.text for record in found.records)
        self._known_until = time.monotonic() + TWICE_S

    @property
    def is_too_slow(self) -> bool:
        """Whether lines were lost, as the client took them too slowly."""
        return self._follower.is_too_slow

    async def next(self) -> list[Record] | None:
        """The next records, maybe none; None at the end."""
        chunks = await self._follower.next()
        if not chunks:
            return None
        records = await asyncio.to_thread(self._read, chunks)
        if time.monotonic() < self._known_until:
            return [record for record in records if not self._is_known(record)]
        self._known.clear()
        return records

    def _is_known(self, record: Record) -> bool:
        if self._known[record.text] <= 0:
            return False
        self._known[record.text] -= 1
        return True

    def _read(self, chunks: Sequence[tuple[LogName | None, bytes]]) -> list[Record]:
        return [record for log, data in chunks for record in wanted_of(data, log, self._wanted)]
