"""How clients may change models: directly; or, if a desired state decides, through it or not at all.

Surfaces (REST, gRPC) change models through `Changes` and read them from the registry. Changes by the server itself
(workflows' nodes, autoscaling, roll-outs, new versions by a declared policy) do not pass through here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

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
from marserve.registry.catalogue.traffic import Traffic
from marserve.registry.intake.registration import CopyParameters, Registered, RegisterParameters, Scaled
from marserve.registry.models import Registry
from marserve.registry.observing.shadow_spec import ShadowSpec
from marserve.store.addresses.pinned_digest import split_digest


class Changes:
    """The calls that change models, as surfaces make them. Each raises what the registry's call raises.

    They go to the registry. With `refused_by`, the name of a desired state for people, they are refused. With `adopts`
    they are written into the desired state's document by compare-and-swap, and applied from there.
    """

    def __init__(self, registry: Registry, *, refused_by: str | None = None, adopts: Reconciler | None = None) -> None:
        self._registry = registry
        self._refused_by = refused_by
        self._reconciler = adopts

    @property
    def takes_what_is_there(self) -> bool:
        """Whether a registration fetches from its address even if the store has a file of its name, as documents do."""
        return self._reconciler is not None

    def check(self, call: str) -> None:
        """Raise DesiredStateDecides if a call without a method here (such as `swap`) would change declared models."""
        if self._reconciler is None:
            self.vet(call)
            return
        place = self._reconciler.place
        raise DesiredStateDecides(
            place.shown if place is not None else "the desired state",
            f"To {call} is more than a document can say: it has versions, and not how they are tried first. Register "
            "the new version and make it the default, both of which is written into it, or run `marserve apply FILE`.",
        )

    def vet(self, call: str) -> list[str]:
        """Notes for the dry run of a call with a method here: where its change would go. `call` says what it would do.

        Raises DesiredStateDecides if the call itself would.
        """
        if self._refused_by is not None:
            raise DesiredStateDecides(
                self._refused_by,
                f"To {call}, edit a copy of the document and run `marserve apply FILE`; with "
                "desired_state_changes=adopt such calls are written into it.",
            )
        place = None if self._reconciler is None else self._reconciler.place
        return [] if place is None else [f"it would be written into {place.shown}, and applied from there"]

    async def register(self, parameters: RegisterParameters) -> Registered:
        """See `Registry.register`. A document needs the version's name, so the archive is read first."""
        self.vet("register a model")
        if self._reconciler is None:
            return await self._registry.register(parameters)
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

    async def copy(self, wish: CopyParameters) -> Registered:
        """See `Registry.copy`. Taken whoever decides: a copy is of no document, as are the calls that change it."""
        return await self._registry.copy(wish)

    async def scale(
        self, model: str, version: str | None, *, min_workers: int, max_workers: int, synchronous: bool
    ) -> Scaled:
        """See `Registry.scale`."""
        is_copy = self._registry.is_copy(model)
        if not is_copy:
            self.vet("scale a model")
        if self._reconciler is None or is_copy:
            return await self._registry.scale(
                model, version, min_workers=min_workers, max_workers=max_workers, synchronous=synchronous
            )
        if max_workers < min_workers:
            raise BadInput("max_worker cannot be less than min_worker.")
        await self._configure(model, version, {"minWorkers": min_workers, "maxWorkers": max_workers}, "scaled")
        return Scaled(model, version, min_workers, "done")

    async def tune(
        self, model: str, version: str | None, *, batch_size: int | None, max_batch_delay_s: float | None
    ) -> str:
        """See `Registry.tune`."""
        is_copy = self._registry.is_copy(model)
        if not is_copy:
            self.vet("change batches")
        if self._reconciler is not None and not is_copy:
            given = written(Said({"batch_size": batch_size, "max_batch_delay_s": max_batch_delay_s}))
            await self._configure(model, version, given, "tuned")
        # With the values in force it changes nothing and returns the sentence.
        return self._registry.tune(model, version, batch_size=batch_size, max_batch_delay_s=max_batch_delay_s)

    async def unregister(self, model: str, version: str | None = None, *, force: bool = False) -> None:
        """See `Registry.unregister`."""
        is_copy = self._registry.is_copy(model)
        if not is_copy:
            self.vet("unregister a model")
        if not force:
            self._registry.check_is_no_node(model, version)
        if self._reconciler is None or is_copy:
            await self._registry.unregister(model, version, force=force)
            return
        name = self._registry.name_of(model, version)
        if version not in (None, name):  # a label is not enough
            raise VersionNotFound(model, version)

        def remove(found: DesiredModel) -> DesiredModel | None:
            versions = {each: wanted for each, wanted in found.versions.items() if each != name}
            if not versions:
                return None
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
            return replace(found, versions=versions, labels=labels, traffic=traffic, shadow=shadow)

        await self._edit(model, name, f"unregistered {model} {name}", remove)

    async def set_default(self, model: str, version: str) -> None:
        """See `Registry.set_default`."""
        self.vet("set the default version")
        if self._reconciler is None:
            self._registry.set_default(model, version)
        else:
            await self._edit(model, version, f"default of {model}", lambda found: replace(found, default=version))

    async def put_traffic(self, model: str, traffic: Traffic | None, *, dry_run: bool = False) -> dict[str, Any]:
        """See `TrafficControl.put`, and `reset` for None."""
        self.vet("change traffic")
        control, looks = self._registry.traffic, self._only_looks(dry_run)
        shown = control.reset(model, dry_run=looks) if traffic is None else control.put(model, traffic, dry_run=looks)
        if dry_run or self._reconciler is None:
            return shown
        document = None if traffic is None else traffic.document()
        await self._edit(model, None, f"traffic of {model}", lambda found: replace(found, traffic=document))
        return control.describe(model)

    async def put_label(self, model: str, label: str, version: str, *, dry_run: bool = False) -> dict[str, Any]:
        """See `TrafficControl.put_label`."""
        self.vet("set a label")
        control = self._registry.traffic
        shown = control.put_label(model, label, version, dry_run=self._only_looks(dry_run))
        if dry_run or self._reconciler is None:
            return shown
        await self._edit(
            model,
            version,
            f"label {label} of {model}",
            lambda found: replace(found, labels={**found.labels, label: version}),
        )
        now: dict[str, Any] = control.labels(model).get(label, shown)
        return now

    async def remove_label(self, model: str, label: str, *, dry_run: bool = False) -> None:
        """See `TrafficControl.remove_label`."""
        self.vet("remove a label")
        self._registry.traffic.remove_label(model, label, dry_run=self._only_looks(dry_run))
        if dry_run or self._reconciler is None:
            return
        await self._edit(
            model,
            None,
            f"label {label} of {model}",
            lambda found: replace(found, labels={each: to for each, to in found.labels.items() if each != label}),
        )

    async def put_shadow(self, model: str, shadow: ShadowSpec | None, *, dry_run: bool = False) -> dict[str, Any]:
        """See `Mirrors.put`, and `remove` for None."""
        self.vet("change a shadow")
        mirrors, looks = self._registry.mirrors, self._only_looks(dry_run)
        shown = mirrors.remove(model, dry_run=looks) if shadow is None else mirrors.put(model, shadow, dry_run=looks)
        if dry_run or self._reconciler is None:
            return shown
        version, document = (None, None) if shadow is None else (shadow.version, shadow.document())
        await self._edit(model, version, f"shadow of {model}", lambda found: replace(found, shadow=document))
        return shown if shadow is None else mirrors.describe(model)

    # ---------------------------------------------------------------------------------------------- the document

    def _only_looks(self, dry_run: bool) -> bool:
        """Whether the registry only checks a change: in a dry run, and if the change is made through the document."""
        return dry_run or self._reconciler is not None

    async def _configure(self, model: str, version: str | None, values: Mapping[str, Any], what: str) -> None:
        name = self._registry.name_of(model, version)

        def configure(found: DesiredModel) -> DesiredModel:
            changed = found.versions[name]
            changed = replace(changed, config={**changed.config, **values})
            return replace(found, versions={**found.versions, name: changed})

        await self._edit(model, name, f"{what} {model} {name}", configure)

    async def _edit(
        self, model: str, version: str | None, what: str, change: Callable[[DesiredModel], DesiredModel | None]
    ) -> None:
        """Change a model in the document; None removes it. Raises ModelNotFound, VersionNotFound."""

        def edit(state: DesiredState) -> DesiredState:
            found = state.models.get(model)
            if found is None:
                raise ModelNotFound(model)
            if version is not None and version not in found.versions:
                raise VersionNotFound(model, version)
            return _with(state, model, change(found))

        assert self._reconciler is not None
        await self._reconciler.change(edit, what)


def _declared(parameters: RegisterParameters) -> DesiredVersion:
    """The declaration of a version with these parameters."""
    url, sha256 = split_digest(parameters.url)
    return DesiredVersion(url, sha256, parameters.handler, parameters.runtime, written(parameters.said))


def _with(state: DesiredState, model: str, wanted: DesiredModel | None) -> DesiredState:
    models = {name: each for name, each in state.models.items() if name != model}
    return replace(state, models=models if wanted is None else {**models, model: wanted})
