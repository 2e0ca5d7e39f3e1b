"""Builds the desired state from the settings: place, history, reconciler, and what calls may change.

settings → `DesiredStates` → `read_first` (before anything is begun) → `start` (the models) → `watch`
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from marserve.desired_state.document import read
from marserve.desired_state.document_place import DocumentPlace, DocumentUnreadable, FilePlace, Found, ObjectPlace
from marserve.desired_state.history import History
from marserve.desired_state.memory_cost import MemoryCost
from marserve.desired_state.policies import Changes
from marserve.desired_state.reconciler import Reconciler
from marserve.errors import BadDesiredState, BadSettings, MarserveError
from marserve.registry.models import Registry
from marserve.settings.table import Settings
from marserve.store.addresses.fetch_guard import (
    OBJECT_SCHEMES,
    AllowedUrls,
    Target,
    hide_query,
    is_address,
    parse_target,
)
from marserve.store.sources.file_source import FileOrigins
from marserve.store.sources.http import HttpOrigins
from marserve.store.sources.local import LocalStore
from marserve.store.sources.object_store import ObjectStores
from marserve.store.sources.source import Source, SourceError

Numbers = Callable[[Reconciler], Mapping[str, float]]

# The metrics: name, kind, text, label, and the function that reads the values by label.
FAMILIES: tuple[tuple[str, Numbers], ...] = (
    (
        "marserve_desired_state_changes_total",
        lambda its: {"applied": its.counts.applied, "failed": its.counts.failed, "unreadable": its.counts.unreadable},
    ),
    (
        "marserve_desired_state_in_force",
        lambda its: (
            {} if its.current is None else {its.current.digest: float(its.failure is None and its.unreadable is None)}
        ),
    ),
    (
        "marserve_desired_state_last_change_seconds",
        lambda its: {"duration": its.counts.last_seconds, "at": its.counts.last_at} if its.counts.applied else {},
    ),
    ("marserve_desired_state_kept_versions", lambda its: its.kept_by_model()),
)


def state_folder(settings: Settings) -> Path:
    """The folder for what the next start needs."""
    return settings.state_folder or (settings.log_location or settings.working_directory / "logs") / "state"


class DesiredStates:
    """The desired state of one server, by its settings."""

    def __init__(self, settings: Settings, environment: Mapping[str, str] = os.environ) -> None:
        """Read the history. Blocks. Raises BadSettings."""
        self._settings = settings
        self._objects = ObjectStores(settings.stores, environment)
        self.place = self._place()
        # Two folders, so that a start with a document never falls back to what was applied without one.
        folder = state_folder(settings) / ("desired-state" if self.place is not None else "applied-documents")
        try:
            self._history = History(folder, is_needed=self.place is not None)
        except OSError as error:
            raise BadSettings(
                f"The folder {folder} cannot be used ({error.strerror}); name one that the server may write to in "
                "state_folder",
                key="state_folder",
            ) from error
        self._found: Found | None = None

    def read_first(self) -> None:
        """Read the document before anything is begun. Blocks.

        Raises BadSettings if it is wrong or cannot be read, and no earlier document is known to start with.
        """
        if self.place is None:
            return
        try:
            self._found = self.place.read()
            read(self._found.data, self.place.shown)
        except (BadDesiredState, DocumentUnreadable) as error:
            if self._history.newest is None:
                raise BadSettings(str(error), key="desired_state") from error

    def build(self, registry: Registry) -> Reconciler:
        """The reconciler of this registry."""
        cost = MemoryCost(
            LocalStore(self._settings.model_store, roots=self._settings.model_roots),
            self._open_archive,
        )
        self.reconciler = Reconciler(
            registry,
            self._history,
            self.place,
            interval_s=self._settings.desired_state_interval,
            undo_window_s=self._settings.undo_window,
            weigh=cost,
            find_trouble=cost.trouble,
        )
        registry.remarks_of_readiness.append(self.reconciler.remarks)
        return self.reconciler

    def changes(self, registry: Registry) -> Changes:
        """The changes that calls may make, by the settings."""
        if self.place is None:
            return Changes(registry)
        if self._settings.desired_state_changes == "adopt":
            return Changes(registry, adopts=self.reconciler)
        return Changes(registry, refused_by=self.place.shown)

    def guard(self, registry: Registry) -> Callable[[str], None]:
        """Refuses calls that would begin something which the document decides; it takes the call's name."""
        changes = self.changes(registry)
        return lambda call: changes.check(f"run `{call}`")

    async def start(self, registry: Registry) -> None:
        """Load the models of the document, in place of `Registry.load_at_start`."""
        found, self._found = self._found, None
        models, failures = await self.reconciler.start(found)
        registry.end_start(models, failures)

    async def watch(self, started: asyncio.Task[None]) -> None:
        """Watch the document, once the start has ended."""
        await asyncio.wait([started])
        await self.reconciler.watch()

    # ------------------------------------------------------------------------------------------- inside

    def _place(self) -> DocumentPlace | None:
        named = self._settings.desired_state
        if named is None:
            return None
        if "://" not in named:
            return FilePlace(self._settings.working_directory / named, named)
        try:
            target = parse_target(named)
            if target.scheme == "file":
                return FilePlace(Path(target.path), hide_query(named))
            # The operator named it in a setting, so it needs no pattern of its own.
            allowed = AllowedUrls((re.escape(target.url),))
            return ObjectPlace(lambda: self._open(target, allowed), hide_query(target.url))
        except (SourceError, MarserveError) as error:
            raise BadSettings(f"desired_state is {hide_query(named)!r}: {error}", key="desired_state") from error

    def _open(self, target: Target, allowed: AllowedUrls) -> Source:
        if target.scheme in OBJECT_SCHEMES:
            return self._objects.open(target)
        if target.scheme == "file":
            return FileOrigins(allowed)(target)
        return HttpOrigins(allowed)(target)

    def _open_archive(self, url: str) -> Source | None:
        """An archive of the document, opened to estimate its size. Raises ArchiveNotFound."""
        if not is_address(url):
            return None
        target = parse_target(url)
        if target.scheme not in ("http", "https", "file", *OBJECT_SCHEMES):
            return None
        allowed = AllowedUrls(self._settings.allowed_urls)
        allowed.check(target)
        return self._open(target, allowed)
