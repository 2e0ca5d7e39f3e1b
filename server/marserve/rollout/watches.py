"""All watches of a server: what is watched, what became of it, and where events of object stores go.

A watch is a place that is looked at (`store.watch`) and the policy for what appears there (`arrivals`). This joins the
two, gives them what they need of settings, store and registry, and ends them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, unquote

from marserve.archive.completeness import why_incomplete
from marserve.errors import ArchiveNotFound, BadInput, BadSettings, WatchNotFound
from marserve.registry.calls import Registered, RegisterParameters
from marserve.registry.intake import Intake, Unpacked
from marserve.registry.models import Registry
from marserve.registry.transaction import Commit
from marserve.rollout.arrivals import ArrivalPolicy, Arrivals, Models, StartCanary
from marserve.rollout.object_events import ObjectEvent, Sequencers, Verdict
from marserve.settings import Settings
from marserve.settings.watches import MODEL_STORE, WatchedPlace
from marserve.store.fetch_guard import AllowedUrls, Target, parse_target
from marserve.store.fetcher import Fetcher
from marserve.store.sightings import Sightings
from marserve.store.source import Entry, Listing
from marserve.store.watch import ListedPlace, Place, Watch, is_archive
from marserve.store.watched_folder import WatchedFolder

log = logging.getLogger("marserve.rollout")

# Between the two halves of a replacement a name is nowhere.
REMOVAL_S = 5.0
LISTED_SCHEMES = ("s3", "gs", "az")
_SAMPLE = "x.mar"


class Lister(Protocol):
    """What opens listings of object stores."""

    def list_at(self, target: Target) -> Listing:
        """What is below an address."""


class LiveModels:
    """The registry, as arrivals ask it. `guard` raises where somebody else alone decides what is loaded."""

    def __init__(self, registry: Registry, guard: Callable[[str], None] = lambda call: None) -> None:
        self._registry = registry
        self._guard = guard
        self.source_of = registry.source_of
        self.default_of = registry.default_of

    async def load(self, parameters: RegisterParameters, unpacked: Unpacked) -> Registered:
        """Make a version of an archive, and wait until it is ready."""
        await self._check(unpacked)
        return await self._registry.register_unpacked(parameters, unpacked)

    async def swap(self, parameters: RegisterParameters, unpacked: Unpacked) -> Registered:
        """Load beside the version of the same name, switch when it is ready, then retire the old one."""
        await self._check(unpacked)
        change = self._registry.begin_change()
        try:
            version = await change.prepare(parameters, unpacked=unpacked)
            await change.wait(version)
            left = change.commit(Commit(publish=[version]))
        except Exception:
            await change.abandon()
            raise
        change.retire(left)
        return Registered(version.model, version.name, version.min_workers, "done")

    def set_default(self, model: str, version: str) -> None:
        """Let a version answer what names none."""
        self._guard("marserve set-default")
        self._registry.set_default(model, version)

    async def unload(self, model: str, version: str) -> None:
        """Take a version away."""
        self._guard("marserve unregister")
        await self._registry.unregister(model, version)

    async def _check(self, unpacked: Unpacked) -> None:
        try:
            self._guard("marserve register")
        except BaseException:
            await asyncio.to_thread(unpacked.discard)
            raise


@dataclass(slots=True)
class Watched:
    """One watch: the place, what is seen there, what becomes of it. `address` is `s3://bucket`, empty for folders."""

    spec: WatchedPlace
    watch: Watch
    arrivals: Arrivals
    address: str = ""
    prefix: str = ""

    def describe(self) -> dict[str, Any]:
        """All of it, for management."""
        return {**self.watch.describe(), **self.arrivals.describe()}


class Watches:
    """The watches of one server. `run` is their life; all else is called on the event loop."""

    def __init__(
        self,
        *,
        models: Models,
        intake: Intake,
        fetcher: Fetcher | None = None,
        lister: Lister | None = None,
        allowed: AllowedUrls | None = None,
        model_store: Path | None = None,
        interval_s: float = 30.0,
        settle_s: float = 2.0,
        late_s: float = 60.0,
        start_canary: StartCanary | None = None,
        is_expected: Callable[[str], bool] = lambda key: False,
    ) -> None:
        """`intake` finds by absolute path what lies in watched folders. Times in seconds."""
        self._models = models
        self._intake = intake
        self._fetcher = fetcher
        self._lister = lister
        self._allowed = allowed or AllowedUrls(())
        self._model_store = model_store
        self._interval_s = interval_s
        self._settle_s = settle_s
        self._late_s = late_s
        self._start_canary = start_canary
        self._is_expected = is_expected
        self._sequencers = Sequencers()
        self._watched: dict[str, Watched] = {}
        self.events: Counter[str] = Counter(look=0, ignore=0, refused=0)

    # ------------------------------------------------------------------------------------------- building

    def add(self, spec: WatchedPlace, model: str | None = None) -> None:
        """Add a watch before `run`. With `model` all that appears there is a version of it.

        Raises BadSettings for a place that cannot be watched.
        """
        if spec.name in self._watched:
            raise self._refuse(spec, f"there is another watch of the name {spec.name}; give it a name of its own")
        policy = ArrivalPolicy(spec.policy, spec.removed, spec.names, spec.keep, model)
        self._watched[spec.name] = (
            self._listed(spec, policy) if spec.is_address else self._folder(spec, policy, self._root_of(spec))
        )

    def _root_of(self, spec: WatchedPlace) -> Path:
        if spec.place != MODEL_STORE:
            return Path(spec.place)
        if self._model_store is None:
            raise self._refuse(spec, "there is no model store; set model_store, or watch another place")
        return self._model_store

    def _folder(self, spec: WatchedPlace, policy: ArrivalPolicy, root: Path) -> Watched:
        place = WatchedFolder(root)
        is_store = self._model_store is not None and root == self._model_store

        def source_of(key: str) -> str:
            # What lies in the model store itself has its name there, as a registration would call it.
            return key.rstrip("/") if is_store and "/" not in key.rstrip("/") else str(place.path_of(key))

        def lacks(entry: Entry) -> str | None:
            return None if entry.key.endswith("/") else why_incomplete(place.path_of(entry.key))

        arrivals = self._arrivals(
            spec,
            policy,
            lambda key: self._intake.take_in(source_of(key)),
            source_of,
            self._is_expected if is_store else lambda key: False,
        )
        sightings = Sightings(settle_s=self._settle_s, removal_s=max(self._settle_s, REMOVAL_S), why_incomplete=lacks)
        return Watched(spec, self._watch(spec, place, sightings, arrivals), arrivals)

    def _listed(self, spec: WatchedPlace, policy: ArrivalPolicy) -> Watched:
        base = spec.place if spec.place.count("/") > 2 else f"{spec.place}/"
        try:
            sample = parse_target(base + _SAMPLE)
        except ArchiveNotFound as error:
            raise self._refuse(spec, error.message) from None
        if sample.scheme not in LISTED_SCHEMES or self._lister is None or self._fetcher is None:
            raise self._refuse(spec, f"{sample.scheme}:// cannot be listed; folders, s3://, gs:// and az:// can")
        try:
            self._allowed.check(sample)
        except ArchiveNotFound:
            raise self._refuse(
                spec, f"allowed_urls does not let its archives through; add a pattern as {base.rstrip('/')}/.*"
            ) from None
        prefix = unquote(sample.key)[: -len(_SAMPLE)]
        folder = prefix[: prefix.rfind("/") + 1]
        address = f"{sample.scheme}://{sample.authority}"
        fetcher = self._fetcher
        place = ListedPlace(self._lister.list_at(Target(sample.scheme, sample.host, 0, f"/{prefix}", "")), prefix)

        def source_of(key: str) -> str:
            return f"{address}/{quote(folder + key)}"

        def take_in(key: str) -> Unpacked:
            source = source_of(key)
            # Without a name in the model store: versions of one model often have one name in their folders.
            return self._intake.take_in(source, fetcher.fetch(source, None, late_s=self._late_s))

        arrivals = self._arrivals(spec, policy, take_in, source_of, lambda key: False)
        watch = self._watch(spec, place, Sightings(removal_s=REMOVAL_S), arrivals)
        return Watched(spec, watch, arrivals, address, prefix)

    def _arrivals(
        self,
        spec: WatchedPlace,
        policy: ArrivalPolicy,
        take_in: Callable[[str], Unpacked],
        source_of: Callable[[str], str],
        is_expected: Callable[[str], bool],
    ) -> Arrivals:
        return Arrivals(
            spec.name,
            policy,
            self._models,
            take_in,
            source_of,
            start_canary=self._start_canary,
            is_expected=is_expected,
        )

    def _watch(self, spec: WatchedPlace, place: Place, sightings: Sightings, arrivals: Arrivals) -> Watch:
        interval_s = self._interval_s if spec.interval_s is None else spec.interval_s
        return Watch(spec.name, place, sightings, arrivals.take, interval_s=interval_s, late_s=self._late_s)

    def _refuse(self, spec: WatchedPlace, why: str) -> BadSettings:
        return BadSettings(f"The place {spec.place} cannot be watched: {why}", key="watches")

    # ------------------------------------------------------------------------------------------- life

    def __len__(self) -> int:
        return len(self._watched)

    async def run(self) -> None:
        """Watch until cancelled; then nothing of it is left."""
        parts = [part for each in self._watched.values() for part in (each.watch.run(), each.arrivals.run())]
        tasks = [asyncio.create_task(part) for part in parts]
        for each in self._watched.values():
            log.info("Watching %s: new versions: %s", each.watch.place.shown, each.spec.policy)
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    # ------------------------------------------------------------------------------------------- asking

    def names(self) -> list[str]:
        """The watches, in the order in which they were added."""
        return list(self._watched)

    def describe(self, name: str) -> dict[str, Any]:
        """One watch. Raises WatchNotFound."""
        return self._find(name).describe()

    def look(self, name: str) -> None:
        """Look at a place now. Raises WatchNotFound."""
        self._find(name).watch.look_soon()

    def _find(self, name: str) -> Watched:
        found = self._watched.get(name)
        if found is None:
            raise WatchNotFound(name)
        return found

    def each(self) -> Sequence[Watched]:
        """All of them, for metrics."""
        return list(self._watched.values())

    # ------------------------------------------------------------------------------------------- events

    def announce(self, events: Sequence[ObjectEvent]) -> list[Verdict]:
        """Take events: those of watched places make their watches look; says what becomes of each.

        Raises BadInput for an event of our own form that names a watch that is not there.
        """
        for event in events:
            if event.watch and event.watch not in self._watched:
                names = ", ".join(self._watched) or "there is none"
                raise BadInput(f"There is no watch {event.watch[:80]!r}; the watches are: {names}.")
        verdicts = [verdict for event in events for verdict in self._judge(event)]
        for verdict in verdicts:
            self.events[verdict.action] += 1
        return verdicts

    def _judge(self, event: ObjectEvent) -> list[Verdict]:
        if event.watch:
            watched = [self._watched[event.watch]]
            if event.key == "":
                watched[0].watch.look_soon()
                return [Verdict(event, "look", watch=event.watch)]
            key = event.key
        else:
            watched = [
                each
                for each in self._watched.values()
                if each.address and each.address == event.place and event.key.startswith(each.prefix)
            ]
            key = ""
        if not watched:
            return [Verdict(event, "ignore", "no watch covers it")]
        if not is_archive(event.key):
            return [Verdict(event, "ignore", "it is no archive by its name")]
        if self._sequencers.is_stale(event):
            return [Verdict(event, "ignore", "a newer event of it came before")]
        verdicts = []
        for each in watched:
            inner = key or event.key[each.prefix.rfind("/") + 1 :]
            each.watch.hint(inner, event.happened, event.etag)
            verdicts.append(Verdict(event, "look", watch=each.spec.name))
        return verdicts


def watched_folders(settings: Settings) -> list[Path]:
    """The folders that settings have watched: what lies below them is found by its absolute path."""
    folders = [Path(each.place) for each in settings.watches if not each.is_address and each.place != MODEL_STORE]
    watches_store = settings.watch_model_store is not None or any(
        each.place == MODEL_STORE for each in settings.watches
    )
    if watches_store and settings.model_store is not None:
        folders.append(settings.model_store)
    return folders


def watched_places(settings: Settings) -> list[WatchedPlace]:
    """What settings have watched."""
    places = list(settings.watches)
    if settings.watch_model_store is not None:
        places.insert(0, WatchedPlace(MODEL_STORE, MODEL_STORE, settings.watch_model_store))
    return places
