"""What a call would change, and whether it would be refused: the dry runs of calls for one version.

A dry run makes the checks of the call itself, by the same functions. It registers, scales, reserves and writes nothing.
Its notes say what only the call itself can find out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from marserve.errors import Draining
from marserve.pool.options import PoolOptions
from marserve.registry.catalogue.mirrors import Mirrors
from marserve.registry.catalogue.plan import Plan
from marserve.registry.catalogue.versions import Version, Versions
from marserve.registry.changes.hooks import Hooks
from marserve.registry.changes.registering import Registering, bounds_of, most_at_work
from marserve.registry.intake.plan import check_parameters
from marserve.registry.intake.registration import RegisterParameters, RegistryOptions, check_batching, check_workers

NOT_LOADED = "whether its workers can load it is not tried"


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """What a call would do. `before` and `after` have the same members, those that the call concerns.

    `memory` is that of the host, `device_memory` that of its devices, in bytes; empty without a memory ledger.
    """

    status: str
    model: str
    version: str
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    memory: Mapping[str, Any] = field(default_factory=dict)
    device_memory: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def noting(self, *notes: str) -> Rehearsed:
        """The same, with further notes."""
        return replace(self, notes=(*self.notes, *notes))

    def beside(self, other: Rehearsed) -> Rehearsed:
        """This, joined with another change that the same call would make to the same version."""
        return replace(
            other,
            status=f"{self.status}. {other.status}",
            before={**self.before, **other.before},
            after={**self.after, **other.after},
            notes=(*self.notes, *other.notes),
        )

    def document(self) -> dict[str, Any]:
        """The answer to the client."""
        return {
            "status": self.status,
            "isDryRun": True,
            "modelName": self.model,
            "modelVersion": self.version,
            "before": dict(self.before),
            "after": dict(self.after),
            **({"memory": dict(self.memory)} if self.memory else {}),
            **({"deviceMemory": dict(self.device_memory)} if self.device_memory else {}),
            **({"notes": list(self.notes)} if self.notes else {}),
        }


class Rehearsal:
    """The dry runs of one registry. Each raises what the call itself would raise, as far as that can be foreseen."""

    def __init__(
        self,
        options: RegistryOptions,
        registering: Registering,
        versions: Versions,
        mirrors: Mirrors,
        hooks: Hooks,
    ) -> None:
        self._options = options
        self._registering = registering
        self._versions = versions
        self._mirrors = mirrors
        self._hooks = hooks

    async def register(self, parameters: RegisterParameters) -> Rehearsed:
        """See `Registry.register`: the archive is fetched, unpacked, checked and deleted again."""
        check_parameters(parameters)
        if self._registering.is_draining:
            raise Draining
        unpacked = await self._registering.take_in(parameters, is_look=True)
        plan = await self._registering.plan(parameters, unpacked)
        await asyncio.to_thread(plan.discard)
        options = plan.facts.options
        self._versions.refuse_conflict(options.model, options.version)
        bounds = options.min_workers, options.max_workers
        status = f'Model "{options.model}" Version: {options.version} would be registered with {bounds[0]}'
        entry = self._versions.models.get(options.model)
        names, default = ([], None) if entry is None else (list(entry.versions), entry.default)
        before = _list(names, default, (0, 0))
        after = _list([*names, options.version], default or options.version, bounds)
        return self._arrive(f"{status} initial worker{'' if bounds[0] == 1 else 's'}", plan, before, after)

    def swap(
        self, status: str, plan: Plan, old: Version, bounds: tuple[int, int], *, unloads_first: bool, keeps_old: bool
    ) -> Rehearsed:
        """See `Registry.swap`: the plan's version in the place of a listed one, which ends before if `unloads_first`.

        `bounds` are the least and the most workers that it would have. Raises VersionConflict, NotEnoughMemory.
        """
        entry, new = self._versions.model(old.model), plan.facts.options.version
        names = list(entry.versions)
        then = [*names, new] if keeps_old else [new if name == old.name else name for name in names]
        before = _list(names, entry.default, (old.min_workers, old.max_workers))
        after = _list(then, new if entry.default == old.name else entry.default, bounds)
        return self._arrive(status, plan, before, after, old.facts.options if unloads_first else None)

    def scale(self, model: str, version: str | None, *, min_workers: int, max_workers: int) -> Rehearsed:
        """See `Registry.scale`."""
        check_workers(min_workers, max_workers)
        chosen = self._find(model, version)
        asked = min_workers, max_workers
        min_workers, max_workers = bounds_of(chosen, *asked)
        before = chosen.pool.wanted_workers
        workers = min(max(min_workers, before), most_at_work(chosen, min_workers, max_workers))
        memory, on_devices, notes = self._foresee(chosen.facts.options, before, workers) if workers > before else _NONE
        if asked != (min_workers, max_workers):
            notes = (*notes, f"it can have {max_workers} workers at most, for there are no more devices")
        if not workers and before and not chosen.facts.options.idle_timeout_s:
            notes = (*notes, "it has no worker then, and its requests are refused")
        return Rehearsed(
            f"Workers would be scaled to {min_workers} for model: {model}, version: {chosen.name}",
            model,
            chosen.name,
            {"minWorkers": chosen.min_workers, "maxWorkers": chosen.max_workers, "workers": before},
            {"minWorkers": min_workers, "maxWorkers": max_workers, "workers": workers},
            memory,
            on_devices,
            notes,
        )

    def tune(
        self, model: str, version: str | None, *, batch_size: int | None, max_batch_delay_s: float | None
    ) -> Rehearsed:
        """See `Registry.tune`. The answer has delays in milliseconds, as clients give them."""
        check_batching(batch_size, max_batch_delay_s)
        chosen = self._find(model, version)
        options = chosen.options
        size = options.batch_size if batch_size is None else batch_size
        delay_s = options.max_batch_delay_s if max_batch_delay_s is None else max_batch_delay_s
        return Rehearsed(
            f'Model "{model}" Version: {chosen.name} would form batches of up to {size}, delay {delay_s * 1000:g} ms',
            model,
            chosen.name,
            {"batchSize": options.batch_size, "maxBatchDelay": _milliseconds(options.max_batch_delay_s)},
            {"batchSize": size, "maxBatchDelay": _milliseconds(delay_s)},
        )

    def unregister(self, model: str, version: str | None = None, *, force: bool = False) -> Rehearsed:
        """See `Registry.unregister`."""
        being_installed = self._registering.installations.find(model, version)
        if being_installed and (model not in self._versions.models or version is not None):
            notes = ("its requirements are being installed, which would be given up",)
            gone: dict[str, Any] = {"versions": [], "defaultVersion": None}
            return Rehearsed(f'Model "{model}" would be unregistered', model, version or "", gone, gone, notes=notes)
        chosen = self._versions.find_leaver(model, version, force=force)
        entry = self._versions.model(model)
        left = [name for name in entry.versions if name != chosen.name]
        return Rehearsed(
            f'Model "{model}" Version: {chosen.name} would be unregistered',
            model,
            chosen.name,
            {"versions": list(entry.versions), "defaultVersion": entry.default, "labels": entry.names_of(chosen.name)},
            {"versions": left, "defaultVersion": entry.default if left else None, "labels": []},
            _freed(chosen),
            notes=tuple(self._losses(chosen, has_others=bool(left))),
        )

    def set_default(self, model: str, version: str) -> Rehearsed:
        """See `Registry.set_default`."""
        chosen = self._versions.find_named(model, version)
        entry = self._versions.model(model)
        notes = []
        if entry.rule is not None:
            notes.append("requests that name no version go by weights until these are deleted")
        if not chosen.can_answer:
            notes.append(f"version {version} has no worker that has loaded it: requests would wait, or be refused")
        return Rehearsed(
            f'Default version of model "{model}" would be "{version}"',
            model,
            version,
            {"defaultVersion": entry.default},
            {"defaultVersion": version},
            notes=tuple(notes),
        )

    # ---------------------------------------------------------------------------------------------- inside

    def _find(self, model: str, version: str | None) -> Version:
        if self._registering.is_draining:
            raise Draining
        return self._versions.find(model, version)

    def _arrive(
        self,
        status: str,
        plan: Plan,
        before: Mapping[str, Any],
        after: Mapping[str, Any],
        leaving: PoolOptions | None = None,
    ) -> Rehearsed:
        """A version of this plan, and what it would take when `leaving` has gone.

        Raises NotEnoughMemory, and VersionConflict while the requirements of a version of its name are installed.
        """
        options = plan.facts.options
        if plan.wanted is not None:
            self._registering.installations.claim(options.model, options.version).check()
        memory, on_devices, note = self._foresee(options, None, options.min_workers, leaving)
        notes = (*_installs(plan), *note, *plan.facts.warnings, *([NOT_LOADED] if options.max_workers else []))
        return Rehearsed(status, options.model, options.version, before, after, memory, on_devices, notes)

    def _foresee(
        self, options: PoolOptions, before: int | None, workers: int, leaving: PoolOptions | None = None
    ) -> tuple[Mapping[str, Any], Mapping[str, Any], tuple[str, ...]]:
        """The memory that `workers` workers would take after `leaving` has ended. Raises NotEnoughMemory."""
        if options.ray is not None:
            return {}, {}, ("its workers run on other machines, whose memory is not looked at",)
        memory = self._hooks.memory(options, before, workers, leaving)
        on_devices = self._hooks.device_memory(options, before, workers, leaving)
        waits = ("other models would make room, and it would wait until they have",)
        has_to_wait = memory.get("othersMakeRoom") or on_devices.get("othersMakeRoom")
        return memory, on_devices, waits if has_to_wait else ()

    def _losses(self, version: Version, *, has_others: bool) -> list[str]:
        """What else ends with a version."""
        pool = version.pool
        notes = []
        if accepted := pool.queued + pool.running:
            within = f"{self._options.unregister_timeout_s:g} s"
            notes.append(f"{accepted} accepted requests would be answered first, within {within}")
        shadow = self._mirrors.shadow_of(version.model)
        if shadow is not None and (shadow.spec.version == version.name or not has_others):
            notes.append(f"the shadow of the model would end: it mirrors to version {shadow.spec.version}")
        if weight := self._versions.model(version.model).weight_of(version.name):
            notes.append(f"its weight of {weight:g} would go to the others")
        if not has_others:
            notes.append("it is the model's last version: requests for the model would be refused")
        return notes


_NONE: tuple[Mapping[str, Any], Mapping[str, Any], tuple[str, ...]] = ({}, {}, ())


def _list(versions: list[str], default: str | None, workers: tuple[int, int]) -> dict[str, Any]:
    """What a dry run says of a model's versions."""
    return {"versions": versions, "defaultVersion": default, "minWorkers": workers[0], "maxWorkers": workers[1]}


def _installs(plan: Plan) -> list[str]:
    if plan.wanted is None:
        return []
    what = plan.wanted.requirements.file or "a virtual environment"
    return [f"what it requires would be installed first ({what}); whether that can be is not tried"]


def _freed(version: Version) -> dict[str, Any]:
    """The memory that would come free; empty without a memory ledger."""
    held_bytes = version.pool.held_bytes
    return {} if held_bytes is None else {"moreBytes": -held_bytes, "source": "measured"}


def _milliseconds(seconds: float) -> int | float:
    milliseconds = round(seconds * 1000, 3)
    return int(milliseconds) if milliseconds.is_integer() else milliseconds
