"""Watches one place that holds archives: looks at it from time to time, and sooner after a hint.

A look is one listing. Its changes go to `on_changes`. Anything else that reports a change (the system, an event from an
object store, an operator) is only a hint, after which the next look comes sooner. A place that does not answer is asked
less and less often, and its known objects stay known.

    notice, hint, clock → a thread lists, or asks for one object → `Sightings` → `on_changes`
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from marserve.store.sources.local import ARCHIVE_ENDINGS
from marserve.store.sources.source import Entry, Failed, Listing, Missing, SourceError
from marserve.store.watching.sightings import Change, Sightings, is_same, pause_s
from marserve.store.watching.watched_folder import FolderNotices, WatchedFolder

log = logging.getLogger("marserve.store")

Result = TypeVar("Result")
Expected = Literal["there", "gone"]

# Bounds of what one watch holds in memory.
MOST_ARCHIVES = 100_000
MOST_OBJECTS = 1_000_000
MOST_HINTS = 1000
# From this many hints on, one listing is cheaper.
HINTS_FOR_A_LOOK = 20
# A file that is being written causes notices all the time.
SHORTEST_PAUSE_S = 0.2
# A listing that takes longer counts as failed; the next one begins only after it has ended.
LOOK_LIMIT_S = 120.0
CLOSE_LIMIT_S = 5.0
FIRST_HINT_RETRY_S = 0.5
LONGEST_HINT_RETRY_S = 10.0
# The most incomplete objects in a description.
MOST_SHOWN = 100


class Place(Protocol):
    """A place that can be watched. `list` and `stat` block, and raise SourceError."""

    @property
    def shown(self) -> str:
        """Its address without secrets."""

    def list(self) -> Iterator[Entry]:
        """Every object that may be an archive."""

    def stat(self, key: str) -> Entry | None:
        """One of them as it is now, None if it is missing."""

    def close(self) -> None:
        """End requests under way."""


class ListedPlace:
    """The archives of a store whose keys begin with `prefix`, by their keys without its folders."""

    def __init__(self, listing: Listing, prefix: str = "") -> None:
        self._listing = listing
        self._prefix = prefix
        self._folder = prefix[: prefix.rfind("/") + 1]

    @property
    def shown(self) -> str:
        """The store's address and the prefix."""
        return self._listing.shown

    def list(self) -> Iterator[Entry]:
        """Every archive, by one listing of the store. Raises as the listing, and Failed for too many objects."""
        for number, entry in enumerate(self._listing.list(self._prefix)):
            if number >= MOST_OBJECTS:
                raise Failed(f"there are more than {MOST_OBJECTS} objects; watch a longer prefix")
            if is_archive(entry.key[len(self._folder) :]):
                yield self._shorten(entry)

    def stat(self, key: str) -> Entry | None:
        """One archive, by one request, None if it is missing."""
        source = self._listing.open(Entry(self._folder + key, None))
        try:
            found = source.stat()
        except Missing:
            return None
        finally:
            source.close()
        return Entry(key, found.size, found.etag, found.modified, found.has_ranges)

    def close(self) -> None:
        """End requests under way."""
        self._listing.close()

    def _shorten(self, entry: Entry) -> Entry:
        return Entry(entry.key[len(self._folder) :], entry.size, entry.etag, entry.modified, entry.has_ranges)


def is_archive(key: str) -> bool:
    """Whether an object of this key may be an archive: by its ending, and not hidden."""
    return key.lower().endswith(ARCHIVE_ENDINGS) and not any(part.startswith(".") for part in key.split("/"))


@dataclass(slots=True)
class _Hint:
    """An event about one object, and how long to look for it."""

    expected: Expected
    etag: str | None
    until: float
    next_at: float
    tries: int = 0


