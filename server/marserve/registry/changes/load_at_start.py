"""Loads the models of the start: those that the setting names, or those of a snapshot.

It does not wait for workers. A model that cannot be registered is logged and left out; one of a snapshot stays in later
snapshots, so that a restart with its archive mended loads it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Sequence

from marserve.errors import LoadFailed, MarserveError
from marserve.registry.catalogue.plan import Plan, Unpacked
from marserve.registry.catalogue.snapshot import SnapshotVersion
from marserve.registry.catalogue.versions import Versions
from marserve.registry.changes.registering import Registering
from marserve.registry.changes.under_way import Changes
from marserve.registry.intake.intake import Intake
from marserve.registry.intake.registration import RegisterParameters
from marserve.registry.intake.startup import models_to_load
from marserve.settings.values import LoadModels, ModelToLoad
from marserve.store.addresses.fetch_guard import hide_query
from marserve.store.addresses.pinned_digest import split_digest

log = logging.getLogger("marserve.registry")


def parameters_of_model(model: ModelToLoad) -> RegisterParameters:
    """The registration of a model that `load_models` names."""
    return RegisterParameters(
        url=model.url, model_name=model.name, synchronous=False, is_at_startup=True, freshness="at_start"
    )


def parameters_of_version(version: SnapshotVersion) -> RegisterParameters:
    """The registration of a version of a snapshot."""
    return RegisterParameters(
        url=version.archive,
        model_name=version.model,
        handler=version.handler,
        synchronous=False,
        restored=version,
        # An address with a digest of a snapshot names exactly the content that served.
        freshness="at_start" if split_digest(version.archive)[1] is None else "now",
    )


class Starting:
    """The start of one registry.

    `has_tried`: all models were tried. `failures` are sentences about those that were left out; `models` are the names
    of the others, each once, in order.
    """

    def __init__(self, intake: Intake, registering: Registering, versions: Versions, changes: Changes) -> None:
        self._intake = intake
        self._registering = registering
        self._versions = versions
        self._changes = changes
        self.has_tried = False
        self.failures: list[str] = []
        self.models: list[str] = []
        self.unrestored: dict[tuple[str, str], SnapshotVersion] = {}
        self._loads: list[asyncio.Task[LoadFailed | None]] = []

    async def failed_loads(self) -> list[LoadFailed]:
        """Wait for the first loads of the registered versions; the errors of those that failed."""
        loads, self._loads = self._loads, []
        failures = await asyncio.gather(*loads, return_exceptions=True)
        return [error for error in failures if isinstance(error, LoadFailed)]

    async def wait_for_loads(self) -> None:
        """Wait until the first loads of the registered versions have ended, well or badly.

        The waiting task may be cancelled.
        """
        if self._loads:
            await asyncio.wait(self._loads)

    async def load(self, load_models: LoadModels) -> None:
        """Load the models that the setting `load_models` names. Returns when all were tried."""
        if load_models:
            names = await asyncio.to_thread(self._intake.store.names)
            await self._load_all([parameters_of_model(model) for model in models_to_load(load_models, names)])
        self.end()

    async def restore(self, versions: Sequence[SnapshotVersion]) -> None:
        """Load the versions of a snapshot. Returns when all were tried."""
        await self._load_all([parameters_of_version(version) for version in versions])
        self.end()

    def end(self) -> None:
        """Note that all models were tried."""
        self.has_tried = True
        self._versions.states.tell()

    def forget(self, model: str, version: str | None) -> bool:
        """Forget this version, or all of the model, that could not be restored; whether there was one."""
        forgotten = [key for key in self.unrestored if key[0] == model and version in (None, key[1])]
        for key in forgotten:
            del self.unrestored[key]
        return bool(forgotten)

    async def _load_all(self, models: Sequence[RegisterParameters]) -> None:
        # Read side by side, but registered in the setting's order, which decides the default version.
        takes: list[tuple[RegisterParameters, contextlib.ExitStack, asyncio.Task[Unpacked]]] = []
        for model in models:
            using = contextlib.ExitStack()
            using.enter_context(self._registering.using(model.url))
            takes.append((model, using, asyncio.create_task(self._registering.take_in(model))))
        # The installation for one model holds up only models of the same name.
        latest: dict[str, asyncio.Task[None]] = {}
        for model, using, take in takes:
            with using:
                await self._load_one(model, take, latest, using)
        if latest:
            await asyncio.wait(latest.values())

    async def _load_one(
        self,
        parameters: RegisterParameters,
        take: asyncio.Task[Unpacked],
        latest: dict[str, asyncio.Task[None]],
        using: contextlib.ExitStack,
    ) -> None:
        """Load one archive; returns when its version is registered, or only has to wait for requirements.

        `latest` has the waiting task of each such model by name: the next version of that name waits for it in turn.
        `using` keeps the archive's file in the store; a task that waits takes it over.
        """
        try:
            plan = await self._registering.plan(parameters, await take)
        except Exception as error:
            self._note_failure(parameters, error)
            return
        before = latest.get(plan.facts.options.model)
        if plan.wanted is None and before is None:
            await self._establish(parameters, plan)
        else:
            work = self._establish_later(parameters, plan, before, using.pop_all())
            latest[plan.facts.options.model] = self._changes.follow(work)

    async def _establish_later(
        self,
        parameters: RegisterParameters,
        plan: Plan,
        before: asyncio.Task[None] | None,
        using: contextlib.ExitStack,
    ) -> None:
        with using:
            await self._establish(parameters, plan, before)

    async def _establish(
        self, parameters: RegisterParameters, plan: Plan, before: asyncio.Task[None] | None = None
    ) -> None:
        try:
            if before is not None:
                await asyncio.wait([before])
            version = await self._registering.establish(parameters, plan)
        except Exception as error:
            self._note_failure(parameters, error)
            return
        if parameters.restored is not None and parameters.restored.is_default:
            self._versions.set_default(version.model, version.name)
        if parameters.restored is not None:
            self._versions.restore_role(version, parameters.restored.role, random.getrandbits(64))
        if version.model not in self.models:
            self.models.append(version.model)
        if not version.is_settled:
            self._loads.append(self._changes.follow(self._registering.settle(version)))

    def _note_failure(self, parameters: RegisterParameters, error: Exception) -> None:
        restored = parameters.restored
        if restored is not None:
            self.unrestored[restored.model, restored.version] = restored
        # A border: one bad archive must not keep the server from starting with the others.
        is_known = isinstance(error, MarserveError)
        sentence = str(error) if is_known else "an unexpected error; the log says more"
        log.error(
            "Failed to load model: %s (%s)", hide_query(parameters.url), sentence, exc_info=None if is_known else error
        )
        self.failures.append(f"{hide_query(parameters.url)} was not loaded: {sentence}")
