"""Loads archives that appear in a watched place, by policy, and never at the cost of the versions that serve.

A change of the place (`store.watching`) waits in line here, one for each archive, and is carried out: taken in, named
(`arrival_names`), loaded, made default or given to a roll-out, or taken away. What cannot be used is reported once and
remembered; it is tried again when it changes, and by itself only where time may mend it. A version that serves stays
untouched until the one that takes its place is ready.

Knows no store and no HTTP: `TakeIn` brings an archive, `LiveModels` is the registry.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from marserve.arrivals.arrival_names import (
    are_numbered,
    choose_name,
    is_newer,
    name_from_place,
    oldest_first,
    version_order,
)
from marserve.errors import (
    ArchiveNotFound,
    BadInput,
    DefaultVersionInUse,
    DependencyFailed,
    DownloadFailed,
    Draining,
    LoadFailed,
    MarserveError,
    ModelNotFound,
    NotEnoughMemory,
    OutOfMemory,
    RolloutNotFound,
    RolloutUnderWay,
    SwapUnderWay,
    Unavailable,
    VersionConflict,
    VersionInUse,
    VersionNotFound,
)
from marserve.registry.catalogue.plan import Unpacked
from marserve.registry.changes.swap import SwapParameters
from marserve.registry.intake.registration import Registered, RegisterParameters
from marserve.registry.models import Registry
from marserve.rollout.course import read_rollout
from marserve.rollout.rollouts import Rollouts
from marserve.settings.watches import NameRule, NewVersionPolicy, RemovedPolicy
from marserve.store.addresses.pinned_digest import split_digest
from marserve.store.sources.source import Entry
from marserve.store.watching.sightings import Change

log = logging.getLogger("marserve.rollout")

State = Literal["waiting", "loading", "loaded", "ignored", "refused", "retrying", "left out", "unloaded", "gone"]

PARALLEL = 2
MOST_TRIES = 6
FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 60.0
# Of versions that make themselves the default, the previous one is kept, to go back to.
KEPT_VERSIONS = 2
# How often a waiting roll-out checks whether the present one has ended.
CANARY_LOOK_S = 2.0
# How many archives a description lists.
MOST_SHOWN = 1000
# How many archives are remembered after they have gone.
MOST_GONE = 100

TakeIn = Callable[[str], Unpacked]
"""Brings the archive of a key: fetched, unpacked, checked. Blocks; raises MarserveError."""


class LiveModels:
    """The calls that arrivals make to the registry."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.source_of = registry.source_of
        self.default_of = registry.default_of
        self.set_default = registry.set_default

    async def load(self, parameters: RegisterParameters, unpacked: Unpacked) -> Registered:
        """Register an archive's version, and wait until it is ready."""
        return await self._registry.register_unpacked(parameters, unpacked)

    async def swap(self, parameters: RegisterParameters, unpacked: Unpacked) -> None:
        """Replace the version of this name by an archive, with the same number of workers."""
        model, version = unpacked.manifest.model_name, unpacked.manifest.model_version
        assert model is not None
        registration = replace(parameters, is_arrival=False)
        await self._registry.swap(SwapParameters(model, registration, version), unpacked)

    async def unload(self, model: str, version: str) -> None:
        """Unregister a version."""
        await self._registry.unregister(model, version)


class WatchedRollouts:
    """Roll-outs as one watch begins them: `course` is a roll-out's document without the version."""

    def __init__(self, rollouts: Rollouts, course: Mapping[str, Any]) -> None:
        """Raises BadInput for a course that a roll-out refuses."""
        self._rollouts = rollouts
        self._course = dict(course)
        read_rollout({**self._course, "version": "1.0"})

    def begin(self, model: str, version: str) -> str:
        """Begin a roll-out of a loaded version."""
        begun = self._rollouts.begin(model, read_rollout({**self._course, "version": version}))
        return f"its roll-out is begun, in the place of {begun['baseline']}"

    def was_taken_back(self, model: str, version: str) -> bool:
        """Whether the last roll-out of this version ended without promotion."""
        try:
            described = self._rollouts.describe(model)
        except (ModelNotFound, RolloutNotFound):
            return False
        of_it = [each for each in (*described["earlier"], described) if each.get("modelVersion") == version]
        return bool(of_it) and of_it[-1].get("state") in ("rolled back", "aborted")


