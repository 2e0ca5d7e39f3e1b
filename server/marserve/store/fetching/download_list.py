"""The downloads and their progress. Knows no network; it has a lock, because threads write and the event loop reads."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from marserve.answers.management import DownloadEntry
from marserve.store.sources.source import Cancel

MOST_ENDED = 50

State = Literal["waiting", "downloading", "done", "failed", "cancelled"]
Origin = Literal["fetched", "cached"]


class Download:
    """A download under way, or waiting for its place. The thread that fetches writes its progress; `cancel` ends it.

    `has_place`: it does not wait any more, and a thread will take it.
    """

    def __init__(self, number: int, url: str, name: str, now: float) -> None:
        self.id = number
        self.cancel = Cancel()
        self.received = 0
        self.url, self._name = url, name
        self.began, self.ended = now, 0.0
        self._state: State = "waiting"
        self._bytes = 0
        self._size: int | None = None
        self._reason = ""
        self._is_cached = False
        self.has_place = False

    def progress(self, have: int, size: int | None) -> None:
        """Note that the file has `have` bytes."""
        self.received += max(0, have - self._bytes)
        self._state, self._bytes = "downloading", have
        if size is not None:
            self._size = size

    def found(self, size: int) -> None:
        """Note that the cache has it, so that nothing has to be fetched."""
        self._bytes = self._size = size
        self._is_cached = True

    def end(self, state: State, reason: str, now: float) -> None:
        """Note its end."""
        self._state, self._reason, self.ended = state, reason, now

    def status(self, now: float) -> DownloadEntry:
        """Its progress; its seconds count until its end."""
        return DownloadEntry(
            id=self.id,
            url=self.url,
            name=self._name,
            state=self._state,
            bytes=self._bytes,
            seconds=round((self.ended or now) - self.began, 3),
            fromCache=self._is_cached,
            size=self._size,
            reason=self._reason or None,
        )


class DownloadList:
    """The downloads that wait for their place or are under way, the last that ended, and the number of all.

    `ended` counts by result: fetched, cached, failed, cancelled.
    """

    def __init__(self, note: Callable[[float, float, str], None] | None = None) -> None:
        """`note` is called when one has ended, on its thread: begin and end on the monotonic clock, and a sentence."""
        self._note = note
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._queued: dict[int, Download] = {}
        self._running: dict[int, Download] = {}
        self._ended: deque[Download] = deque(maxlen=MOST_ENDED)
        self.ended: Counter[str] = Counter(fetched=0, cached=0, failed=0, cancelled=0)
        self._ended_bytes = 0

    @contextmanager
    def queued(self, url: str) -> Iterator[Download]:
        """List a download that waits for its place, while the block runs; it can be cancelled.

        Once it `has_place`, `under_way` of the same address takes it over, with its number.
        """
        with self._lock:
            download = Download(next(self._numbers), url, url.partition("?")[0].rpartition("/")[2], time.monotonic())
            self._queued[download.id] = download
        try:
            yield download
        finally:
            with self._lock:
                is_here = self._queued.pop(download.id, None) is not None
                if is_here and download.cancel.is_set:
                    download.end("cancelled", download.cancel.reason, time.monotonic())
                    self.ended["cancelled"] += 1
                    self._ended.append(download)

    def _take(self, url: str, name: str) -> Download:
        """The waiting download of this address that has its place now, or a new one."""
        for number, queued in self._queued.items():
            if queued.has_place and queued.url == url:
                return self._queued.pop(number)
        return Download(next(self._numbers), url, name, time.monotonic())

    @contextmanager
    def under_way(self, url: str, name: str) -> Iterator[Download]:
        """List a download while the block runs; an error of the block is its reason. `url` must hold no secrets."""
        with self._lock:
            download = self._take(url, name)
            self._running[download.id] = download
        try:
            yield download
        except BaseException as error:
            reason = str(getattr(error, "reason", "") or error) or type(error).__name__
            self._end(download, "cancelled" if download.cancel.is_set else "failed", reason)
            raise
        self._end(download, "done", "")

    def _end(self, download: Download, state: State, reason: str) -> None:
        with self._lock:
            self._ended_bytes += download.received
            download.end(state, reason, time.monotonic())
            status = download.status(0.0)
            self.ended[state if state != "done" else "cached" if status.fromCache else "fetched"] += 1
            del self._running[download.id]
            self._ended.append(download)
        if self._note is not None:
            self._note(download.began, download.ended, f"download of {status.url}: {state}, {download.received} bytes")

    @property
    def bytes(self) -> int:
        """The number of bytes that came, those of failed downloads included."""
        with self._lock:
            return self._ended_bytes + sum(each.received for each in self._running.values())

    @property
    def running(self) -> int:
        """The number of downloads under way."""
        return len(self._running)

    def statuses(self) -> list[DownloadEntry]:
        """The state of all downloads, the oldest first."""
        now = time.monotonic()
        with self._lock:
            return [
                each.status(now)
                for each in sorted(
                    (*self._ended, *self._running.values(), *self._queued.values()), key=lambda one: one.id
                )
            ]

    def cancel(self, number: int, reason: str) -> bool:
        """Cancel one; False if no download of that number is under way or waits."""
        with self._lock:
            download = self._running.get(number) or self._queued.get(number)
        if download is not None:
            download.cancel.set(reason)
        return download is not None

    def cancel_all(self, reason: str) -> None:
        """Cancel all that are under way or wait."""
        with self._lock:
            downloads = [*self._running.values(), *self._queued.values()]
        for download in downloads:
            download.cancel.set(reason)


FAMILIES: tuple[tuple[str, Callable[[DownloadList], Mapping[str, float]]], ...] = (
    ("marserve_downloads_total", lambda downloads: dict(downloads.ended)),
    ("marserve_downloads", lambda downloads: {"": downloads.running}),
    ("marserve_download_bytes_total", lambda downloads: {"": downloads.bytes}),
)
"""What the metrics page says of downloads: the families, and what reads their numbers."""
