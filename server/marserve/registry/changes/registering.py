"""Adds and removes versions: takes in, plans, installs, publishes, waits until ready; and retires.

After any error on the way nothing of the version is left. The table knows which versions there are.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import replace

from marserve.allocator import give_back_free_memory
from marserve.environments.environments import Environments
from marserve.errors import (
    ArchiveExists,
    CleanUpTimedOut,
    DependencyFailed,
    DigestMismatch,
    DownloadFailed,
    Draining,
    LoadFailed,
)
from marserve.names import check_new_name, check_new_version
from marserve.registry.catalogue.plan import Plan, Unpacked
from marserve.registry.catalogue.snapshot import archive_name
from marserve.registry.catalogue.versions import PoolFactory, Version, Versions
from marserve.registry.changes.hooks import Hooks
from marserve.registry.changes.under_way import Changes
from marserve.registry.intake.installing import Installations
from marserve.registry.intake.intake import Intake
from marserve.registry.intake.pending_fetches import Awaited, Coming
from marserve.registry.intake.plan import check_parameters, make_plan
from marserve.registry.intake.registration import LentAs, Progress, Registered, RegisterParameters, RegistryOptions
from marserve.store.addresses.fetch_guard import hide_query
from marserve.store.addresses.pinned_digest import split_digest
from marserve.store.fetching.fetcher import Fetched, OnBegin
from marserve.telemetry.metrics.server_metrics import Metrics

log = logging.getLogger("marserve.registry")

PARALLEL_INTAKES = 2
# Downloads wait for the network; archives that are here already must not wait for them.
PARALLEL_FETCHES = 4
# The time for ending workers beyond the time to drain: SIGTERM, SIGKILL, reaping.
KILL_GRACE_S = 15.0
# Free memory is given back to the system at most this often when versions leave.
TIDY_EVERY_S = 5.0


class Registering:
    """Puts versions into the table `versions`, and takes them off."""

    def __init__(
        self,
        options: RegistryOptions,
        intake: Intake,
        make_pool: PoolFactory,
        metrics: Metrics,
        environments: Environments | None,
        versions: Versions,
        changes: Changes,
        hooks: Hooks,
        note_change: Callable[[Version], None],
    ) -> None:
        """`note_change` is called after each successful registration."""
        self._options = options
        self._intake = intake
        self._make_pool = make_pool
        self._metrics = metrics
        self._environments = environments
        self._versions = versions
        self._changes = changes
        self._hooks = hooks
        self._note_change = note_change
        self._intakes = asyncio.Semaphore(PARALLEL_INTAKES)
        self._fetches = asyncio.Semaphore(PARALLEL_FETCHES)
        self._is_draining = False
        self._drain_begun = asyncio.Event()
        self._tidy_at = 0.0
        self.installations = Installations()
        self.coming = Coming()
        # Unpacked archives of `Registry.looking_into`, by address, model and version: `prepare` uses them.
        self.lent: dict[LentAs, Unpacked] = {}
        # The number of registrations under way by name in the store, and the store's files that are being deleted.
        self._under_way: Counter[str] = Counter()
        self._deleting: dict[str, asyncio.Task[bool]] = {}
        self._unregistered: set[Version] = set()

    @property
    def is_draining(self) -> bool:
        """Whether registrations are refused."""
        return self._is_draining

    def refuse_new(self) -> None:
        """Refuse registrations; give up downloads, checks and installations that are under way."""
        self._is_draining = True
        self._drain_begun.set()
        self._intake.stop_taking_in()
        self.installations.give_up_all()

    # ---------------------------------------------------------------------------------------------- coming

    async def register(self, parameters: RegisterParameters, unpacked: Unpacked | None = None) -> Registered:
        """Take an archive in, unless the caller has unpacked it, and make it a version. See `Registry.register`."""
        check_parameters(parameters)
        with self.using(parameters.url):
            if unpacked is None:
                unpacked = await self.take_in(parameters)
            try:
                version = await self.establish(parameters, await self.plan(parameters, unpacked))
            except Draining:
                raise
            except BaseException:
                if unpacked.placed is not None:  # so that nothing of it is left
                    await self._delete_unused(unpacked.archive, users=1)
                raise
        workers = version.min_workers
        progress: Progress = "done"
        if workers:
            try:
                progress = await self.load(version, waits=parameters.synchronous)
            except (LoadFailed, Draining) as error:
                if self._versions.is_listed(version):
                    self.remove(version)
                    await self.retire(version, drain_s=0.0, deletes_fetched=isinstance(error, LoadFailed))
                raise
        self._note_change(version)
        return Registered(version.model, version.name, workers, progress, version.wakes)

    async def take_in(self, parameters: RegisterParameters, *, is_look: bool = False) -> Unpacked:
        """Fetch, unpack and check an archive: which one, its `freshness` says. Raises as `Intake` does, and Draining.

        With `is_look`, for dry runs, the store gets no file and loses none.
        """
        url = parameters.url
        if going := self._deleting.get(archive_name(split_digest(url)[0])):
            await asyncio.wait([going])
        if not self._intake.fetches(url):  # does not wait for others' downloads
            return await self._unpack(url, None, parameters.checkpoint)
        fetch: Callable[[str, OnBegin], Fetched | None]
        if parameters.freshness == "now":
            fetch = self._intake.fetch_aside if is_look else self._fetch_now
        else:
            fetch = self._intake.fetch_for_a_look if is_look else self._intake.fetch
        version = parameters.version or (parameters.restored.version if parameters.restored is not None else None)
        with self.coming.awaiting(url, parameters.model_name, version) as awaited:
            async with self._place_for(url, awaited):
                if self._is_draining:
                    raise Draining
                fetched: Fetched | None
                try:
                    fetched = await asyncio.to_thread(fetch, url, awaited.begin)
                except ArchiveExists as error:
                    if parameters.freshness == "at_start":
                        # An earlier start of this server fetched it; a later start uses that file.
                        other = self._intake.other_address_of(error.name, url)
                        if other is None:
                            log.info("%s is not fetched again: %s is in the store", hide_query(url), error.name)
                        else:
                            log.warning(
                                "%s is not fetched: the store's %s is served in its place, which was fetched from %s; "
                                "to have the other, remove that file",
                                hide_query(url),
                                error.name,
                                other,
                            )
                        url, fetched = error.name, None
                    elif is_look and self._is_left_over(error.name, users=0):
                        fetched = await asyncio.to_thread(self._intake.fetch_aside, url, awaited.begin)
                    elif not is_look and await self._delete_unused(error.name, users=1):
                        # Fetched before, and no version uses it: after a crash, or a restart without the model.
                        fetched = await asyncio.to_thread(fetch, url, awaited.begin)
                    else:
                        raise
            awaited.unpack()
            return await self._unpack(url, fetched, parameters.checkpoint)

    @contextlib.asynccontextmanager
    async def _place_for(self, url: str, awaited: Awaited) -> AsyncIterator[None]:
        """Hold one of the places for downloads during the block. A waiting download is listed, and may be cancelled.

        Raises DownloadFailed if it is cancelled, Draining if the server stops.
        """
        loop = asyncio.get_running_loop()
        with self._intake.queued(url) as queued:
            awaited.begin(queued)
            place = asyncio.ensure_future(self._fetches.acquire())

            def give_up() -> None:
                loop.call_soon_threadsafe(place.cancel)

            try:
                with queued.cancel.calling(give_up):
                    await asyncio.wait([place])
            except BaseException:
                if not place.cancel() and not place.cancelled():
                    self._fetches.release()
                raise
            if place.cancelled():
                if self._is_draining:
                    raise Draining
                raise DownloadFailed(queued.url, reason=queued.cancel.reason)
            queued.has_place = True
            try:
                yield
            finally:
                self._fetches.release()

    async def _unpack(self, url: str, fetched: Fetched | None, checkpoint: str | None) -> Unpacked:
        async with self._intakes:
            if self._is_draining:
                if fetched is not None:
                    await asyncio.to_thread(fetched.discard)
                raise Draining
            return await asyncio.to_thread(self._intake.take_in, url, fetched, checkpoint)

    def _fetch_now(self, url: str, on_begin: OnBegin) -> Fetched | None:
        try:
            return self._intake.fetch(url, on_begin)
        except (ArchiveExists, DigestMismatch):
            return self._intake.fetch_aside(url, on_begin)

    async def plan(self, parameters: RegisterParameters, unpacked: Unpacked) -> Plan:
        """Plan a version of the unpacked archive, or delete it and raise.

        Raises BadName for an invalid new name; a start and a snapshot keep the names that they had.
        """
        try:
            plan = await asyncio.to_thread(make_plan, parameters, unpacked, self._options)
            if not parameters.is_at_startup and parameters.restored is None:
                self._check_new_names(plan)
            return plan
        except BaseException:
            await asyncio.to_thread(unpacked.discard)
            raise

    def _check_new_names(self, plan: Plan) -> None:
        model, version = plan.facts.options.model, plan.facts.options.version
        known = self._versions.models.get(model)
        if known is None:
            check_new_name("model", model)
        if known is None or version not in known.versions:
            check_new_version(version, may_be_reserved=self._options.as_torchserve)

    async def prepare(self, parameters: RegisterParameters) -> Version:
        """Make a version beside what is on the list, and begin to start its workers; no request finds it yet.

        It counts as leaving until `publish` puts it on the list; `retire` ends it. A listed version of its name stays.
        Raises as `register`, except VersionConflict; nothing of it is left then.
        """
        check_parameters(parameters)
        with self.using(parameters.url):
            unpacked = self.lent.pop(parameters.lent_as, None)
            if unpacked is None:
                unpacked = await self.take_in(replace(parameters, freshness="now"))
            return await self.establish(parameters, await self.plan(parameters, unpacked), is_beside=True)

    def publish(self, version: Version) -> Version | None:
        """Put a prepared version on the list; requests find it from now on. Returns the version that it replaced."""
        before = self._versions.put(version)
        if before is not None:
            self._metrics.remove(before.pool.metrics)
        self._metrics.register(version.pool.metrics)
        return before

    def replace(self, old: Version, new: Version, *, keeps_old: bool = False) -> None:
        """Put a version in the place of a listed one at once; that one leaves, unless `keeps_old`."""
        self._versions.replace(old, new, keeps_old=keeps_old)
        if not keeps_old:
            self._metrics.remove(old.pool.metrics)
        self._metrics.register(new.pool.metrics)

    async def establish(self, parameters: RegisterParameters, plan: Plan, *, is_beside: bool = False) -> Version:
        """Install the plan's requirements and put the version on the list.

        With `is_beside` it is not put on the list (see `prepare`). After an error what belongs to the plan is deleted.
        """
        async with self._equipped(parameters, plan, is_beside=is_beside) as whole:
            if self._hooks.before_pool and not is_beside:
                self._versions.refuse_conflict(whole.facts.options.model, whole.facts.options.version)
            await self.ask_hooks(whole)
            return self._begin(whole, is_beside=is_beside)

    async def begin_beside(self, plan: Plan) -> Version:
        """Make a version of a plan that is installed, off the list, and begin to start its workers. Raises as hooks do,
        Draining, NotEnoughMemory."""
        await self.ask_hooks(plan)
        return self._begin(plan, is_beside=True)

    async def prepare_idle(self, parameters: RegisterParameters, plan: Plan) -> Version:
        """Install the plan's requirements and make a version without workers, off the list: see `make_idle`.

        After an error what belongs to the plan is deleted.
        """
        async with self._equipped(parameters, plan, is_beside=True) as whole:
            return self.make_idle(whole)

    @contextlib.asynccontextmanager
    async def _equipped(self, parameters: RegisterParameters, plan: Plan, *, is_beside: bool) -> AsyncIterator[Plan]:
        """The plan with its requirements installed. During the block no other version of its name is installed."""
        model, name = plan.facts.options.model, plan.facts.options.version
        with contextlib.ExitStack() as stack:
            try:
                if plan.wanted is not None and self._environments is not None:
                    if self._is_draining:
                        raise Draining
                    if not is_beside:
                        self._versions.refuse_conflict(model, name)
                    claim = stack.enter_context(self.installations.claim(model, name))
                    plan = await claim.install(plan, self._environments, is_synchronous=parameters.synchronous)
                yield plan
            except BaseException as error:
                await asyncio.to_thread(plan.discard)
                if isinstance(error, DependencyFailed):
                    if self._is_draining:
                        raise Draining from error
                    self._remark_failure(model, name, error)
                raise

    async def ask_hooks(self, plan: Plan) -> None:
        """Call the hooks that may refuse the version, or free memory for it, before its workers start."""
        for ask in self._hooks.before_pool:
            await ask(plan)

    def _begin(self, plan: Plan, *, is_beside: bool) -> Version:
        """Make a version, begin to start its workers, and list it unless it `is_beside`. Awaits nothing.

        Raises Draining, VersionConflict, NotEnoughMemory.
        """
        if self._is_draining:
            raise Draining
        if not is_beside:
            self._versions.refuse_conflict(plan.facts.options.model, plan.facts.options.version)
        version = self._make(plan)
        version.pool.start()
        if is_beside:
            self._versions.leaving.add(version)
        else:
            self._metrics.register(version.pool.metrics)
            self._versions.add(version)
        return version

    def make_idle(self, plan: Plan) -> Version:
        """Make a version without workers and without a reservation of memory, off the list; it counts as leaving.

        Start its workers with `begin_idle`, when there is room. Raises Draining.
        """
        if self._is_draining:
            raise Draining
        options = plan.facts.options
        version = self._make(replace(plan, facts=replace(plan.facts, options=replace(options, min_workers=0))))
        self._versions.leaving.add(version)
        version.plan, version.facts = plan, plan.facts
        version.min_workers, version.is_settled = options.min_workers, not options.min_workers
        return version

    def begin_idle(self, version: Version, min_workers: int, max_workers: int) -> None:
        """Begin to start the workers of a version that `make_idle` made. Raises NotEnoughMemory."""
        version.pool.start()
        self.scale(version, min_workers, max_workers)

    def _make(self, plan: Plan) -> Version:
        version = Version(plan, self._make_pool(plan.facts.options, plan.load), time.time())
        version.pool.follow(self._versions.states.tell)
        for warning in plan.facts.warnings:
            log.warning("Model %s version %s: %s", version.model, version.name, warning)
        return version

    def _remark_failure(self, model: str, name: str, error: DependencyFailed) -> None:
        """Note with the model's default version, if any, why another one is missing; describe shows it."""
        if model in self._versions.models:
            words = "; ".join(error.reason.splitlines()[-3:])
            sentence = f"version {name} was not registered, its requirements were not installed: {words}"
            remark(self._versions.find(model, None), [sentence])

    async def wait_until_ready(self, version: Version) -> bool:
        """Wait for the workers that a version should have; False if some of them will not be ready soon.

        Raises LoadFailed.
        """
        try:
            is_ready = await version.pool.wait_until_ready()
        except LoadFailed as error:
            requirements = version.facts.requirements or {}
            if error.cause != "missing_module" or requirements.get("status") != "not installed":
                raise
            remedy = "what the archive requires is not installed, for install_py_dep_per_model is false"
            reason = f"{error.reason} ({remedy})"
            raise LoadFailed(error.model, error.version, reason=reason, cause=error.cause) from error
        finally:
            version.is_settled = True
            self._versions.states.tell()
        if is_ready:
            for tell in self._hooks.after_ready:
                tell(version)
        return is_ready

    async def wait_for_caller(self, version: Version) -> bool:
        """As `wait_until_ready`, for a call: raises Draining as soon as the server begins to drain."""
        ready = asyncio.ensure_future(self.wait_until_ready(version))
        drain = asyncio.ensure_future(self._drain_begun.wait())
        try:
            await asyncio.wait((ready, drain), return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                return ready.result()
            raise Draining
        finally:
            for waiting in (ready, drain):
                waiting.cancel()
            await asyncio.wait((ready, drain))

    async def settle(self, version: Version) -> LoadFailed | None:
        """Wait for a load that no call waits for; logs and returns its error."""
        try:
            await self.wait_until_ready(version)
        except LoadFailed as error:
            log_failure(version, error)
            return error
        return None

    async def load(self, version: Version, *, waits: bool) -> Progress:
        """Wait for the workers that a version should have; without `waits` leave that to a task.

        Logs a failure. Raises LoadFailed and Draining.
        """
        if not waits:
            self._changes.follow(self.settle(version))
            return "begun"
        try:
            return "done" if await self.wait_for_caller(version) else "partial"
        except LoadFailed as error:
            log_failure(version, error)
            raise

    def scale(self, version: Version, min_workers: int, max_workers: int) -> None:
        """Set the bounds of a version's workers, at most as many as there are devices for (contract 10.5).

        Does not wait for workers. Raises NotEnoughMemory; nothing has changed then.
        """
        min_workers, max_workers = bounds_of(version, min_workers, max_workers)
        version.pool.scale(min_workers, most_at_work(version, min_workers, max_workers))
        version.min_workers, version.max_workers = min_workers, max_workers

    # ---------------------------------------------------------------------------------------------- going

    def remove(self, version: Version) -> None:
        """Take a listed version off the list: no request finds it from now on."""
        self._versions.remove(version)
        self._metrics.remove(version.pool.metrics)

    async def end(self, version: Version, *, drain_s: float | None = None) -> None:
        """As `retire`; an end that takes too long is only logged."""
        try:
            await self.retire(version, drain_s=drain_s)
        except CleanUpTimedOut as error:
            log.error("Model %s version %s: %s", version.model, version.name, error)

    async def retire(self, version: Version, *, drain_s: float | None = None, deletes_fetched: bool = False) -> None:
        """End a removed version. Raises CleanUpTimedOut when that takes too long; it then goes on in the background.

        Its requests have `drain_s` to end, or (None) as long as the settings say.
        With `deletes_fetched` the store's file that it came from is deleted, if it was fetched and no version uses it.
        """
        drain_s = self._options.unregister_timeout_s if drain_s is None else drain_s
        if deletes_fetched:
            self._unregistered.add(version)
        ending = self._changes.follow(self._end(version, drain_s=drain_s))
        done, _ = await asyncio.wait({ending}, timeout=drain_s + KILL_GRACE_S)
        if not done:
            raise CleanUpTimedOut(version.model)
        ending.result()

    def end_all(self) -> None:
        """Begin to end every version without time to drain, those that are leaving already too."""
        for version in list(self._versions.all()):
            self.remove(version)
        for version in self._versions.leaving:
            self._changes.follow(self._end(version, drain_s=0.0))

    async def _end(self, version: Version, *, drain_s: float) -> None:
        try:
            await version.pool.stop(drain_s)
        finally:
            if version in self._versions.leaving:  # two ends may run: only the first one calls the hooks
                self._versions.leaving.discard(version)
                for tell in self._hooks.after_left:
                    tell(version)
            await asyncio.to_thread(version.plan.discard)
            if version in self._unregistered:
                self._unregistered.discard(version)
                await self._delete_unused(version.plan.unpacked.archive)
            await self._tidy()

    # ---------------------------------------------------------------------------------------- what was fetched

    @contextlib.contextmanager
    def using(self, url: str) -> Iterator[None]:
        """Keep the store's file that `url` names while the block runs, for a version that is about to come from it."""
        name = archive_name(split_digest(url)[0])
        self._under_way[name] += 1
        try:
            yield
        finally:
            self._under_way[name] -= 1
            if not self._under_way[name]:
                del self._under_way[name]

    def _is_left_over(self, name: str, users: int) -> bool:
        """Whether the store's file was fetched, and only `users` registrations under way use it."""
        return self._intake.has_fetched(name) and not self.is_archive_used(name, users)

    def is_archive_used(self, name: str, users: int = 0) -> bool:
        """Whether a version, or more than `users` registrations under way, use the store's file of this name."""
        versions = (*self._versions.all(), *self._versions.leaving)
        return (
            self._under_way[name] > users
            or any(version.plan.unpacked.archive == name for version in versions)
            or any(unpacked.archive == name for unpacked in self.lent.values())
            or any(uses(name) for uses in self._hooks.uses_archive)
        )

    async def _delete_unused(self, name: str, users: int = 0) -> bool:
        """Delete the store's file of this name if it was fetched and is left over; returns whether it is gone."""
        if not self._is_left_over(name, users) or name in self._deleting:
            return False
        deleting = asyncio.create_task(asyncio.to_thread(self._intake.delete_fetched, name))
        self._deleting[name] = deleting
        # The thread goes on if the caller is cancelled; registrations wait until it has ended.
        deleting.add_done_callback(lambda _: self._deleting.pop(name))
        is_gone = await asyncio.shield(deleting)
        if is_gone:
            log.info("%s was fetched and no version uses it any more: it is deleted from the model store", name)
        return is_gone

    async def _tidy(self) -> None:
        """Give the memory of unpacking back to the system: threads would keep the blocks that they freed for ever.

        That takes a few milliseconds, so it is not done after each of many versions that leave at once.
        """
        now = asyncio.get_running_loop().time()
        if now >= self._tidy_at:
            self._tidy_at = now + TIDY_EVERY_S
            await asyncio.to_thread(give_back_free_memory)


def bounds_of(version: Version, min_workers: int, max_workers: int) -> tuple[int, int]:
    """The bounds that were asked for, limited to as many workers as there are devices for."""
    most = version.facts.options.most_workers
    return (min(min_workers, most), min(max_workers, most)) if most else (min_workers, max_workers)


def most_at_work(version: Version, min_workers: int, max_workers: int) -> int:
    """The most workers that its pool may have: a `min_workers` of 0 ends all, unless requests wake the version."""
    may_sleep = version.facts.options.idle_timeout_s is not None
    return max_workers if min_workers or may_sleep else 0


# The number of remarks on calls that a version keeps for describe.
MOST_REMARKS = 20


def remark(version: Version, sentences: Iterable[str]) -> None:
    """Note what was odd about a call for a version, in the log and in describe's warnings. Each sentence once."""
    for sentence in sentences:
        if sentence not in version.remarks and len(version.remarks) < MOST_REMARKS:
            version.remarks.append(sentence)
            log.warning("Model %s version %s: %s", version.model, version.name, sentence)


def log_failure(version: Version, error: LoadFailed) -> None:
    """Log why the workers of a version could not load it."""
    log.error("Model %s version %s failed to load: %s", version.model, version.name, error.reason or error)