class Watch:
    """The watch of one place. `run` is its task; all else is called on the event loop.

    Times in seconds. `interval_s` is the pause between looks; with `notices` the system reports changes of a folder
    too. A hinted object that is not there yet is looked for again until `late_s` is over.
    """

    def __init__(
        self,
        name: str,
        place: Place,
        sightings: Sightings,
        on_changes: Callable[[list[Change]], None],
        *,
        interval_s: float,
        late_s: float = 60.0,
        notices: bool = True,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.name = name
        self.place = place
        self.interval_s = interval_s
        self._sightings = sightings
        self._on_changes = on_changes
        self._late_s = late_s
        self._wants_notices = notices and isinstance(place, WatchedFolder)
        self._notices: FolderNotices | None = None
        self._armed_for: tuple[int, int] | None = None
        self._no_notices = ""
        self._chance = chance
        self._wake = asyncio.Event()
        self._hints: dict[str, _Hint] = {}
        self._busy: asyncio.Future[Any] | None = None
        self._threads: list[threading.Thread] = []
        self._next_look = 0.0
        self._last_look = float("-inf")
        self._failures = 0
        self._last_success: float | None = None
        self._last_error: tuple[float, str] | None = None
        self._keys = 0
        self._look_s = 0.0
        self.looks: Counter[str] = Counter(done=0, failed=0)
        self.changes: Counter[str] = Counter(added=0, replaced=0, removed=0)
        self.hints: Counter[str] = Counter(taken=0, found=0, given_up=0)

    # -------------------------------------------------------------------------------------------- from outside

    def look_soon(self) -> None:
        """Look now, or after the shortest pause since the last look."""
        self._next_look = min(self._next_look, self._last_look + SHORTEST_PAUSE_S)
        self._wake.set()

    def hint(self, key: str, expected: Expected = "there", etag: str | None = None) -> None:
        """Look soon for an object that is said to be added (with this ETag) or removed.

        Several hints for one object become one; with very many hints the whole place is listed instead.
        """
        self.hints["taken"] += 1
        if isinstance(self.place, WatchedFolder) or (key not in self._hints and len(self._hints) >= MOST_HINTS):
            self.look_soon()
            return
        now = asyncio.get_running_loop().time()
        self._hints[key] = _Hint(expected, etag, now + self._late_s, now)
        self._wake.set()

    @property
    def success_age_s(self) -> float | None:
        """The seconds since the place last answered; None if it never did."""
        return None if self._last_success is None else max(0.0, time.time() - self._last_success)

    @property
    def keys(self) -> int:
        """The number of archives in the last look."""
        return self._keys

    def describe(self) -> dict[str, Any]:
        """The state of the watch, for management."""
        unsettled = list(self._sightings.unsettled.items())[:MOST_SHOWN]  # a copy at once: a look may be under way
        return {
            "name": self.name,
            "place": self.place.shown,
            "reachable": self._last_success is not None and not self._failures,
            "mode": "notices" if self._notices is not None else "polling",
            **({"noNotices": self._no_notices} if self._no_notices else {}),
            "pollIntervalSeconds": self.interval_s,
            "archives": self._keys,
            "lastSuccess": _instant(self._last_success),
            "lastLookSeconds": round(self._look_s, 4),
            "failuresInARow": self._failures,
            "lastError": None
            if self._last_error is None
            else {"at": _instant(self._last_error[0]), "reason": self._last_error[1]},
            "looks": dict(self.looks),
            "changes": dict(self.changes),
            "hints": {**self.hints, "waiting": len(self._hints)},
            "unfinished": [
                {"key": key, "size": each.entry.size, "reason": each.reason or "it has not kept still long enough"}
                for key, each in unsettled
            ],
        }

    # -------------------------------------------------------------------------------------------- life

    async def run(self) -> None:
        """Watch until cancelled. When this has returned, no thread of the watch is left."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._wake.clear()
                due = self._due_hints()
                if loop.time() >= self._next_look or len(due) > HINTS_FOR_A_LOOK:
                    await self._look(due)
                else:
                    await self._look_at_hints(due)
                pause = self._next_at() - loop.time()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, pause)):
                        await self._wake.wait()
        finally:
            await self._close()

    def _next_at(self) -> float:
        # After a failure a thread may still be using the sightings.
        settling = None if self._failures else self._sightings.next_look_at()
        if settling is not None:
            self._next_look = min(self._next_look, max(settling, self._last_look + SHORTEST_PAUSE_S))
        return min([self._next_look, *(hint.next_at for hint in self._hints.values())])

    def _due_hints(self) -> dict[str, _Hint]:
        """The hinted objects to ask for now; sets the time of each one's next request."""
        now = asyncio.get_running_loop().time()
        due = {key: hint for key, hint in self._hints.items() if hint.next_at <= now}
        for hint in due.values():
            hint.tries += 1
            pause = min(LONGEST_HINT_RETRY_S, FIRST_HINT_RETRY_S * 2.0 ** (hint.tries - 1))
            hint.next_at = now + pause * (0.5 + 0.5 * self._chance())
        return due

    async def _look(self, hints: dict[str, _Hint]) -> None:
        """List the place once and report the changes."""
        loop = asyncio.get_running_loop()
        begin = self._last_look = loop.time()
        self._next_look = begin + self.interval_s

        def look() -> list[Change]:
            entries = []
            for entry in self.place.list():
                entries.append(entry)
                if len(entries) > MOST_ARCHIVES:
                    raise Failed(f"there are more than {MOST_ARCHIVES} archives; watch a part of them")
            self._keys = len(entries)
            return self._sightings.look(begin, entries)

        changes = await self._ask(look, self._tell)
        self._look_s = loop.time() - begin
        if changes is None:
            self._next_look = loop.time() + pause_s(self.interval_s, self._failures, self._chance())
            self._give_up_late(hints)
            return
        self.looks["done"] += 1
        self._next_look = begin + pause_s(self.interval_s, 0, self._chance())
        self._tell(changes)
        for key, hint in hints.items():
            self._judge_hint(key, hint, self._sightings.known(key))
        self._arm()

    async def _look_at_hints(self, hints: dict[str, _Hint]) -> None:
        """Ask for single objects."""
        loop = asyncio.get_running_loop()
        for key, hint in hints.items():

            def look(key: str = key) -> tuple[Entry | None, list[Change]]:
                entry = self.place.stat(key)
                return entry, self._sightings.look_at(loop.time(), key, entry)

            found = await self._ask(look, lambda late: self._tell(late[1]))
            if found is not None:
                self._tell(found[1])
                self._judge_hint(key, hint, found[0])
            else:
                self._give_up_late({key: hint})

    def _judge_hint(self, key: str, hint: _Hint, entry: Entry | None) -> None:
        """Forget a hint that came true, or whose time is over."""
        if self._hints.get(key) is not hint:
            return
        known = self._sightings.known(key)
        if hint.expected == "gone":
            has_come_true = entry is None and known is None
        else:
            is_the_one = entry is not None and (hint.etag is None or _is_etag(entry.etag, hint.etag))
            has_come_true = is_the_one and known is not None and entry is not None and is_same(known, entry)
        if has_come_true:
            self.hints["found"] += 1
            del self._hints[key]
        else:
            self._give_up_late({key: hint})

    def _give_up_late(self, hints: dict[str, _Hint]) -> None:
        """Forget hints whose time is over; regular looks go on."""
        now = asyncio.get_running_loop().time()
        for key, hint in hints.items():
            if now < hint.until or self._hints.get(key) is not hint:
                continue
            del self._hints[key]
            self.hints["given_up"] += 1
            said = "came" if hint.expected == "there" else "went"
            log.warning("Watch %s: an event said that %s %s; the store did not show it in time", self.name, key, said)

    def _tell(self, changes: list[Change]) -> None:
        for change in changes:
            self.changes[change.kind] += 1
            log.info("Watch %s: %s %s", self.name, change.entry.key, change.kind)
        if changes:
            self._on_changes(changes)

    # -------------------------------------------------------------------------------------------- the thread

    async def _ask(self, work: Callable[[], Result], take_late: Callable[[Result], None]) -> Result | None:
        """Run blocking work in a thread of its own; None if it failed, which is noted.

        A result after the limit goes to `take_late`: its changes are known by then, and no later look reports them.
        """
        if self._busy is not None and not self._busy.done():
            self._note_failure(f"it has not answered for more than {LOOK_LIMIT_S:g} s")
            return None
        self._busy = asyncio.get_running_loop().create_future()
        thread = threading.Thread(
            target=_work, args=(work, self._busy, self._busy.get_loop()), name=f"watch-{self.name}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:
            self._busy = None
            self._note_failure("the system gives no thread to ask it")
            return None
        # The one before has handed its result over, and may not have ended yet.
        self._threads = [thread, *(each for each in self._threads if each.is_alive())]
        try:
            async with asyncio.timeout(LOOK_LIMIT_S):
                found: Result = await asyncio.shield(self._busy)
        except TimeoutError:
            self._note_failure(f"it did not answer within {LOOK_LIMIT_S:g} s")
            self._busy.add_done_callback(_hand_late_to(take_late))
            return None
        except SourceError as error:
            self._note_failure(str(error))
            return None
        except Exception as error:
            # A border: a defect in one look must not end the watch.
            log.exception("Watch %s: a look failed unexpectedly", self.name)
            self._note_failure(f"an unexpected error ({type(error).__name__}); the log says more")
            return None
        if self._failures:
            log.info("Watch %s: %s answers again, after %d failures", self.name, self.place.shown, self._failures)
        self._failures = 0
        self._last_success = time.time()
        return found

    def _note_failure(self, reason: str) -> None:
        self.looks["failed"] += 1
        self._failures += 1
        if self._last_error is None or self._failures == 1 or self._last_error[1] != reason:
            log.warning("Watch %s: %s cannot be looked at: %s", self.name, self.place.shown, reason)
        self._last_error = (time.time(), reason)

    # -------------------------------------------------------------------------------------------- notices

    def _arm(self) -> None:
        """Have the system report changes of the folder, also after another folder has taken its place."""
        place = self.place
        if not self._wants_notices or not isinstance(place, WatchedFolder) or place.identity == self._armed_for:
            return
        if self._notices is not None:
            self._notices.close()
        loop = asyncio.get_running_loop()
        self._armed_for, self._no_notices = place.identity, ""

        def on_notice() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self.look_soon)

        def on_end(reason: str) -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._lose_notices, notices, reason)

        notices = self._notices = FolderNotices(place.root, on_notice, on_end)
        notices.start()
        # Changes between the last look and this moment caused no notice.
        self.look_soon()

    def _lose_notices(self, notices: FolderNotices, reason: str) -> None:
        if self._notices is notices:
            self._notices, self._no_notices = None, reason
            log.warning(
                "Watch %s: the system tells of no changes in %s (%s); it is looked at every %g s",
                self.name,
                self.place.shown,
                reason,
                self.interval_s,
            )

    async def _close(self) -> None:
        if self._notices is not None:
            await asyncio.to_thread(self._notices.close, CLOSE_LIMIT_S)
            self._notices = None
        await asyncio.to_thread(self.place.close)
        for thread in self._threads:
            await asyncio.to_thread(thread.join, CLOSE_LIMIT_S)
        if any(thread.is_alive() for thread in self._threads):
            log.warning("Watch %s: %s still does not answer; its look is left behind", self.name, self.place.shown)


def _work(work: Callable[[], Result], done: asyncio.Future[Result], loop: asyncio.AbstractEventLoop) -> None:
    """Run `work` on this thread and hand its end to the loop, unless that has ended."""

    def finish(result: Any, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)
            done.exception()  # retrieved here, so that asyncio does not log it

    result: Any = None
    failure: BaseException | None = None
    try:
        result = work()
    except BaseException as error:
        failure = error
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(finish, result, failure)


def _hand_late_to(take: Callable[[Result], None]) -> Callable[[asyncio.Future[Result]], None]:
    """A callback for a future that ended too late: passes its result on to `take`, if it has one."""

    def hand(done: asyncio.Future[Result]) -> None:
        if not done.cancelled() and done.exception() is None:
            take(done.result())

    return hand


def _is_etag(one: str | None, other: str) -> bool:
    """Whether two spellings mean the same ETag: events leave the quotes out."""
    return one is None or one.strip('"') == other.strip('"')


def _instant(seconds: float | None) -> str | None:
    return None if seconds is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
