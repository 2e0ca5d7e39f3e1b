"""Replaces a version that serves by that of another archive.

    load_first     load the new one beside, try it, switch between two awaits, let the old one finish and end it
    unload_first   let the old one finish and end it, load the new one in its memory; requests wait, or are refused,
                   in between

If the new version cannot load or fails its trial, the old one goes on (`load_first`) or is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from marserve.errors import (
    BadInput,
    Draining,
    LoadFailed,
    MarserveError,
    NotEnoughMemory,
    SwapFailed,
    SwapUnderWay,
    VersionNotFound,
)
from marserve.messages import Answer, Part
from marserve.registry.catalogue.plan import Plan, Unpacked
from marserve.registry.catalogue.versions import Version, Versions
from marserve.registry.changes.dry_run import Rehearsal, Rehearsed
from marserve.registry.changes.registering import Registering, log_failure
from marserve.registry.changes.trial import NO_SAMPLES, Unfit, answers_of, read_inputs, try_out
from marserve.registry.intake.plan import check_parameters
from marserve.registry.intake.registration import RegisterParameters

log = logging.getLogger("marserve.registry")

SwapOrder = Literal["load_first", "unload_first"]


@dataclass(frozen=True, slots=True)
class SwapParameters:
    """The parameters of a swap. `registration` is that of the new version; `model` takes the place of its model name.

    `version` is the old version: None for the one with the version of the archive, or if that is not registered the
    default one. With `keeps_old` the old one stays registered, so the two need different names. With `checks` the new
    one is tried before it takes requests. `dry_run` checks the archive and changes nothing.
    """

    model: str
    registration: RegisterParameters
    version: str | None = None
    order: SwapOrder | None = None
    keeps_old: bool = False
    checks: bool = True
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class Swapped:
    """A swap, or with `rehearsed` its dry run. `notes` are sentences about what could not be checked.

    Times in seconds.
    """

    model: str
    version: str
    old: str
    order: SwapOrder
    workers: int
    is_dry: bool = False
    keeps_old: bool = False
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    rehearsed: Rehearsed | None = None

    @property
    def message(self) -> str:
        """The sentence that the client gets."""
        verb = "would take" if self.is_dry else "has taken"
        kept = ", which stays registered" if self.keeps_old else ""
        return f'Model "{self.model}" Version: {self.version} {verb} the place of version {self.old}{kept}'


class Swapping:
    """The swaps of one registry; one at a time for each model."""

    def __init__(
        self,
        registering: Registering,
        versions: Versions,
        rehearsal: Rehearsal,
        *,
        order: SwapOrder,
        note_change: Callable[[Version], None],
    ) -> None:
        """`order` is for swaps that name none."""
        self._registering = registering
        self._versions = versions
        self._rehearsal = rehearsal
        self._order: SwapOrder = order
        self._note_change = note_change
        self._under_way: set[str] = set()

    async def swap(self, wish: SwapParameters, unpacked: Unpacked | None = None) -> Swapped:
        """Replace a version by that of the archive. See `Registry.swap`."""
        began = time.monotonic()
        model = wish.model
        self._versions.model(model)
        if wish.version is not None:
            self._listed(model, wish.version)
        check_parameters(wish.registration)
        if wish.dry_run:  # a dry run does not hold up other swaps of the model
            swapped = await self._swap(wish, unpacked)
        else:
            with self.claim(model):
                swapped = await self._swap(wish, unpacked)
        return replace(swapped, seconds=round(time.monotonic() - began, 3))

    def is_claimed(self, model: str) -> bool:
        """Whether a version of the model is being replaced."""
        return model in self._under_way

    @contextlib.contextmanager
    def claim(self, model: str) -> Iterator[None]:
        """During the block no other swap of the model begins. Raises SwapUnderWay."""
        if model in self._under_way:
            raise SwapUnderWay(model)
        self._under_way.add(model)
        try:
            yield
        finally:
            self._under_way.discard(model)

    async def _swap(self, wish: SwapParameters, unpacked: Unpacked | None) -> Swapped:
        if unpacked is None:
            named = replace(wish.registration, model_name=wish.model, freshness="now")
            unpacked = await self._registering.take_in(named, is_look=wish.dry_run)
        try:
            old = self._find_old(wish, unpacked)
            parameters = replace(wish.registration, model_name=wish.model, synchronous=True)
            if parameters.initial_workers is None:
                # A swap changes the archive; the number of workers, which the operator chose, stays.
                parameters = replace(parameters, initial_workers=max(1, old.min_workers))
            elif parameters.initial_workers < 1:
                raise BadInput("initial_workers must be 1 or more: a version without workers cannot be tried.")
        except BaseException:
            await asyncio.to_thread(unpacked.discard)
            raise
        plan = await self._registering.plan(parameters, unpacked)
        order, name = wish.order or self._order, plan.facts.options.version
        notes = () if plan.facts.options.samples or not wish.checks else (NO_SAMPLES,)
        swapped = Swapped(
            wish.model, name, old.name, order, plan.facts.options.min_workers, wish.dry_run, wish.keeps_old, notes=notes
        )
        try:
            self._check_names(wish, old, name)
        except BaseException:
            await asyncio.to_thread(plan.discard)
            raise
        if wish.dry_run:
            await asyncio.to_thread(plan.discard)
            return self._rehearse(wish, swapped, plan, old)
        swap = self._load_first if order == "load_first" else self._unload_first
        new = await swap(wish, parameters, plan, old)
        log.info("Model %s: version %s has taken the place of version %s", wish.model, new.name, old.name)
        return replace(swapped, workers=new.min_workers)

    def _rehearse(self, wish: SwapParameters, swapped: Swapped, plan: Plan, old: Version) -> Swapped:
        """The dry run of a swap. Raises what the swap would raise, as far as that can be foreseen."""
        bounds = _bounds_of(wish, plan, old)
        unloads_first = swapped.order == "unload_first"
        try:
            foreseen = self._rehearsal.swap(
                swapped.message, plan, old, bounds, unloads_first=unloads_first, keeps_old=wish.keeps_old
            )
        except NotEnoughMemory as error:
            if unloads_first:
                raise
            raise _no_room_beside(error, plan, old) from error
        foreseen = replace(foreseen, notes=(*swapped.notes, *foreseen.notes))
        return replace(swapped, workers=bounds[0], notes=foreseen.notes, rehearsed=foreseen)

    def _find_old(self, wish: SwapParameters, unpacked: Unpacked) -> Version:
        entry = self._versions.model(wish.model)
        if wish.version is not None:
            return self._listed(wish.model, wish.version)
        name = unpacked.manifest.model_version or "1.0"
        return entry.versions[name if name in entry.versions else entry.default]

    def _listed(self, model: str, name: str) -> Version:
        """The version of this name; labels are not swapped."""
        entry = self._versions.model(model)
        version = entry.versions.get(name)
        if version is None:
            raise VersionNotFound(model, name, known=tuple(entry.versions))
        return version

    def _check_names(self, wish: SwapParameters, old: Version, name: str) -> None:
        if name != old.name:
            self._versions.refuse_conflict(wish.model, name)
        elif wish.keeps_old:
            raise BadInput(
                f"keep_old cannot be done: the archive is version {name} as the one whose place it takes; give it "
                "another version, or leave keep_old out."
            )
        if wish.keeps_old and (wish.order or self._order) == "unload_first":
            raise BadInput("keep_old and order=unload_first contradict each other; leave one out.")

    # ---------------------------------------------------------------------------------------------- load first

    async def _load_first(
        self, wish: SwapParameters, parameters: RegisterParameters, plan: Plan, old: Version
    ) -> Version:
        try:
            new = await self._registering.establish(parameters, plan, is_beside=True)
        except NotEnoughMemory as error:
            raise _no_room_beside(error, plan, old) from error
        try:
            await self._wait_until_ready(new, old)
            if wish.checks:
                inputs = await read_inputs(new)
                before = await answers_of(old, inputs) if old.can_answer else []
                await try_out(new, inputs, before)
            self._switch(wish, old, new)
        except BaseException as error:
            await self._registering.end(new, drain_s=0.0)
            raise self._explain(error, new, old) from error
        self._follow_size(wish, new, old)
        if not wish.keeps_old:
            await self._registering.end(old)
        return new

    def _switch(self, wish: SwapParameters, old: Version, new: Version) -> None:
        """Give requests from now on to the new version; awaits nothing. Raises if the old one has left the list."""
        if self._registering.is_draining:
            raise Draining
        if not self._versions.is_listed(old):
            raise VersionNotFound(
                wish.model, old.name, f"Version {old.name} of model {wish.model} went while it was being swapped."
            )
        self._check_names(wish, old, new.name)
        self._registering.replace(old, new, keeps_old=wish.keeps_old)
        self._note_change(new)

    # ---------------------------------------------------------------------------------------------- unload first

    async def _unload_first(
        self, wish: SwapParameters, parameters: RegisterParameters, plan: Plan, old: Version
    ) -> Version:
        new = await self._registering.prepare_idle(parameters, plan)
        try:
            inputs, before = await self._learn(wish, new, old)
            self._switch(wish, old, new)
        except BaseException as error:
            await self._registering.end(new, drain_s=0.0)
            raise self._explain(error, new, old) from error
        # The files and the name of the old version stay until the new one has succeeded.
        kept = old.plan
        old.plan = kept.borrowed()
        name = old.model, old.name
        if old.name != new.name:
            self._versions.held.add(name)
        try:
            await self._registering.end(old)
            await self._registering.ask_hooks(new.plan)
            if self._registering.is_draining:
                raise Draining
            self._registering.begin_idle(new, new.min_workers, new.max_workers)
            await self._wait_until_ready(new, old)
            if wish.checks:
                await try_out(new, inputs, before)
        except BaseException as error:
            await self._bring_back(kept, old, new)
            raise self._explain(error, new, old) from error
        finally:
            self._versions.held.discard(name)
        await asyncio.to_thread(kept.discard)
        self._follow_size(wish, new, old)
        return new

    async def _learn(
        self, wish: SwapParameters, new: Version, old: Version
    ) -> tuple[Sequence[list[Part]], Sequence[Answer | None]]:
        """The new version's samples, and the answers of the old one to them, if it can answer."""
        inputs = await read_inputs(new) if wish.checks else []
        return inputs, await answers_of(old, inputs) if old.can_answer else []

    async def _bring_back(self, kept: Plan, old: Version, new: Version) -> None:
        """Have the old version serve again, from its files."""
        if self._registering.is_draining or not self._versions.is_listed(new):
            await self._registering.end(new, drain_s=0.0)
            await asyncio.to_thread(kept.discard)
            return
        again = self._registering.make_idle(kept)
        again.remarks = old.remarks
        self._registering.replace(new, again)
        await self._registering.end(new, drain_s=0.0)
        try:
            self._registering.begin_idle(again, old.min_workers, old.max_workers)
        except NotEnoughMemory as error:  # other models took the memory that the new one gave back
            log.error("Model %s version %s has no workers: %s", again.model, again.name, error)
        self._note_change(again)
        try:
            await self._registering.wait_until_ready(again)
        except LoadFailed as error:
            log_failure(again, error)

    # ---------------------------------------------------------------------------------------------- both

    async def _wait_until_ready(self, new: Version, old: Version) -> None:
        if not await self._registering.wait_until_ready(new):
            raise LoadFailed(new.model, new.name, reason="it was stopped, or scaled by another call, meanwhile")
        if new.pool.warm_up_failure:
            raise Unfit(new.pool.warm_up_failure, "warm_up")

    def _follow_size(self, wish: SwapParameters, new: Version, old: Version) -> None:
        """Give the new version the old one's bounds, unless its archive or the call has bounds."""
        bounds = _bounds_of(wish, new.plan, old)
        if bounds != (new.min_workers, new.max_workers):
            self._registering.scale(new, *bounds)
            self._note_change(new)

    def _explain(self, error: BaseException, new: Version, old: Version) -> BaseException:
        """The error for the caller: that the old version goes on, and why the new one was not taken."""
        if isinstance(error, Unfit):
            log.error("Model %s version %s was not taken: %s", new.model, new.name, error)
            return SwapFailed(new.model, new.name, old.name, str(error), cause=error.cause)
        if isinstance(error, LoadFailed):
            log_failure(new, error)
            cause = "out_of_memory" if error.out_of_memory else error.cause or ""
            why = "its workers could not load it"
            return SwapFailed(new.model, new.name, old.name, why, reason=error.reason, cause=cause)
        if isinstance(error, MarserveError):
            log.error("Model %s version %s was not taken: %s", new.model, new.name, error)
        return error


def _bounds_of(wish: SwapParameters, plan: Plan, old: Version) -> tuple[int, int]:
    """The least and the most workers of the new version: the old one's, unless its archive or the call has bounds."""
    options = plan.facts.options
    has_none = wish.registration.initial_workers is None and plan.facts.config.max_workers is None
    if has_none and old.max_workers:
        return old.min_workers, max(old.max_workers, options.min_workers)
    return options.min_workers, options.max_workers


def _no_room_beside(error: NotEnoughMemory, plan: Plan, old: Version) -> SwapFailed:
    why = f"{error} With order=unload_first it would load where version {old.name} is now."
    return SwapFailed(old.model, plan.facts.options.version, old.name, why, cause=error.cause or "")
