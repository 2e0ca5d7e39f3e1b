"""The steps from the models that a server has to those that it is to have, without a gap in service. Pure.

The steps of one change stand in four phases, and each phase ends before the next begins:

    load      new versions load beside those that serve; versions that get more workers begin to start them
    ready     all of them become ready; until here everything can be undone, and no client has noticed
    switch    between two awaits: new versions take requests, replaced and removed ones get none; defaults, labels,
              weights, shadows and batch options change
    retire    versions off the list answer what they had accepted, and end; versions that get fewer workers end some

A version whose source, handler, runtime or configuration changes is replaced as a whole; the number of its workers and
its batch options change in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from marserve.desired_state.document import DesiredModel, DesiredState, DesiredVersion
from marserve.model_options import IN_PLACE
from marserve.registry.changes.actual import ActualModel, ActualState, ActualVersion

Kind = Literal[
    "load", "scale-up", "wait-ready", "switch", "tune", "default", "labels", "traffic", "shadow", "scale-down", "unload"
]
Phase = Literal["load", "ready", "switch", "retire"]

PHASES: Mapping[Kind, Phase] = {
    "load": "load",
    "scale-up": "load",
    "wait-ready": "ready",
    "switch": "switch",
    "tune": "switch",
    "default": "switch",
    "labels": "switch",
    "traffic": "switch",
    "shadow": "switch",
    "scale-down": "retire",
    "unload": "retire",
}
_ORDER: Mapping[Phase, int] = {"load": 0, "ready": 1, "switch": 2, "retire": 3}


@dataclass(frozen=True, slots=True)
class Step:
    """One step. `version` is None for a step of the model as a whole; `detail` says what changes.

    `before` and `after` are the values behind the detail: worker bounds, options, a target. `memory_bytes` is the
    estimate of the memory that it takes (below 0: gives back), None if unknown. `replaces`: a version of the same name
    serves; `replaced`: it is that one.
    """

    kind: Kind
    model: str
    version: str | None = None
    detail: str = ""
    before: Any = None
    after: Any = None
    replaces: bool = False
    replaced: bool = False
    memory_bytes: int | None = None
    is_loaded: bool = False

    @property
    def phase(self) -> Phase:
        """The phase in which it happens."""
        return PHASES[self.kind]

    def document(self) -> dict[str, Any]:
        """The step in the answer to a client."""
        members: dict[str, Any] = {"step": self.kind, "phase": self.phase, "model": self.model}
        if self.version is not None:
            members["version"] = self.version
        if self.detail:
            members["detail"] = self.detail
        if self.is_loaded:
            members["isLoaded"] = True
        if self.memory_bytes is not None:
            members["memoryBytes"] = self.memory_bytes
        return members


@dataclass(frozen=True, slots=True)
class Diff:
    """The steps, in order. `kept` are versions that no document names and that came by a policy: they stay.

    Unloaded versions end after `undo_window_s`. `unnamed` are versions that would be unloaded and came by a call, on a
    server where no document decides: unloading them needs consent. `adopted` are those that were added to the document.
    `problems` are sentences about archives that are not available now: applying the document would fail.
    """

    steps: tuple[Step, ...] = ()
    kept: tuple[tuple[str, str], ...] = ()
    unnamed: tuple[tuple[str, str], ...] = ()
    adopted: tuple[tuple[str, str], ...] = ()
    undo_window_s: float = 0.0
    problems: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not self.steps

    def of(self, *kinds: Kind) -> list[Step]:
        """The steps of these kinds, in order."""
        return [step for step in self.steps if step.kind in kinds]

    def with_costs(self, costs: Sequence[int | None]) -> Diff:
        """The same, with the memory that each step takes."""
        steps = (replace(step, memory_bytes=cost) for step, cost in zip(self.steps, costs, strict=True))
        return replace(self, steps=tuple(steps))


def compare(actual: ActualState, desired: DesiredState) -> Diff:
    """The steps from `actual` to `desired`. States with the same meaning give an empty diff."""
    steps: list[Step] = []
    kept: list[tuple[str, str]] = []
    for name in sorted({*actual, *desired.models}):
        have, want = actual.get(name), desired.models.get(name)
        stays = set(_arrived(name, have, want, desired)) if have is not None else set()
        kept += [(name, version) for version in sorted(stays)]
        if want is not None:
            steps += _to_have(name, have, want, stays)
        elif have is not None:
            steps += [_unload(name, version) for version in sorted(have.versions) if version not in stays]
    steps.sort(key=lambda step: _ORDER[step.phase])
    return Diff(tuple(steps), tuple(kept))


def _arrived(name: str, have: ActualModel, want: DesiredModel | None, desired: DesiredState) -> Iterator[str]:
    """Versions that no document names but that came by the policy of a declared prefix; they are not drift."""
    prefixes = [each.prefix for model, each in desired.policies() if model in (None, name) and each.policy != "ignore"]
    named = want.versions if want is not None else {}
    for version, found in have.versions.items():
        if version not in named and any(found.source.startswith(prefix) for prefix in prefixes):
            yield version


def _to_have(name: str, have: ActualModel | None, want: DesiredModel, stays: set[str]) -> Iterator[Step]:
    old = have.versions if have is not None else {}
    for version, wanted in sorted(want.versions.items()):
        found = old.get(version)
        if found is None or _must_replace(found, wanted):
            yield Step("load", name, version, wanted.shown, after=wanted, replaces=found is not None)
            yield Step("wait-ready", name, version)
            yield Step("switch", name, version, "takes the place of the one before" if found else "takes requests")
            if found is not None:
                yield _unload(name, version, "the one before", replaced=True)
        else:
            yield from _in_place(name, version, found, wanted)
    for version in sorted(old):
        if version not in want.versions and version not in stays:
            yield _unload(name, version)
    yield from _traffic(name, have, want, stays)


def _unload(model: str, version: str, which: str = "", *, replaced: bool = False) -> Step:
    return Step("unload", model, version, which, replaced=replaced)


def _must_replace(found: ActualVersion, wanted: DesiredVersion) -> bool:
    """Whether an option differs that is read at a worker's start."""
    if found.declared is not None:
        return _at_start(found.declared) != _at_start(wanted.document())
    # For a version that came by a call there is no earlier document; only the members of the new one are compared.
    if found.source.partition("#sha256=")[0] != wanted.url or wanted.sha256 not in (None, _digest_of(found.source)):
        return True
    if wanted.handler not in (None, found.handler) or wanted.runtime not in (None, found.runtime):
        return True
    return any(found.config.get(key) != value for key, value in _at_start(wanted.config).items())