@dataclass(frozen=True, slots=True)
class ArrivalPolicy:
    """What happens on new and removed versions; what names them; how many stay loaded (None: by the policy).

    `model`: all archives are versions of this model; with None each archive names its own.
    """

    on_new: NewVersionPolicy
    on_removed: RemovedPolicy = "ignore"
    names: NameRule = "auto"
    keep: int | None = None
    model: str | None = None

    @property
    def kept(self) -> int:
        """How many versions of a model that came this way stay loaded; 0: all."""
        if self.keep is not None:
            return self.keep
        return KEPT_VERSIONS if self.on_new in ("load-and-default", "canary") else 0


@dataclass(slots=True)
class Record:
    """The state of one archive. `at` in seconds since 1970; `is_ours`: this watch loaded the version."""

    entry: Entry
    state: State
    at: float
    reason: str = ""
    model: str | None = None
    version: str | None = None
    is_ours: bool = False
    tries: int = 0

    def describe(self) -> dict[str, Any]:
        """The record for management."""
        described: dict[str, Any] = {"key": self.entry.key, "state": self.state, "at": _instant(self.at)}
        if self.model is not None:
            described |= {"modelName": self.model, "modelVersion": self.version}
        if self.reason:
            described["reason"] = self.reason
        if self.entry.etag is not None:
            described["etag"] = self.entry.etag.strip('"')
        return {**described, "size": self.entry.size}


