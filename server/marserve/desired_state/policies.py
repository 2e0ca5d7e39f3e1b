"""How clients may change models: directly; or, if a desired state decides, through it or not at all.

Surfaces (REST, gRPC) change models through a `Changes` and read them from the registry. Changes by the server itself
(workflows' nodes, autoscaling, roll-outs, new versions by a declared policy) do not pass through here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from marserve.desired_state.document import DesiredModel, DesiredState, DesiredVersion
from marserve.desired_state.reconciler import Reconciler
from marserve.errors import (
    BadInput,
    DefaultVersionInUse,
    DesiredStateDecides,
    ModelNotFound,
    VersionConflict,
    VersionInUse,
    VersionNotFound,
)
from marserve.model_options import Said, written
from marserve.registry.catalogue.traffic import Traffic, check_label
from marserve.registry.intake.registration import Registered, RegisterParameters, Scaled
from marserve.registry.models import Registry
from marserve.registry.observing.shadow import ShadowSpec
from marserve.store.addresses.pinned_digest import split_digest


class Changes(Protocol):
    """The calls that change models, as surfaces make them. Each raises what the registry's call raises.

    `takes_what_is_there`: a registration fetches from its address even if the store has a file of its name.
    """

    takes_what_is_there: bool

    def check(self, call: str) -> None:
        """Raise DesiredStateDecides if a call without a method here (such as `swap`) would change declared models."""

    def vet(self, call: str) -> list[str]:
        """Notes for the dry run of a call with a method here: where its change would go. `call` says what it would do.

        Raises DesiredStateDecides if the call itself would.
        """

    async def register(self, parameters: RegisterParameters) -> Registered:
        """See `Registry.register`."""

    async def scale(
        self, model: str, version: str | None, *, min_workers: int, max_workers: int, synchronous: bool
    ) -> Scaled:
        """See `Registry.scale`."""

    async def tune(
        self, model: str, version: str | None, *, batch_size: int | None, max_batch_delay_s: float | None
    ) -> str:
        """See `Registry.tune`."""

    async def unregister(self, model: str, version: str | None = None, *, force: bool = False) -> None:
        """See `Registry.unregister`."""

    async def set_default(self, model: str, version: str) -> None:
        """See `Registry.set_default`."""

    async def put_traffic(self, model: str, traffic: Traffic | None) -> dict[str, Any]:
        """See `TrafficControl.put`, and `reset` for None."""

    async def put_label(self, model: str, label: str, version: str) -> dict[str, Any]:
        """See `TrafficControl.put_label`."""

    async def remove_label(self, model: str, label: str) -> None:
        """See `TrafficControl.remove_label`."""

    async def put_shadow(self, model: str, shadow: ShadowSpec | None) -> dict[str, Any]:
        """See `Mirrors.put`, and `remove` for None."""


class DirectChanges:
    """Changes go to the registry, as no desired state decides."""

    takes_what_is_there = False

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def check(self, call: str) -> None:
        """Do nothing: all changes are allowed."""

    def vet(self, call: str) -> list[str]:
        """Return no notes, as no document decides."""
        return []

    async def register(self, parameters: RegisterParameters) -> Registered:
        """See `Registry.register`."""
        return await self._registry.register(parameters)

    async def scale(
        self, model: str, version: str | None, *, min_workers: int, max_workers: int, synchronous: bool
    ) -> Scaled:
        """See `Registry.scale`."""
        return await self._registry.scale(
            model, version, min_workers=min_workers, max_workers=max_workers, synchronous=synchronous
        )

    async def tune(
        self, model: str, version: str | None, *, batch_size: int | None, max_batch_delay_s: float | None
    ) -> str:
        """See `Registry.tune`."""
        return self._registry.tune(model, version, batch_size=batch_size, max_batch_delay_s=max_batch_delay_s)

    async def unregister(self, model: str, version: str | None = None, *, force: bool = False) -> None:
        """See `Registry.unregister`."""
        await self._registry.unregister(model, version, force=force)

    async def set_default(self, model: str, version: str) -> None:
        """See `Registry.set_default`."""
        self._registry.set_default(model, version)

    async def put_traffic(self, model: str, traffic: Traffic | None) -> dict[str, Any]:
        """See `TrafficControl.put`, and `reset` for None."""
        control = self._registry.traffic
        return control.reset(model) if traffic is None else control.put(model, traffic)

    async def put_label(self, model: str, label: str, version: str) -> dict[str, Any]:
        """See `TrafficControl.put_label`."""
        return self._registry.traffic.put_label(model, label, version)

    async def remove_label(self, model: str, label: str) -> None:
        """See `TrafficControl.remove_label`."""
        self._registry.traffic.remove_label(model, label)

    async def put_shadow(self, model: str, shadow: ShadowSpec | None) -> dict[str, Any]:
        """See `Mirrors.put`, and `remove` for None."""
        mirrors = self._registry.mirrors
        return mirrors.remove(model) if shadow is None else mirrors.put(model, shadow)


class RefusedChanges:
    """Refuses every change, as a desired state decides; the error says what to do instead."""

    takes_what_is_there = False

    def __init__(self, where: str) -> None:
        """`where` is the document's name for people."""
        self._where = where

    def _refuse(self, what: str) -> DesiredStateDecides:
        return DesiredStateDecides(
            self._where,
            f"To {what}, edit a copy of the document and run `marserve apply FILE`; with desired_state_changes=adopt "
            "such calls are written into it.",
        )

    def check(self, call: str) -> None:
        """Refuse."""
        raise self._refuse(call)

    def vet(self, call: str) -> list[str]:
        """Refuse."""
        raise self._refuse(call)

    async def register(self, parameters: RegisterParameters) -> Registered:
        """Refuse."""
        raise self._refuse("register a model")

    async def scale(
        self, model: str, version: str | None, *, min_workers: int, max_workers: int, synchronous: bool
    ) -> Scaled:
        """Refuse."""
        raise self._refuse("scale a model")

    async def tune(
        self, model: str, version: str | None, *, batch_size: int | None, max_batch_delay_s: float | None
    ) -> str:
        """Refuse."""
        raise self._refuse("change batches")

    async def unregister(self, model: str, version: str | None = None, *, force: bool = False) -> None:
        """Refuse."""
        raise self._refuse("unregister a model")

    async def set_default(self, model: str, version: str) -> None:
        """Refuse."""
        raise self._refuse("set the default version")

    async def put_traffic(self, model: str, traffic: Traffic | None) -> dict[str, Any]:
        """Refuse."""
        raise self._refuse("change traffic")

    async def put_label(self, model: str, label: str, version: str) -> dict[str, Any]:
        """Refuse."""
        raise self._refuse("set a label")

    async def remove_label(self, model: str, label: str) -> None:
        """Refuse."""
        raise self._refuse("remove a label")

    async def put_shadow(self, model: str, shadow: ShadowSpec | None) -> dict[str, Any]:
        """Refuse."""
        raise self._refuse("change a shadow")


