"""Writes snapshots: when the server has started, after each change of the models, and when the server stops.

Files are written by threads, not on the event loop. Changes that happen during a write share the next snapshot. If a
snapshot cannot be written, that is logged as an error, the server goes on, and the write is repeated later.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from marserve.plugins import SnapshotStore
from marserve.registry.catalogue.snapshot import SnapshotVersion, write_models
from marserve.settings.snapshot_files import SnapshotKind, snapshot_name, write_properties

log = logging.getLogger("marserve.registry")

MOST_TRIES = 8
# The pause before a failed write is repeated, in seconds.
TRY_AGAIN_S = 10.0


class SnapshotWriter:
    """Writes snapshots with these settings into `store`; repeats a failed write every `try_again_s`."""

    def __init__(self, store: SnapshotStore, properties: Mapping[str, str], try_again_s: float = TRY_AGAIN_S) -> None:
        self._store = store
        self._try_again_s = try_again_s
        self._properties = dict(properties)
        self._changed = asyncio.Event()
        # Held by the writing thread: a task may be cancelled during a write, and the last snapshot must come after it.
        self._lock = threading.Lock()
        self._newest: str | None = None
        self._knows_newest = False
        self._has_failed = False

    def note_change(self) -> None:
        """Have a snapshot written, because the models have changed."""
        self._changed.set()

    async def run(self, models: Callable[[], Sequence[SnapshotVersion]]) -> None:
        """Write the first snapshot, and one after each change, until cancelled."""
        kind: SnapshotKind = "startup"
        while True:
            self._changed.clear()
            await self.write(kind, models())
            if not self._has_failed:
                kind = "snapshot"
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._try_again_s if self._has_failed else None):
                    await self._changed.wait()

    async def write(self, kind: SnapshotKind, versions: Sequence[SnapshotVersion]) -> None:
        """Write one snapshot; a failure is logged."""
        await asyncio.to_thread(self._write, kind, list(versions))

    def _write(self, kind: SnapshotKind, versions: list[SnapshotVersion]) -> None:
        with self._lock:
            try:
                name = self._save(kind, versions)
            except Exception as error:
                # A border: the store may be a plug-in, and a failed snapshot must not end a server that serves.
                if not self._has_failed:
                    is_known = isinstance(error, OSError)
                    log.error(
                        "A snapshot cannot be written to %s (%s): after a restart the models will be those of the one "
                        "before",
                        self._store.where,
                        error,
                        exc_info=None if is_known else error,
                    )
                self._has_failed = True
                return
            if self._has_failed:
                log.warning("Snapshots are written to %s again", self._store.where)
            self._has_failed = False
        log.debug("Snapshot %s of %d versions", name, len(versions))

    def _save(self, kind: SnapshotKind, versions: list[SnapshotVersion]) -> str:
        if not self._knows_newest:
            self._look_for_newest()
        for _ in range(MOST_TRIES):
            name = snapshot_name(kind, datetime.now(), self._newest)
            document = write_models(versions, name, int(time.time() * 1000))
            try:
                self._store.save(name, write_properties({**self._properties, "model_snapshot": document}))
            except FileExistsError:  # by another server with the same folder
                self._look_for_newest()
                continue
            self._newest = name
            return name
        raise FileExistsError(f"{name} and the names before it are taken")

    def _look_for_newest(self) -> None:
        newest = self._store.newest()
        self._newest = newest[0] if newest is not None else None
        self._knows_newest = True
