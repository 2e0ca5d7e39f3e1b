"""All searches of a server: one at a time, beside what serves; the build that is found takes the version's place.

    a version is ready ─► is there a key? may it be built? ─► a folder of an earlier search ─────────┐
                                                           └► the process that searches ─► a folder ─┴► swap, or parent

A search ends with its version, and with the server. What it found is used again by the next start.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from marserve.answers.management import Optimising
from marserve.answers.optimising import OptimisingReport
from marserve.errors import Draining, MarserveError, without_stop
from marserve.files.leased_folders import Lease, LeasedFolders, discard
from marserve.optimise.background.cache import (
    MOST_BYTES,
    Damaged,
    Found,
    archive_of,
    folders_in,
    forget_found,
    key_of,
    machine_of,
    read_found,
    weight_bytes_of,
    write_refused,
)
from marserve.optimise.background.order import WHOLE, Order
from marserve.optimise.background.searching import Searching
from marserve.optimise.background.standing import (
    parent_stays,
    sentence_of,
    serving,
    why_none,
    why_not,
    with_report,
)
from marserve.optimise.proof import PROOF_PATH
from marserve.optimise.taken import Taken
from marserve.registry.catalogue.versions import Version
from marserve.registry.models import Registry
from marserve.telemetry.happenings import Happenings

log = logging.getLogger("marserve.optimise")

NO_KEY: Final = (
    "the configuration has no key optimise: add optimise: {candidates: auto} to model-config.yaml, or run "
    "marserve optimise"
)
SLEEPS: Final = "the version may be without workers until a request comes; with a minWorkers of 1 builds are tried"
HOLDS_BUILD: Final = "the archive holds a build already, which serves where it does what is recorded of it"
# Of processor time; a share of a core makes it longer.
WITHIN_S: Final = 1800.0
# So many workers of a build that die unasked within so long bring its parent back. A worker may die at any time for
# reasons that are not the build's.
MOST_DEATHS: Final = 3
DEATHS_WITHIN_S: Final = 3600.0
# If its parent cannot be loaded, another try is made after so long, and at the next death.
TRY_AGAIN_S: Final = 600.0
# Another search makes it, or a build in it was damaged while it still serves elsewhere.
HELD: Final = "until another search, or another server that serves the build in {folder}, lets go of it"
# How often a folder is looked at that another search of this machine makes.
LOOK_AGAIN_S: Final = 1.0


class Background:
    """The searches of one server. Everything here is called on the event loop."""

    def __init__(
        self,
        registry: Registry,
        searching: Searching,
        state_folder: Path,
        happenings: Happenings,
        *,
        share: float,
        memory_bytes: int,
        machine: Callable[[], Mapping[str, Any]] = machine_of,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`share` is of one core, 0 for none; `memory_bytes` is what each process of a search may allocate.

        `clock` has the time of deaths, in seconds.
        """
        self._registry = registry
        self._searching = searching
        self._state_folder = state_folder
        self._happenings = happenings
        self._share = share
        self._memory_bytes = memory_bytes
        self._machine = machine
        self._clock = clock
        self._turn = asyncio.Lock()
        self._folders: LeasedFolders | None = None
        self._tasks: dict[Version, asyncio.Task[None]] = {}
        self._swapping: set[Version] = set()
        self._leases: dict[Version, Lease] = {}
        self._reports: dict[Version, dict[str, Any]] = {}
        self._is_stopped = False
        registry.hooks.after_ready.append(self.consider)
        registry.hooks.after_left.append(self.forget)

    # ------------------------------------------------------------------------------------------- what is called

    def consider(self, version: Version) -> None:
        """A version is ready: look for a faster build if its configuration asks for one and none was looked for."""
        is_asked = version.facts.options.optimise.is_asked
        if self._is_stopped or not is_asked or version.optimising is not None or version.plan.load.build:
            return
        if (Path(version.plan.load.model_dir) / PROOF_PATH).is_file():
            self._note(version, Optimising("none", why=HOLDS_BUILD))
            return
        if why := why_not(version.facts, share=self._share):
            self._note(version, parent_stays(why))
            return
        self._note(version, Optimising("waits"))
        self._begin(version, self._optimise(version))

    def forget(self, version: Version) -> None:
        """The last process of a version has ended."""
        if (task := self._tasks.get(version)) and version not in self._swapping:
            task.cancel()
        self._reports.pop(version, None)
        if lease := self._leases.pop(version, None):
            lease.release()

    def report(self, model: str, version: str | None) -> OptimisingReport:
        """How far the search for a version is, and what it showed.

        Raises ModelNotFound, VersionNotFound.
        """
        found = self._registry.version_of(model, version)
        standing = found.optimising
        if standing is None and found.facts.options.optimise.is_asked:
            waits = Optimising("waits", step="until the version is ready")
            standing = Optimising("none", why=SLEEPS) if found.wakes else waits
        return with_report(standing or Optimising("none", why=NO_KEY), found, self._reports.get(found))

    async def stop(self) -> None:
        """End all searches; nothing of them is left."""
        self._is_stopped = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for lease in self._leases.values():
            lease.release()
        self._leases.clear()

    # ------------------------------------------------------------------------------------------- one version

    async def _optimise(self, version: Version) -> None:
        """Ends when the version leaves the list, unless the build is what takes its place."""
        while not self._registry.is_listed(version):  # of a swap, and of a document, it is ready before it serves
            await self._registry.states.wait()
        work = asyncio.ensure_future(self._find_and_swap(version))
        try:
            while not work.done() and (version in self._swapping or self._registry.is_listed(version)):
                change = asyncio.ensure_future(self._registry.states.wait())
                try:
                    await asyncio.wait((work, change), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    change.cancel()
        finally:
            work.cancel()
            await asyncio.wait((work,))
        if work.cancelled():
            version.optimising = None  # it has left, and may come back
        elif (error := work.exception()) is not None:
            self._note(version, parent_stays(f"the search failed: {type(error).__name__}"))
            log.error("The search for a build of %s failed", version.model, exc_info=error)

    def _begin(self, version: Version, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[version] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._tasks.pop(version, None))

    async def _watch(self, version: Version, weight_bytes: int) -> None:
        """Bring the parent back if the workers of a build die again and again; `weight_bytes` are the parent's."""
        died: deque[float] = deque()
        seen, why, again_at = 0, "", 0.0
        while self._registry.is_listed(version):
            now, deaths = self._clock(), sum(version.pool.metrics.worker_deaths.values())
            is_new = deaths > seen
            died.extend([now] * (deaths - seen))
            seen = deaths
            while died and now - died[0] > DEATHS_WITHIN_S:
                died.popleft()
            if not why and len(died) >= MOST_DEATHS:
                name = (version.optimising and version.optimising.build) or ""
                why = f"{len(died)} workers died within an hour while the build {name} served"
                await self._refuse(version, why)
            if why and (is_new or now >= again_at):
                if await self._give_back(version, why, weight_bytes):
                    return
                again_at = self._clock() + TRY_AGAIN_S
                continue  # there may have been a death meanwhile
            with suppress(TimeoutError):
                async with asyncio.timeout(TRY_AGAIN_S if why else None):
                    await self._registry.states.wait()

    async def _refuse(self, version: Version, why: str) -> None:
        """Have the next start leave the parent where it is."""
        try:
            await asyncio.to_thread(write_refused, self._leases[version].folder, why)
        except (Damaged, OSError) as error:  # the next start tries the build again
            log.warning("%s cannot be noted: %s", why, error)

    async def _give_back(self, version: Version, why: str, weight_bytes: int) -> bool:
        """Put the parent in the place of a build. Returns whether the build needs no watch any more."""
        name, report = (version.optimising and version.optimising.build) or "", self._reports[version]
        self._swapping.add(version)
        try:
            parent = await self._registry.rebuild(version, "", "", weight_bytes)
        except Draining:
            return True
        except (MarserveError, OSError) as error:
            log.error(
                "%s %s: %s, and its parent cannot serve: %s. It is tried again in %d minutes, and at the next death",
                version.model,
                version.name,
                why,
                without_stop(str(error)),
                TRY_AGAIN_S / 60,
            )
            return False
        finally:
            self._swapping.discard(version)
        self._reports[parent] = report
        self._note(parent, parent_stays(why))
        self._tell(parent, f"its parent took the place of the build {name}")
        return True

    async def _find_and_swap(self, version: Version) -> None:
        try:
            lease, found, is_cached = await self._find(version)
        except (MarserveError, OSError) as error:
            self._note(version, parent_stays(f"the search failed: {error}"))
            return
        self._reports[version] = found.report
        row = found.winner
        if row is None:
            lease.release()
            self._note(version, parent_stays(why_none(found.report)))
            return
        name = row["name"]
        self._swapping.add(version)
        try:
            self._step(version, f"{name}: loading workers with it")
            weight_bytes = await asyncio.to_thread(weight_bytes_of, lease.folder, version.plan)
            new = await self._registry.rebuild(version, str(lease.folder), name, weight_bytes)
        except Draining:
            lease.release()
        except (MarserveError, OSError) as error:
            lease.release()
            self._note(version, parent_stays(f"{name} is equal and faster, and was not taken: {error}"))
        except BaseException:
            lease.release()
            raise
        else:
            self._leases[new] = lease
            self._reports[new] = found.report
            self._note(new, serving(row, is_cached=is_cached))
            self._begin(new, self._watch(new, version.facts.options.weight_bytes))
            self._tell(version, f"the build {name} took the place of its parent")
        finally:
            self._swapping.discard(version)

    async def _find(self, version: Version) -> tuple[Lease, Found, bool]:
        """What a search found, with a lease of its folder, and whether it was an earlier one. Raises MarserveError,
        OSError."""
        options = version.options
        order = Order(
            Taken.of(version.plan),
            "",
            share=self._share,
            batch_size=options.batch_size,
            threads=version.pool.threads,
            within_s=WITHIN_S / min(self._share, 1.0),
            memory_bytes=self._memory_bytes,
        )
        folders = await self._open_folders()
        key = await asyncio.to_thread(lambda: key_of(order, archive_of(version.plan), self._machine()))
        is_held = False
        while True:
            lease = folders.lease(key)
            if lease is None:
                if not is_held:
                    is_held = True
                    self._note(version, Optimising("waits", step=HELD.format(folder=folders.folder / key)))
                await asyncio.sleep(LOOK_AGAIN_S)
                continue
            try:
                if lease.is_exclusive:
                    async with self._turn:
                        return lease, await self._search(version, order, folders, key, lease), False
                return lease, await asyncio.to_thread(read_found, lease.folder), True
            except Damaged as error:
                lease.release()
                log.warning("%s: the search begins anew", error)
                await asyncio.to_thread(forget_found, lease.folder)
            except BaseException:
                lease.release()
                raise

    async def _search(self, version: Version, order: Order, folders: LeasedFolders, key: str, lease: Lease) -> Found:
        """Have the process search, and keep what it found under the key, unless another try may end otherwise."""
        self._tell(version, "the search for a faster build began beside it")
        staged = folders.stage(key)
        try:
            order = msgspec.structs.replace(order, folder=str(staged))
            if why := await self._searching.run(order, lambda step: self._step(version, step)):
                raise SearchFailed(why)
            found = await asyncio.to_thread(read_found, staged / WHOLE)
            if found.may_change:
                lease.release()
            else:
                folders.publish(staged / WHOLE, key)
                if not folders.share(lease):
                    raise SearchFailed(f"{lease.folder} was deleted by another process")
            return found
        except Damaged as error:  # of what was just written
            raise SearchFailed(str(error)) from error
        finally:
            # Shielded from a second cancel, so that the folder is always removed.
            await asyncio.shield(asyncio.to_thread(discard, staged))

    async def _open_folders(self) -> LeasedFolders:
        """The folders. First what killed processes left is deleted, and what is too much. Raises OSError."""
        if self._folders is None:
            folders = await asyncio.to_thread(folders_in, self._state_folder)
            await asyncio.to_thread(folders.prune, MOST_BYTES)
            self._folders = folders
        return self._folders

    def _tell(self, version: Version, what: str) -> None:
        now = time.monotonic()
        self._happenings.note("build", now, now, what, version.model, version.name)

    def _step(self, version: Version, step: str) -> None:
        self._note(version, Optimising("builds", step=step))

    def _note(self, version: Version, standing: Optimising) -> None:
        version.optimising = standing
        level = logging.WARNING if standing.state == "parent" else logging.INFO
        log.log(level, "Model %s version %s: %s", version.model, version.name, sentence_of(standing))


class SearchFailed(MarserveError):
    """The process that searches found nothing; the message says why."""