class AdoptedChanges:
    """Writes the changes of calls into the desired state's document by compare-and-swap, and applies it."""

    takes_what_is_there = True  # so does the document

    def __init__(self, registry: Registry, reconciler: Reconciler) -> None:
        self._registry = registry
        self._reconciler = reconciler

    def check(self, call: str) -> None:
        """Refuse a call that would change declared models without changing the document."""
        place = self._reconciler.place
        raise DesiredStateDecides(
            place.shown if place is not None else "the desired state",
            f"To {call} is more than a document can say: it has versions, and not how they are tried first. Register "
            "the new version and make it the default, both of which is written into it, or run `marserve apply FILE`.",
        )

    def vet(self, call: str) -> list[str]:
        """Note that the change would be written into the document."""
        place = self._reconciler.place
        return [f"it would be written into {place.shown}, and applied from there"] if place is not None else []

    async def register(self, parameters: RegisterParameters) -> Registered:
        """See `Registry.register`. The archive is read first, as it says which version it is."""
        async with self._registry.looking_into(parameters) as (model, name):
            version = _declared(parameters)

            def add(state: DesiredState) -> DesiredState:
                found = state.models.get(model)
                if found is None:
                    return _with(state, model, DesiredModel({name: version}, name))
                if name in found.versions:
                    raise VersionConflict(model, name)
                return _with(state, model, replace(found, versions={**found.versions, name: version}))

            await self._reconciler.change(add, f"registered {model} {name}")
        described = self._registry.describe(model, name)
        return Registered(model, name, described["minWorkers"], "done")

    async def scale(
        self, model: str, version: str | None, *, min_workers: int, max_workers: int, synchronous: bool
    ) -> Scaled:
        """See `Registry.scale`."""
        if max_workers < min_workers:
            raise BadInput("max_worker cannot be less than min_worker.")
        await self._configure(model, version, {"minWorkers": min_workers, "maxWorkers": max_workers}, "scaled")
        return Scaled(model, version, min_workers, "done")

    async def tune(
        self, model: str, version: str | None, *, batch_size: int | None, max_batch_delay_s: float | None
    ) -> str:
        """See `Registry.tune`."""
        given = written(Said({"batch_size": batch_size, "max_batch_delay_s": max_batch_delay_s}))
        await self._configure(model, version, given, "tuned")
        # With the values in force it changes nothing and returns the sentence.
        return self._registry.tune(model, version, batch_size=batch_size, max_batch_delay_s=max_batch_delay_s)

    async def _configure(self, model: str, version: str | None, values: Mapping[str, Any], what: str) -> None:
        name = self._registry.name_of(model, version)

        def configure(state: DesiredState) -> DesiredState:
            found = _model(state, model)
            if name not in found.versions:
                raise VersionNotFound(model, name)
            changed = found.versions[name]
            changed = replace(changed, config={**changed.config, **values})
            return _with(state, model, replace(found, versions={**found.versions, name: changed}))

        await self._reconciler.change(configure, f"{what} {model} {name}")

    async def unregister(self, model: str, version: str | None = None, *, force: bool = False) -> None:
        """See `Registry.unregister`."""
        name = self._registry.name_of(model, version)
        if version not in (None, name):  # a label is not enough
            raise VersionNotFound(model, version)

        def remove(state: DesiredState) -> DesiredState:
            found = _model(state, model)
            if name not in found.versions:
                raise VersionNotFound(model, name)
            versions = {each: wanted for each, wanted in found.versions.items() if each != name}
            if not versions:
                return _with(state, model, None)
            if found.default == name:
                raise DefaultVersionInUse(model)
            labels = {label: target for label, target in found.labels.items() if target != name}
            weights = dict((found.traffic or {}).get("weights", {}))
            held = [label for label in found.labels if label not in labels]
            if (held or weights.get(name)) and not force:
                raise VersionInUse(model, name, has_weight=bool(weights.get(name)), labels=held)
            weights.pop(name, None)
            traffic = {**(found.traffic or {}), "weights": weights} if any(weights.values()) else None
            shadow = found.shadow if (found.shadow or {}).get("version") != name else None
            return _with(
                state,
                model,
                replace(found, versions=versions, labels=labels, traffic=traffic, shadow=shadow),
            )

        await self._reconciler.change(remove, f"unregistered {model} {name}")

    async def set_default(self, model: str, version: str) -> None:
        """See `Registry.set_default`."""
        await self._edit(model, version, lambda found: replace(found, default=version), "default")

    async def put_traffic(self, model: str, traffic: Traffic | None) -> dict[str, Any]:
        """See `TrafficControl.put`, and `reset` for None."""
        if traffic is not None:
            self._registry.traffic.put(model, traffic, dry_run=True)
        told = None if traffic is None else traffic.document()
        await self._edit(model, None, lambda found: replace(found, traffic=told), "traffic")
        return self._registry.traffic.describe(model)

    async def put_label(self, model: str, label: str, version: str) -> dict[str, Any]:
        """See `TrafficControl.put_label`."""
        check_label(label)
        told = self._registry.traffic.put_label(model, label, version, dry_run=True)
        await self._edit(
            model, version, lambda found: replace(found, labels={**found.labels, label: version}), f"label {label}"
        )
        now: dict[str, Any] = self._registry.traffic.labels(model).get(label, told)
        return now

    async def remove_label(self, model: str, label: str) -> None:
        """See `TrafficControl.remove_label`."""
        self._registry.traffic.remove_label(model, label, dry_run=True)
        await self._edit(
            model,
            None,
            lambda found: replace(found, labels={each: to for each, to in found.labels.items() if each != label}),
            f"label {label}",
        )

    async def put_shadow(self, model: str, shadow: ShadowSpec | None) -> dict[str, Any]:
        """See `Mirrors.put`, and `remove` for None."""
        mirrors = self._registry.mirrors
        if shadow is None:
            told = mirrors.remove(model, dry_run=True)
            await self._edit(model, None, lambda found: replace(found, shadow=None), "shadow")
            return told
        mirrors.put(model, shadow, dry_run=True)
        document = shadow.document()
        await self._edit(model, shadow.version, lambda found: replace(found, shadow=document), "shadow")
        return mirrors.describe(model)

    async def _edit(
        self, model: str, version: str | None, change: Callable[[DesiredModel], DesiredModel], what: str
    ) -> None:
        def edit(state: DesiredState) -> DesiredState:
            found = _model(state, model)
            if version is not None and version not in found.versions:
                raise VersionNotFound(model, version)
            return _with(state, model, change(found))

        await self._reconciler.change(edit, f"{what} of {model}")


def _declared(parameters: RegisterParameters) -> DesiredVersion:
    """The declaration of a version with these parameters."""
    url, sha256 = split_digest(parameters.url)
    return DesiredVersion(url, sha256, parameters.handler, parameters.runtime, written(parameters.said))


def _model(state: DesiredState, model: str) -> DesiredModel:
    found = state.models.get(model)
    if found is None:
        raise ModelNotFound(model)
    return found


def _with(state: DesiredState, model: str, wanted: DesiredModel | None) -> DesiredState:
    models = {name: each for name, each in state.models.items() if name != model}
    return replace(state, models=models if wanted is None else {**models, model: wanted})