def is_as_wanted(found: ActualVersion, wanted: DesiredVersion) -> bool:
    """Whether a version is as a document declares it, so that nothing has to change."""
    return not _must_replace(found, wanted) and not any(_in_place("", "", found, wanted))


def _digest_of(source: str) -> str | None:
    return source.partition("#sha256=")[2] or None


def _at_start(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in IN_PLACE}


def _in_place(model: str, version: str, found: ActualVersion, wanted: DesiredVersion) -> Iterator[Step]:
    # Options that the document does not mention stay as a call left them, for a version that came by a call.
    base = found.base if found.declared is not None else {}
    wishes = {**base, **{key: wanted.config[key] for key in IN_PLACE if key in wanted.config}}
    if "minWorkers" in wishes and "maxWorkers" in wishes:
        bounds = (wishes["minWorkers"], wishes["maxWorkers"])
        if found.is_on_demand:  # requests wake its workers, whatever minimum is declared
            bounds = (0, max(bounds[1], 1))
        sleeps = found.is_on_demand or "idleTimeout" in wanted.config or "idleTimeout" in found.config
        yield from _scale(model, version, _possible(found.workers, found, sleeps), _possible(bounds, found, sleeps))
    tuned = {
        key: wishes[key]
        for key in ("batchSize", "maxBatchDelay")
        if key in wishes and wishes[key] != found.config.get(key)
    }
    if tuned:
        changes = ", ".join(f"{key} {found.config.get(key)} → {value}" for key, value in tuned.items())
        yield Step("tune", model, version, changes, {key: found.config.get(key) for key in tuned}, tuned)


def _possible(workers: tuple[int, int], found: ActualVersion, sleeps: bool) -> tuple[int, int]:
    """The bounds in effect: a minimum of 0 means no workers, unless they sleep; never more than devices."""
    least, most = workers if workers[0] or sleeps else (0, 0)
    return (min(least, found.most_workers), min(most, found.most_workers)) if found.most_workers else (least, most)


def _scale(model: str, version: str, before: tuple[int, int], after: tuple[int, int]) -> Iterator[Step]:
    """Workers are added before the switch and ended after it; bounds that move apart give both steps."""
    wide = max(before[0], after[0]), max(before[1], after[1])
    if wide != before:
        yield Step("scale-up", model, version, f"{_bounds(before)} → {_bounds(wide)}", before, wide)
        yield Step("wait-ready", model, version)
    if wide != after:
        yield Step("scale-down", model, version, f"{_bounds(wide)} → {_bounds(after)}", wide, after)


def _bounds(workers: tuple[int, int]) -> str:
    least, most = workers
    return f"{least} workers" if least == most else f"{least} to {most} workers"


def _traffic(name: str, have: ActualModel | None, want: DesiredModel, stays: set[str]) -> Iterator[Step]:
    default = have.default if have is not None else None
    moves = want.new_versions is not None and want.new_versions.policy in ("load-and-default", "canary")
    if default != want.default and not (moves and default in stays):
        yield Step("default", name, None, f"{default or 'none'} → {want.default}", default, want.default)
    labels = dict(have.labels) if have is not None else {}
    if labels != dict(want.labels):
        yield Step("labels", name, None, _labels(want.labels) or "none", labels, dict(want.labels))
    for kind, before, after in (
        ("traffic", have.traffic if have is not None else None, want.traffic),
        ("shadow", have.shadow if have is not None else None, want.shadow),
    ):
        if before != after:
            yield Step("traffic" if kind == "traffic" else "shadow", name, None, _shown(after), before, after)


def _labels(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{label} → {version}" for label, version in sorted(labels.items()))


def _shown(value: Mapping[str, Any] | None) -> str:
    if value is None:
        return "none"
    weights = value.get("weights")
    if isinstance(weights, Mapping):
        return ", ".join(f"{version}: {share}" for version, share in sorted(weights.items()))
    return ", ".join(f"{key}: {part}" for key, part in sorted(value.items()))
