"""A change of many models at once: prepared beside what serves, then in force between two awaits, or not at all.

    prepare, widen   new versions load, off the list; versions that get more workers begin to start them
    wait             until each is ready
    commit           one moment: new versions take requests, replaced and removed ones take none
    abandon          in its place: what was begun ends, and no client has noticed

The caller knows what is wanted. Other calls may change versions meanwhile; `commit` notices that and refuses.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from marserve.errors import LoadFailed, MarserveError, ModelNotFound, VersionConflict
from marserve.registry.catalogue.mirrors import Mirrors
from marserve.registry.catalogue.traffic_control import TrafficControl
from marserve.registry.catalogue.versions import Version, Versions
from marserve.registry.changes.kept_versions import Keeping, Kept
from marserve.registry.changes.read_actual import declare
from marserve.registry.changes.registering import Registering
from marserve.registry.changes.under_way import Changes
from marserve.registry.intake.registration import RegisterParameters

log = logging.getLogger("marserve.registry")


@dataclass(slots=True)
class Commit:
    """What comes into force at once. Versions are named (model, version).

    `publish` are prepared versions; `remove` are listed ones that leave. `tune` has batch sizes and delays (in
    seconds), `narrow` the bounds of versions that get fewer workers, `declare` what a document says of versions now,
    `defaults` versions by model. `labels` are all labels of a model; `traffic` and `shadow` are in the shape of their
    calls, None to remove.
    """

    publish: list[Version] = field(default_factory=list)
    remove: list[tuple[str, str]] = field(default_factory=list)
    tune: dict[tuple[str, str], tuple[int | None, float | None]] = field(default_factory=dict)
    narrow: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    declare: dict[tuple[str, str], Mapping[str, Any] | None] = field(default_factory=dict)
    defaults: dict[str, str] = field(default_factory=dict)
    labels: dict[str, Mapping[str, str]] = field(default_factory=dict)
    traffic: dict[str, Mapping[str, Any] | None] = field(default_factory=dict)
    shadow: dict[str, Mapping[str, Any] | None] = field(default_factory=dict)


class Transaction:
    """One change of several models. If another call replaces one of its versions meanwhile, that is a conflict."""

    def __init__(
        self,
        registering: Registering,
        versions: Versions,
        changes: Changes,
        traffic: TrafficControl,
        mirrors: Mirrors,
        keeping: Keeping,
        note_change: Callable[[Version], None],
    ) -> None:
        self._keeping = keeping
        self._taken: list[Kept] = []
        self._registering = registering
        self._versions = versions
        self._changes = changes
        self._traffic = traffic
        self._mirrors = mirrors
        self._note_change = note_change
        self._before = {(version.model, version.name): version for version in versions.all()}
        self._prepared: list[Version] = []
        self._widened: list[tuple[Version, int, int]] = []

    # ------------------------------------------------------------------------------------------- before

    async def prepare(self, parameters: RegisterParameters, *, publish: bool = False) -> Version:
        """Begin to load a version; does not wait. Raises as a registration does; nothing of it is left then.

        With `publish` requests find it at once, for a server that has no models yet.
        """
        version = await self._registering.prepare(parameters)
        self._prepared.append(version)
        if publish:
            self._registering.publish(version)
        return version

    def take_back(self, model: str, version: str) -> Version:
        """Use a version that `Registry.find_kept` has just found: it takes requests again from `commit` on."""
        kept = self._keeping.find(model, version)
        assert kept is not None
        self._taken.append(kept)
        return self._keeping.take(kept)

    def make_way(self, models: Iterable[str]) -> None:
        """Begin to end the kept versions of these models, as other versions of them are about to load."""
        names = set(models)
        leaving = [kept.version for kept in self._keeping.all() if kept.version.model in names]
        self._keeping.give_up(leaving, "another version of its model loads")

    def widen(self, model: str, version: str, min_workers: int, max_workers: int) -> Version:
        """Begin to start more workers of a listed version."""
        found = self._expected(model, version)
        self._widened.append((found, found.min_workers, found.max_workers))
        self._registering.scale(found, min_workers, max_workers)
        return found

    async def wait(self, version: Version) -> None:
        """Wait until a version has the workers that it should have. Raises LoadFailed."""
        if not await self._registering.wait_until_ready(version):
            reason = "it was stopped, or scaled by another call, before it was ready"
            raise LoadFailed(version.model, version.name, reason=reason)

    def _is_mine(self, version: Version) -> bool:
        return any(version is each for each in self._prepared)

    # ------------------------------------------------------------------------------------------- the moment

    def commit(self, commit: Commit, *, keeps_open: bool = False) -> list[Version]:
        """Bring all of it into force; returns the versions that take no requests any more. Awaits nothing.

        With `keeps_open` it can still be abandoned. Raises VersionConflict or ModelNotFound, and changes nothing, if a
        version that it concerns is not the same as when the change began.
        """
        self._check(commit)
        left: list[Version] = []
        touched: list[Version] = []
        for version in commit.publish:
            if not self._versions.is_listed(version):
                before = self._registering.publish(version)
                left += [before] if before is not None else []
            touched.append(version)
        for (model, name), (size, delay_s) in commit.tune.items():
            self._versions.find(model, name).pool.reconfigure(batch_size=size, max_batch_delay_s=delay_s)
        for (model, name), (least, most) in commit.narrow.items():
            self._registering.scale(self._versions.find(model, name), least, most)
        for (model, name), declared in commit.declare.items():
            found = self._versions.find(model, name)
            declare(found, declared)
            touched.append(found)
        for model, name in commit.defaults.items():
            touched.append(self._versions.set_default(model, name))
        for model, name in commit.remove:
            found = self._versions.find(model, name)
            self._registering.remove(found)
            left.append(found)
        self._set_traffic(commit)
        if not keeps_open:
            self._prepared.clear()
            self._widened.clear()
            self._taken.clear()
        for version in (*touched, *left):
            self._note_change(version)
        return left

    def _set_traffic(self, commit: Commit) -> None:
        """Set labels, weights and shadows, whose versions are listed by now. An error is only logged.

        The document was checked before.
        """
        for what, wanted in (
            (self._traffic.put_all_labels, commit.labels),
            (self._traffic.put_document, commit.traffic),
            (self._mirrors.put_document, commit.shadow),
        ):
            for model, value in wanted.items():
                try:
                    what(model, value)  # type: ignore[arg-type]
                except MarserveError as error:
                    log.error("Model %s: %s", model, error)

    def _check(self, commit: Commit) -> None:
        names = [(version.model, version.name) for version in commit.publish if not self._versions.is_listed(version)]
        for model, name in names:
            is_another = self._versions.get(model, name) is not self._before.get((model, name))
            if is_another or self._versions.is_held(model, name):
                raise VersionConflict(model, name)
        for model, name in (*commit.remove, *commit.tune, *commit.narrow):
            self._expected(model, name)

    def _expected(self, model: str, name: str) -> Version:
        """The listed version of this name, as it was when the change began."""
        found = self._versions.get(model, name)
        if found is None:
            raise ModelNotFound(model)
        if found is not self._before.get((model, name)) and not self._is_mine(found):
            raise VersionConflict(model, name)
        return found

    # ------------------------------------------------------------------------------------------- after

    async def abandon(self) -> None:
        """End all that was begun. Versions that were listed go on as before."""
        for version, least, most in reversed(self._widened):
            if self._versions.is_listed(version):
                self._registering.scale(version, least, most)
        taken, self._taken = self._taken, []
        for kept in taken:
            self._keeping.put_back(kept)
        prepared, self._prepared, self._widened = self._prepared, [], []
        for version in prepared:
            if self._versions.is_listed(version):
                self._registering.remove(version)
        await self._retire(prepared, drain_s=0.0)

    def retire(self, left: Iterable[Version], *, keep_of: str | None = None) -> asyncio.Task[None]:
        """Let versions that left the list answer what they had accepted, and end, in a task of its own.

        With `keep_of`, the digest of the state that they served, they stay loaded for the undo window first; versions
        that were kept before end.
        """
        left = list(left)
        if left:
            self._keeping.give_up([kept.version for kept in self._keeping.all()], "another change is in force")
        if keep_of is not None:
            left = self._keeping.keep(left, keep_of)
        return self._changes.follow(self._retire(left))

    async def _retire(self, versions: Iterable[Version], drain_s: float | None = None) -> None:
        await asyncio.gather(*(self._registering.end(version, drain_s=drain_s) for version in versions))