class Arrivals:
    """The archives of one watch. `run` is its life, in a task; `take` and the rest are called on the event loop."""

    def __init__(
        self,
        name: str,
        policy: ArrivalPolicy,
        models: LiveModels,
        take_in: TakeIn,
        source_of_key: Callable[[str], str],
        *,
        canaries: WatchedRollouts | None = None,
        is_expected: Callable[[str], bool] = lambda key: False,
        first_retry_s: float = FIRST_RETRY_S,
    ) -> None:
        """`source_of_key` is what a registration of the archive calls it. `is_expected` answers whether a registration,
        under way or done, brought this key here itself.
        """
        self.name = name
        self.policy = policy
        self._models = models
        self._take_in = take_in
        self._source_of_key = source_of_key
        self._canaries = canaries
        self._is_expected = is_expected
        self._first_retry_s = first_retry_s
        self._todo: dict[str, Change] = {}
        self._retry_at: dict[str, float] = {}
        self._busy: dict[str, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self._loaded: dict[str, list[str]] = {}
        self._canaries_to_come: dict[str, Record] = {}
        self.records: dict[str, Record] = {}
        self.outcomes: Counter[str] = Counter(loaded=0, swapped=0, refused=0, ignored=0, unloaded=0, retried=0)

    # ------------------------------------------------------------------------------------------- from outside

    def take(self, changes: list[Change]) -> None:
        """Queue changes. Of one archive only the newest is kept."""
        for change in _newest_first(changes):
            key = change.entry.key
            waiting = self._todo.get(key)
            if waiting is not None and waiting.was_there and change.kind == "replaced":
                change = replace(change, kind=waiting.kind, was_there=True)
            self._todo[key] = change
            self._retry_at.pop(key, None)
            if change.kind != "removed" and key not in self._busy:
                self._note(key, change.entry, "waiting")
        self._wake.set()

    @property
    def is_idle(self) -> bool:
        """Whether no change waits or is under way."""
        return not self._todo and not self._busy

    def describe(self) -> dict[str, Any]:
        """All records, newest first."""
        newest_first = sorted(self.records.values(), key=lambda record: record.at, reverse=True)
        records = [self._as_it_is_now(record) for record in newest_first]
        return {
            "policy": self.policy.on_new,
            "removedPolicy": self.policy.on_removed,
            "keptVersions": self.policy.kept or "all",
            **({"modelName": self.policy.model} if self.policy.model is not None else {}),
            "outcomes": dict(self.outcomes),
            "states": dict(Counter(record.state for record in records)),
            "archivesShown": min(len(records), MOST_SHOWN),
            "archiveList": [record.describe() for record in records[:MOST_SHOWN]],
        }

    def _as_it_is_now(self, record: Record) -> Record:
        """The record; a version that was unloaded by another call is marked so."""
        if record.state != "loaded" or record.model is None or record.version is None:
            return record
        if self._models.source_of(record.model, record.version) is not None:
            return record
        return replace(record, state="unloaded", reason="it was unregistered since, or a desired state left it out")

    # ------------------------------------------------------------------------------------------- life

    async def run(self) -> None:
        """Carry changes out until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._wake.clear()
                self._begin_what_can(loop.time())
                lanes = self._busy_lanes()  # a change that waits for one of these is woken at its end
                waiting = [
                    at for key, at in self._retry_at.items() if key in self._todo and self._lane(key) not in lanes
                ]
                pause = min(waiting) - loop.time() if waiting and len(self._busy) < PARALLEL else None
                if self._canaries_to_come:
                    self._begin_canaries()
                    pause = min(CANARY_LOOK_S, CANARY_LOOK_S if pause is None else pause)
                try:
                    async with asyncio.timeout(None if pause is None else max(0.0, pause)):
                        await self._wake.wait()
                except TimeoutError:
                    continue
        finally:
            tasks = list(self._busy.values())
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    def _begin_what_can(self, now: float) -> None:
        """Begin the next changes: two at a time, and those of one model one after the other."""
        lanes = self._busy_lanes()
        for key in list(self._todo):
            if len(self._busy) >= PARALLEL:
                return
            if key in self._busy or self._lane(key) in lanes or self._retry_at.get(key, 0.0) > now:
                continue
            lanes.add(self._lane(key))
            change = self._todo.pop(key)
            self._retry_at.pop(key, None)
            task = self._busy[key] = asyncio.create_task(self._carry_out(change))
            task.add_done_callback(lambda _, key=key: self._end(key))  # type: ignore[misc]

    def _end(self, key: str) -> None:
        del self._busy[key]
        self._wake.set()

    def _busy_lanes(self) -> set[str]:
        return {self._lane(key) for key in self._busy}

    def _lane(self, key: str) -> str:
        return self.policy.model or name_from_place(key).model or key

    # ------------------------------------------------------------------------------------------- one change

    async def _carry_out(self, change: Change) -> None:
        key = change.entry.key
        try:
            if change.kind == "removed":
                await self._remove(key)
            elif self.policy.on_new == "ignore":
                self._note(key, change.entry, "ignored", "the policy of this watch is ignore")
                self.outcomes["ignored"] += 1
            elif change.kind == "added" and self._is_expected(key):
                self._note(key, change.entry, "ignored", "it was fetched for a registration")
                self.outcomes["ignored"] += 1
            else:
                await self._load(change)
        except Draining:
            self._note(key, change.entry, "waiting", "the server stops")
        except MarserveError as error:
            self._fail(change, error)
        except Exception as error:
            # Catches everything: a defect with one archive must not stop the others.
            log.exception("Watch %s: %s failed with an unexpected error", self.name, key)
            self._note(key, change.entry, "refused", f"an unexpected error ({type(error).__name__}); the log says more")
            self.outcomes["refused"] += 1

    async def _load(self, change: Change) -> None:
        key, policy = change.entry.key, self.policy
        record = self._note(key, change.entry, "loading")
        source = self._source_of_key(key)
        place = name_from_place(key)
        if place.is_layout and place.model and place.version and policy.names != "manifest":
            model = policy.model or place.model
            if self._models.source_of(model, place.version) is None and self._is_past(
                model, place.version, was_there=change.was_there
            ):
                self._leave_out(record, model, place.version)
                return
        unpacked = await self._have_taken_in(key)
        is_handed_over = False
        try:
            manifest = unpacked.manifest
            model, version = choose_name(key, manifest.model_name, manifest.model_version, policy.names)
            model = policy.model or model
            record.model, record.version = model, version
            registered = self._models.source_of(model, version)
            if registered is None:
                if self._is_past(model, version, was_there=change.was_there):
                    self._leave_out(record, model, version)
                    return
                if change.was_there and self._was_taken_back(model, version):
                    self._note(key, change.entry, "left out", "its roll-out was taken back, before this start")
                    return
            elif _plain(registered) != source and not self._is_renamed(registered, model, version):
                words = f"version {version} of model {model} is registered already, from {registered}"
                raise VersionTaken(f"{words}; give this one another version, or unregister that one")
            elif change.kind == "added" and _plain(registered) == source:
                self._note(key, change.entry, "loaded", "it was registered before this watch saw it")
                return
            named = replace(unpacked, manifest=replace(manifest, model_name=model, model_version=version))
            parameters = RegisterParameters(url=source, model_name=model, is_arrival=True)
            is_handed_over = True
            if registered is None:
                await self._begin(record, parameters, named, was_there=change.was_there)
            else:
                await self._models.swap(parameters, named)
                self._succeed(record, "swapped", "in the place of what it was before")
        finally:
            if not is_handed_over:
                await asyncio.to_thread(unpacked.discard)

    async def _have_taken_in(self, key: str) -> Unpacked:
        """Take an archive in on a thread; if the caller is cancelled meanwhile, the result is deleted."""
        taking = asyncio.ensure_future(asyncio.to_thread(self._take_in, key))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(_discard)
            raise

    async def _begin(
        self, record: Record, parameters: RegisterParameters, unpacked: Unpacked, *, was_there: bool
    ) -> None:
        """Load a new version, then apply the policy to it."""
        model, version = record.model, record.version
        assert model is not None
        assert version is not None
        before = self._models.default_of(model)
        registered = await self._models.load(parameters, unpacked)
        if registered.progress == "partial":
            log.warning("Watch %s: model %s version %s has not all of its workers yet", self.name, model, version)
        versions = self._loaded.setdefault(model, [])
        if version not in versions:
            # Of archives there at the start the newest came first.
            versions.insert(0 if was_there else len(versions), version)
            self._loaded[model] = oldest_first(versions)
        self._succeed(record, "loaded", "" if before is not None else "the first of its model, so its default")
        if before is not None and self.policy.on_new == "load-and-default":
            if is_newer(version, before):
                self._models.set_default(model, version)
                record.reason = f"the default, in the place of {before}"
                log.info("Watch %s: model %s: %s is the default now, %s was", self.name, model, version, before)
            else:
                record.reason = f"not the default: {before} is newer"
        elif before is not None and self.policy.on_new == "canary":
            if is_newer(version, before):
                self._canaries_to_come[model] = record  # replaces one that still waits
                self._begin_canaries()
            else:
                record.reason = f"no roll-out: {before} is newer"
        await self._let_go_of_old(model)

    def _begin_canaries(self) -> None:
        """Begin the roll-outs that can begin; one waits if its model has one already."""
        for model, record in list(self._canaries_to_come.items()):
            assert record.version is not None
            try:
                if record.state != "loaded" or self._canaries is None:
                    raise BadInput("there is nothing to begin it with")
                record.reason = self._canaries.begin(model, record.version)
            except RolloutUnderWay as error:
                record.reason = f"its roll-out waits: {error.message}"
                continue
            except MarserveError as error:
                record.reason = f"no roll-out was begun: {error.message}"
                log.error("Watch %s: model %s version %s: %s", self.name, model, record.version, record.reason)
            else:
                log.info("Watch %s: model %s version %s: %s", self.name, model, record.version, record.reason)
            del self._canaries_to_come[model]

    def _succeed(self, record: Record, outcome: str, reason: str) -> None:
        record.is_ours, record.tries = True, 0
        self._note(record.entry.key, record.entry, "loaded", reason)
        self.outcomes[outcome] += 1
        log.info(
            "Watch %s: %s is model %s version %s (%s)",
            self.name,
            record.entry.key,
            record.model,
            record.version,
            outcome,
        )

    # ------------------------------------------------------------------------------------------- what is past

    def _is_past(self, model: str, version: str, *, was_there: bool) -> bool:
        """Whether a version that is not loaded is older than all that have to stay loaded."""
        kept, loaded = self.policy.kept, self._loaded.get(model, [])
        if not kept or version in loaded:
            return False
        if are_numbered([*loaded, version]):
            return len([each for each in loaded if version_order(each) > version_order(version)]) >= kept
        return was_there and len(loaded) >= kept  # the newest came first

    def _was_taken_back(self, model: str, version: str) -> bool:
        if self.policy.on_new != "canary" or self._canaries is None:
            return False
        return self._canaries.was_taken_back(model, version)

    def _leave_out(self, record: Record, model: str, version: str) -> None:
        record.model, record.version = model, version
        self._note(record.entry.key, record.entry, "left out", f"the newest {self.policy.kept} versions are loaded")

    async def _let_go_of_old(self, model: str) -> None:
        """Unregister versions of this watch beyond those to keep: the oldest first, none in use."""
        kept, loaded = self.policy.kept, self._loaded.get(model, [])
        if not kept:
            return
        for version in loaded[:-kept]:
            if self._models.default_of(model) != version and await self._unload(model, version):
                for record in self.records.values():
                    if (record.model, record.version) == (model, version) and record.state == "loaded":
                        self._note(record.entry.key, record.entry, "unloaded", f"{kept} newer versions are loaded")

    async def _unload(self, model: str, version: str) -> bool:
        """Unregister a version of this watch; False, and a log line, if it is in use."""
        try:
            await self._models.unload(model, version)
        except (ModelNotFound, VersionNotFound):
            pass  # it was unregistered by another call
        except (DefaultVersionInUse, VersionInUse) as error:
            log.info("Watch %s: model %s version %s stays loaded: %s", self.name, model, version, error)
            return False
        else:
            self.outcomes["unloaded"] += 1
            log.info("Watch %s: model %s version %s is unloaded", self.name, model, version)
        if version in self._loaded.get(model, []):
            self._loaded[model].remove(version)
        return True

    async def _remove(self, key: str) -> None:
        """Handle a removed archive. Its version stays, unless the policy says otherwise."""
        record = self.records.get(key)
        if record is None:
            return
        if record.state != "loaded" or record.model is None or record.version is None:
            del self.records[key]
            return
        if self._as_it_is_now(record).state == "unloaded":
            del self.records[key]
        elif self.policy.on_removed == "ignore" or not record.is_ours:
            self._note(key, record.entry, "gone", "the archive has gone; its version goes on")
        elif await self._unload(record.model, record.version):
            self._note(key, record.entry, "gone", "the archive has gone, and its version with it")
        else:
            self._note(key, record.entry, "gone", "the archive has gone; its version is in use and goes on")
        self._forget_gone()

    def _forget_gone(self) -> None:
        """Forget removed archives, except the latest."""
        gone = sorted((record.at, key) for key, record in self.records.items() if record.state == "gone")
        for _, key in gone[:-MOST_GONE]:
            del self.records[key]

    def _is_renamed(self, registered: str, model: str, version: str) -> bool:
        """Whether a version came from an archive of this watch that has another name now."""
        return any(
            record.is_ours
            and (record.model, record.version) == (model, version)
            and self._source_of_key(key) == _plain(registered)
            and record.state == "gone"
            for key, record in self.records.items()
        )

    # ------------------------------------------------------------------------------------------- what goes wrong

    def _fail(self, change: Change, error: MarserveError) -> None:
        """Report an unusable archive once; try it again if time may mend it."""
        key = change.entry.key
        record = self.records[key]
        reason = _reason(error)
        record.tries += 1
        if _may_pass(error) and record.tries < MOST_TRIES:
            pause = min(LONGEST_RETRY_S, self._first_retry_s * 2.0 ** (record.tries - 1))
            if key not in self._todo:  # a change that came meanwhile is newer
                self._todo[key] = change
                self._retry_at[key] = asyncio.get_running_loop().time() + pause
            if record.tries == 1:
                log.warning("Watch %s: %s is not loaded yet, and tried again: %s", self.name, key, reason)
            self._note(key, change.entry, "retrying", reason)
            self.outcomes["retried"] += 1
            return
        tried = f" (tried {record.tries} times)" if record.tries > 1 else ""
        log.error("Watch %s: %s is refused until it changes: %s%s", self.name, key, reason, tried)
        record.tries = 0
        self._note(key, change.entry, "refused", reason + tried)
        self.outcomes["refused"] += 1

    def _note(self, key: str, entry: Entry, state: State, reason: str = "") -> Record:
        record = self.records.get(key)
        if record is None:
            record = self.records[key] = Record(entry, state, time.time(), reason)
        record.entry, record.state, record.reason, record.at = entry, state, reason, time.time()
        return record


class VersionTaken(VersionConflict):
    """The archive's version is registered already, from another source."""

    def __init__(self, sentence: str) -> None:
        self.args = (sentence,)


def _plain(url: str) -> str:
    """A version's registered address without its digest: one from a snapshot has a digest."""
    return split_digest(url)[0]


def _discard(taking: asyncio.Future[Unpacked]) -> None:
    """Delete the archive that a thread took in."""
    if not taking.cancelled() and taking.exception() is None:
        taking.get_loop().run_in_executor(None, taking.result().discard)


_PASSING = (
    OutOfMemory,
    NotEnoughMemory,
    DownloadFailed,
    DependencyFailed,
    Unavailable,
    ArchiveNotFound,
    SwapUnderWay,
)


def _may_pass(error: MarserveError) -> bool:
    """Whether the same archive may be usable later."""
    if isinstance(error, LoadFailed):
        return error.out_of_memory
    return isinstance(error, _PASSING) or type(error) is MarserveError


def _reason(error: MarserveError) -> str:
    """The error's sentence, and its cause: for logs and management."""
    inner = getattr(error, "reason", "")
    line = " ".join(str(inner).split()) if inner else ""
    return f"{error.message}: {line[:500]}" if line and line not in error.message else error.message


def _newest_first(changes: list[Change]) -> list[Change]:
    """The changes in order; those there at the start by version, newest first: it becomes the default."""

    def newness(change: Change) -> tuple[tuple[tuple[int, int, str], ...], float]:
        return version_order(name_from_place(change.entry.key).version or ""), change.entry.modified or 0.0

    there = sorted((change for change in changes if change.was_there), key=newness, reverse=True)
    return [*there, *(change for change in changes if not change.was_there)]


def _instant(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
