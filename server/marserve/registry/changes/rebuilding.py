"""Gives a version that serves workers with another build of its model; no request is lost.

The new workers load beside the old ones, are tried as a swap's are, and take the requests between two awaits. The old
ones answer what they had accepted. Whatever fails before, the old ones go on, and nothing of the new ones is left.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec

from marserve.errors import LoadFailed, MarserveError
from marserve.registry.catalogue.plan import Plan
from marserve.registry.catalogue.versions import Version, Versions
from marserve.registry.changes.registering import Registering
from marserve.registry.changes.swap import Swapping
from marserve.registry.changes.trial import Unfit, answers_of, read_inputs, try_out
from marserve.registry.changes.under_way import Changes

# While a roll-out measures a version, or it is being swapped, nothing takes its place.
LOOK_AGAIN_S = 1.0


class NotTaken(MarserveError):
    """The old workers go on; the message says why."""


class Rebuilding:
    """The exchanges of one registry."""

    def __init__(self, registering: Registering, versions: Versions, swapping: Swapping, changes: Changes) -> None:
        self._registering = registering
        self._versions = versions
        self._swapping = swapping
        self._changes = changes

    async def take_over(self, old: Version, build: str, name: str, weight_bytes: int) -> Version:
        """Have the build of this folder and name serve; returns the version that has taken the old one's place.

        Without a build, both empty, the archive's own model serves again.
        The old one's workers end in a task of their own, when they have answered what they had accepted. Raises
        NotTaken, Draining.
        """
        while self._is_in_use(old):
            await asyncio.sleep(LOOK_AGAIN_S)
        self._check_listed(old)
        with self._swapping.claim(old.model):
            new = await self._begin(old, build, weight_bytes)
            try:
                await self._try(old, new, name)
                self._check_listed(old)
            except BaseException as error:
                await self._registering.end(new, drain_s=0.0)
                if isinstance(error, LoadFailed):
                    raise NotTaken(f"its workers could not load it: {error.reason or error}") from error
                if isinstance(error, Unfit):
                    raise NotTaken(str(error)) from error
                raise
            # No await from here to the end of the exchange.
            owner = old.plan
            self._registering.replace(old, new)
            new.plan = replace(new.plan, unpacked=owner.unpacked, environment=owner.environment)
            old.plan = owner.borrowed()
            self._follow(old, new)
        self._changes.follow(self._registering.end(old))
        return new

    def _is_in_use(self, old: Version) -> bool:
        entry = self._versions.models.get(old.model)
        if entry is None or not self._versions.is_listed(old):
            return False
        return self._swapping.is_claimed(old.model) or (entry.beside is not None and bool(entry.beside.arms))

    def _check_listed(self, old: Version) -> None:
        if not self._versions.is_listed(old):
            raise NotTaken("the version has left meanwhile")

    async def _begin(self, old: Version, build: str, weight_bytes: int) -> Version:
        plan: Plan = old.plan.borrowed()
        load = msgspec.structs.replace(plan.load, build=build)
        facts = replace(old.facts, options=replace(old.facts.options, weight_bytes=weight_bytes))
        # Its pool has the options as they are in force, its facts those that it was registered with.
        begun = replace(facts, options=replace(old.options, weight_bytes=weight_bytes), warnings=())
        try:
            new = await self._registering.begin_beside(replace(plan, facts=begun, load=load))
        except MarserveError as error:
            if error.cause == "draining":
                raise
            raise NotTaken(f"its workers cannot be started beside those that serve: {error}") from error
        new.plan = replace(plan, facts=facts, load=load)
        new.facts, new.since, new.remarks, new.optimising = facts, old.since, old.remarks, old.optimising
        return new

    async def _try(self, old: Version, new: Version, name: str) -> None:
        """Raises LoadFailed, Unfit, NotTaken, Draining."""
        if not await self._registering.wait_for_caller(new):
            raise NotTaken("it was stopped, or scaled by another call, meanwhile")
        if new.pool.warm_up_failure:
            raise Unfit(new.pool.warm_up_failure, "warm_up")
        ready = [worker for worker in new.pool.workers() if worker.status == "READY"]
        if name and any(worker.computes_on != name for worker in ready):
            said = [warning for warning in new.pool.warnings if name in warning]
            raise NotTaken(said[0] if said else f"a worker that was to serve {name} serves the parent")
        if ready and old.can_answer:
            inputs = await read_inputs(new)
            await try_out(new, inputs, await answers_of(old, inputs))

    def _follow(self, old: Version, new: Version) -> None:
        """What calls changed of the old version meanwhile is so of the new one."""
        options = old.pool.options
        new.pool.reconfigure(batch_size=options.batch_size, max_batch_delay_s=options.max_batch_delay_s)
        if (old.min_workers, old.max_workers) != (new.min_workers, new.max_workers):
            self._registering.scale(new, old.min_workers, old.max_workers)
