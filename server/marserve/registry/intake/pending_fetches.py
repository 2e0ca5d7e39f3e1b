"""The progress of archives that are being fetched or unpacked for models, for describe.

Threads write the progress, the event loop reads it; only one thread at a time writes each member.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any, Literal

from msgspec import to_builtins

from marserve.answers.management import Arriving
from marserve.store.addresses.fetch_guard import hide_query
from marserve.store.addresses.pinned_digest import split_digest
from marserve.store.fetching.download_list import Download

State = Literal["waiting", "downloading", "unpacking"]

_ENDINGS = re.compile(r"\.(mar|model|tar\.gz|tgz|zip)$", re.IGNORECASE)


class Awaited:
    """One archive. `version` is None while it is not known."""

    def __init__(self, url: str, model: str | None, version: str | None) -> None:
        """Without a `model` the name is taken from the archive's file."""
        self.url = hide_query(split_digest(url)[0])
        self.model = model or model_of(self.url)
        self.version = version
        self._download: Download | None = None
        self._is_unpacking = False
        self._began = time.monotonic()

    def begin(self, download: Download) -> None:
        """Note the download, listed or running."""
        self._download = download

    def unpack(self) -> None:
        """Note that it was fetched, and waits to be unpacked or is being unpacked."""
        self._is_unpacking = True

    def describe(self) -> dict[str, Any]:
        """Its progress; `download` is its number in the list of downloads. Sizes in bytes, times in seconds."""
        now = time.monotonic()
        entry = Arriving(modelVersion=self.version, url=self.url, state="waiting", seconds=round(now - self._began, 3))
        if self._download is not None:
            status = self._download.status(now)
            entry.download, entry.bytes, entry.size = status.id, status.bytes, status.size
            entry.state = "waiting" if status.state == "waiting" else "downloading"
        if self._is_unpacking:
            entry.state = "unpacking"
        described: dict[str, Any] = to_builtins(entry)
        return described


class Coming:
    """All archives on their way, the oldest first."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._awaited: dict[int, Awaited] = {}

    @contextmanager
    def awaiting(self, url: str, model: str | None, version: str | None) -> Iterator[Awaited]:
        """List an archive as on its way while the block runs. May be called in any thread."""
        number, awaited = next(self._numbers), Awaited(url, model, version)
        self._awaited[number] = awaited
        try:
            yield awaited
        finally:
            del self._awaited[number]

    def of(self, model: str, version: str | None = None) -> list[dict[str, Any]]:
        """The archives on their way for a model; with a `version` only those that are or may be of that one."""
        return [
            awaited.describe()
            for awaited in list(self._awaited.values())
            if awaited.model == model and (version is None or awaited.version in (None, version))
        ]


def model_of(url: str) -> str:
    """The name of a model, taken from its archive's file."""
    name = PurePosixPath(re.split(r"[?#]", url, maxsplit=1)[0].rstrip("/")).name
    return _ENDINGS.sub("", name.partition("@")[0] if url.startswith("hf://") else name)
