"""All watches of a server: the places, their archives, and where events of object stores go.

A watch is a place that is looked at (`store.watching`) and the policy for what appears there (`arrivals`). This joins
the two, gives them what they need of store and registry, and ends them.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from marserve.archive.reading.completeness import why_incomplete
from marserve.arrivals.arrival_names import name_from_place
from marserve.arrivals.arrivals import ArrivalPolicy, Arrivals, LiveModels, WatchedRollouts
from marserve.arrivals.object_events import ObjectEvent, Sequencers, Verdict
from marserve.desired_state.document import NewVersions
from marserve.errors import ArchiveNotFound, BadInput, BadSettings, WatchNotFound
from marserve.registry.catalogue.plan import Unpacked
from marserve.registry.intake.intake import Intake, pinned
from marserve.registry.intake.pending_fetches import Coming
from marserve.rollout.rollouts import Rollouts
from marserve.settings.watches import MODEL_STORE, WatchedPlace
from marserve.store.addresses.fetch_guard import OBJECT_SCHEMES, AllowedUrls, Target, hide_query, parse_target
from marserve.store.fetching.fetcher import Fetcher
from marserve.store.sources.object_store import ObjectStores
from marserve.store.sources.source import Entry
from marserve.store.watching.sightings import Sightings
from marserve.store.watching.watch import ListedPlace, Place, Watch, is_archive
from marserve.store.watching.watched_folder import WatchedFolder

log = logging.getLogger("marserve.rollout")

Numbers = Callable[["Watches"], Mapping[str, float]]
Declared = Sequence[tuple[str | None, NewVersions]]
Policies = Callable[[], Declared]

# A name is missing for a moment while it is replaced.
REMOVAL_S = 5.0
# How often the declared watches of a desired state are compared; that costs next to nothing.
DECLARED_LOOK_S = 1.0
_SAMPLE = "x.mar"


@dataclass(slots=True)
class Watched:
    """One watch: the place, its archives, the policy. `address` is `s3://bucket`, empty for folders."""

    spec: WatchedPlace
    watch: Watch
    arrivals: Arrivals
    address: str = ""
    prefix: str = ""

    async def run(self) -> None:
        """Watch until cancelled; leaves no task or file behind."""
        tasks = [asyncio.create_task(self.watch.run()), asyncio.create_task(self.arrivals.run())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                    # Catches everything: a defect in one watch must not end the others.
                    log.error("Watch %s has ended", self.spec.name, exc_info=error)
        finally:
            await end_tasks(tasks)

    def describe(self) -> dict[str, Any]:
        """The watch with its archives, for management."""
        return {**self.watch.describe(), **self.arrivals.describe()}


class Watches:
    """The watches of one server. `run` is their life; all else is called on the event loop."""

    def __init__(
        self,
        *,
        models: LiveModels,
        intake: Intake,
        fetcher: Fetcher | None = None,
        lister: ObjectStores | None = None,
        allowed: AllowedUrls | None = None,
        model_store: Path | None = None,
        interval_s: float = 30.0,
        settle_s: float = 2.0,
        late_s: float = 60.0,
        rollouts: Rollouts | None = None,
        is_expected: Callable[[str], bool] = lambda key: False,
        coming: Coming | None = None,
    ) -> None:
        """`intake` finds archives in watched folders by absolute path; `coming` lists archives on their way.

        Times in seconds.
        """
        self._models = models
        self._intake = intake
        self._fetcher = fetcher
        self._lister = lister
        self._allowed = allowed or AllowedUrls(())
        self._model_store = model_store
        self._interval_s = interval_s
        self._settle_s = settle_s
        self._late_s = late_s
        self._rollouts = rollouts
        self._is_expected = is_expected
        self._coming = coming or Coming()
        self._sequencers = Sequencers()
        self._watched: dict[str, Watched] = {}
        self._declared: set[str] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.events: Counter[str] = Counter(look=0, ignored=0, bad=0, unauthorized=0)

    # ------------------------------------------------------------------------------------------- building

    def add(self, spec: WatchedPlace, model: str | None = None) -> None:
        """Add a watch. With `model` all archives there are versions of it.

        Raises BadSettings for a place that cannot be watched.
        """
        if spec.name in self._watched:
            raise self._refuse(spec, f"there is another watch of the name {spec.name}; give it a name of its own")
        policy = ArrivalPolicy(spec.policy, spec.removed, spec.names, spec.keep, model)
        watched = self._listed(spec, policy) if spec.is_address else self._folder(spec, policy, self._root_of(spec))
        self._watched[spec.name] = watched

    def _root_of(self, spec: WatchedPlace) -> Path:
        if spec.place != MODEL_STORE:
            return Path(spec.place)
        if self._model_store is None:
            raise self._refuse(spec, "there is no model store; set model_store, or watch another place")
        return self._model_store

    def _folder(self, spec: WatchedPlace, policy: ArrivalPolicy, root: Path) -> Watched:
        place = WatchedFolder(root, spec.prefix)
        is_store = self._model_store is not None and root == self._model_store

        def source_of(key: str) -> str:
            # An archive in the model store itself goes by its name there, as in a registration.
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
            raise self._refuse(spec, error.message.rpartition(" is refused: ")[2]) from None
        if sample.scheme not in OBJECT_SCHEMES or self._lister is None or self._fetcher is None:
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
            source, named = source_of(key), name_from_place(key)
            with self._coming.awaiting(source, policy.model or named.model, named.version) as awaited:
                # Without a name in the model store: versions of one model often have one name in their folders.
                fetched = fetcher.fetch(source, None, late_s=self._late_s, on_begin=awaited.begin)
                awaited.unpack()
                return self._intake.take_in(source, pinned(fetched, source))

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
            canaries=self._canaries(spec),
            is_expected=is_expected,
        )

    def _canaries(self, spec: WatchedPlace) -> WatchedRollouts | None:
        if self._rollouts is None:
            return None
        try:
            return WatchedRollouts(self._rollouts, spec.canary)
        except BadInput as error:
            raise self._refuse(spec, f"canary says what no roll-out takes: {error.message}") from None

    def _watch(self, spec: WatchedPlace, place: Place, sightings: Sightings, arrivals: Arrivals) -> Watch:
        interval_s = self._interval_s if spec.interval_s is None else spec.interval_s
        return Watch(spec.name, place, sightings, arrivals.take, interval_s=interval_s, late_s=self._late_s)

    def _refuse(self, spec: WatchedPlace, why: str) -> BadSettings:
        return BadSettings(f"The place {hide_query(spec.place)} cannot be watched: {why}", key="watches")

    # ------------------------------------------------------------------------------------------- life

    async def run(
        self, policies: Policies = tuple, let_go: Callable[[Declared], Awaitable[None]] | None = None
    ) -> None:
        """Watch until cancelled; leaves nothing behind. `policies` returns what a desired state declares now.

        `let_go` gets the policies that are no longer declared, once their watches have ended.
        """
        last: Declared = ()
        try:
            for each in self._watched.values():
                self._begin(each)
            while True:
                now = policies()
                if now != last:
                    gone, last = [each for each in last if each not in now], now
                    await self._declare([(model, self._declared_place(model, each)) for model, each in now])
                    if gone and let_go is not None:
                        await let_go(gone)
                await asyncio.sleep(DECLARED_LOOK_S)
        finally:
            self._intake.stop_taking_in()
            await end_tasks(list(self._tasks.values()))
            self._tasks.clear()

    async def _declare(self, wanted: Sequence[tuple[str | None, WatchedPlace]]) -> None:
        """Have exactly these watches beside those of the settings, each for the versions of a model or of any.

        A watch that cannot be made is logged and left out.
        """
        names: dict[str, tuple[str | None, WatchedPlace]] = {}
        for model, spec in wanted:
            name, number = spec.name, 1
            while name in names:  # names are made of prefixes, and two may be equal
                number += 1
                name = f"{spec.name}-{number}"
            names[name] = model, replace(spec, name=name)
        for name, each in list(self._watched.items()):
            if name in self._declared and names.get(name) != (each.arrivals.policy.model, each.spec):
                self._declared.discard(name)
                del self._watched[name]
                task = self._tasks.get(name)
                if task is not None:
                    await end_tasks([task])  # `run` waits for it too, if this is cancelled
                    self._tasks.pop(name, None)
        for name, (model, spec) in names.items():
            if name in self._declared:
                continue
            try:
                self.add(spec, model)
            except BadSettings as error:
                log.error("%s", error)
                continue
            self._declared.add(name)
            self._begin(self._watched[name])

    def _declared_place(self, model: str | None, declared: NewVersions) -> WatchedPlace:
        """The watch of a prefix: an address, an absolute path, or the beginning of a name in the model store."""
        kind = re.sub(r"[^A-Za-z0-9_.\-]+", "-", model or declared.prefix).strip("-.")[:48]
        place, prefix = declared.prefix, ""
        if "://" not in place and not place.startswith("/"):
            place, prefix = MODEL_STORE, place
        elif place.startswith("/") and not place.endswith("/"):
            place, _, prefix = place.rpartition("/")
        return WatchedPlace(f"desired-{kind or 'state'}", place, declared.policy, prefix=prefix)

    def _begin(self, each: Watched) -> None:
        log.info("Watching %s: new versions: %s", each.watch.place.shown, each.spec.policy)
        self._tasks[each.spec.name] = asyncio.create_task(each.run())

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
        """All watches, for metrics."""
        return list(self._watched.values())

    # ------------------------------------------------------------------------------------------- events

    def announce(self, events: Sequence[ObjectEvent]) -> list[Verdict]:
        """Take events: those of watched places make their watches look; returns a verdict for each.

        Raises BadInput for an event of marserve's own form that names an unknown watch.
        """
        for event in events:
            if event.watch and event.watch not in self._watched:
                names = ", ".join(self._watched) or "no watches"
                raise BadInput(f"There is no watch {event.watch[:80]!r}; the watches are: {names}.")
        return [verdict for event in events for verdict in self._judge(event)]

    def count_events(self, outcome: str, number: int) -> None:
        """Count events by their outcome, one of a few fixed words."""
        self.events[outcome] += number

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


async def end_tasks(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel what has not ended, and wait for its end. Never cancels twice: that would interrupt its clean-up."""
    for task in tasks:
        if not task.cancelling():
            task.cancel()
    if tasks:
        await asyncio.wait(tasks)


def _by_watch(read: Callable[[Watched], float | None]) -> Numbers:
    def numbers(watches: Watches) -> dict[str, float]:
        found = ((each.spec.name, read(each)) for each in watches.each())
        return {name: value for name, value in found if value is not None}

    return numbers


def _by_outcome(watches: Watches) -> dict[str, float]:
    total: Counter[str] = Counter()
    for each in watches.each():
        total.update(each.arrivals.outcomes)
    return dict(total)


# The metrics, and the functions that read their values by label.
FAMILIES: tuple[tuple[str, Numbers], ...] = (
    ("marserve_watch_looks_total", _by_watch(lambda each: each.watch.looks["done"])),
    ("marserve_watch_failures_total", _by_watch(lambda each: each.watch.looks["failed"])),
    ("marserve_watch_changes_total", _by_watch(lambda each: sum(each.watch.changes.values()))),
    ("marserve_watch_archives", _by_watch(lambda each: each.watch.keys)),
    ("marserve_watch_last_success_age_seconds", _by_watch(lambda each: each.watch.success_age_s)),
    ("marserve_arrivals_total", _by_outcome),
    ("marserve_events_total", lambda watches: dict(watches.events)),
)
