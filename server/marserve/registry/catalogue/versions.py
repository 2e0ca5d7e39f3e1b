"""The table of registered models, their versions and their defaults. No I/O, no clock.

It changes only between two awaits, so no request and no other call ever sees half a change. A version is an object, not
its name: two of one name may exist for a while, one on the list and one that leaves or is not listed yet.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple
from urllib.parse import quote

from marserve.answers.management import Optimising
from marserve.errors import (
    DefaultVersionInUse,
    LabelTaken,
    ModelNotFound,
    VersionConflict,
    VersionInUse,
    VersionNotFound,
)
from marserve.messages import Load, Request
from marserve.pool.changes import Changes
from marserve.pool.options import PoolOptions
from marserve.pool.pool import Pool
from marserve.registry.catalogue.plan import Plan
from marserve.registry.catalogue.traffic import VERSION_HEADER, Reason, Role, Rule, Traffic
from marserve.registry.observing.observers import Beside

PoolFactory = Callable[[PoolOptions, Load], Pool]
"""Makes the pool of a version, with its reservation of memory."""

# Characters that are quoted in a header's value.
_NOT_PLAIN = re.compile(r"[^!-$&-~]")


class Version:
    """One version and what belongs to it: its pool, and the files of its plan.

    `is_settled`: its first load has ended, well or badly. `header` is the answer's header that names it. `since` is
    when it was registered, in seconds since 1970. `optimising` is what describe shows of the search for a faster build.
    """

    __slots__ = (
        "facts",
        "header",
        "is_settled",
        "max_workers",
        "min_workers",
        "optimising",
        "plan",
        "pool",
        "remarks",
        "since",
    )

    def __init__(self, plan: Plan, pool: Pool, since: float = 0.0) -> None:
        self.since = since
        self.facts = plan.facts
        self.remarks: list[str] = []
        self.optimising: Optimising | None = None
        self.plan = plan
        self.pool = pool
        self.min_workers = plan.facts.options.min_workers
        self.max_workers = plan.facts.options.max_workers
        self.is_settled = not self.min_workers
        self.header = (VERSION_HEADER, _NOT_PLAIN.sub(lambda odd: quote(odd.group(), safe=""), self.name))

    @property
    def model(self) -> str:
        """The name of its model."""
        return self.facts.options.model

    @property
    def name(self) -> str:
        """Its own name, such as `1.0`."""
        return self.facts.options.version

    @property
    def options(self) -> PoolOptions:
        """Its options as they are in force: calls change the number of its workers and how batches are formed."""
        return replace(self.pool.options, min_workers=self.min_workers, max_workers=self.max_workers)

    @property
    def has_sequences(self) -> bool:
        """Whether requests of one sequence must stay with it."""
        return self.facts.options.sequences is not None

    @property
    def wakes(self) -> bool:
        """Whether its first request starts workers, and it may have none before."""
        return self.facts.options.idle_timeout_s is not None and not self.min_workers and self.max_workers > 0

    @property
    def can_answer(self) -> bool:
        """Whether a worker has loaded it, or a request would wake it.

        While it wakes it holds requests, so its keys stay with it. If a worker died since, it cannot answer.
        """
        pool = self.pool
        if pool.ready_workers:
            return True
        return self.wakes and all(worker.last_death is None for worker in pool.workers())


class Choice(NamedTuple):
    """The version that is to answer a request, and why."""

    version: Version
    reason: Reason


class Label:
    """A further name of a version. `wanted` is the version that it names as soon as that can answer, mostly None."""

    __slots__ = ("target", "wanted")

    def __init__(self, target: str) -> None:
        self.target = target
        self.wanted: str | None = None

    def renamed(self, old: str, new: str) -> None:
        """Replace `old` by `new`."""
        self.target = new if self.target == old else self.target
        self.wanted = new if self.wanted == old else self.wanted


class Model:
    """The versions of one name, oldest first; `default` is always one of them.

    `rule` shares out requests that name no version; without one the default gets them all. `labels` are further names
    of versions. `beside` holds the observers of its requests, mostly None.
    `is_plain`: it has one version, no rule and no labels, so that there is nothing to choose.
    """

    __slots__ = ("beside", "default", "is_plain", "labels", "name", "rule", "versions")

    def __init__(self, version: Version) -> None:
        self.name = version.model
        self.versions = {version.name: version}
        self.default = version.name
        self.rule: Rule | None = None
        self.labels: dict[str, Label] = {}
        self.beside: Beside | None = None
        self.is_plain = True

    def choose(self, named: str | None, request: Request) -> Choice:
        """The version for a request whose path (or field of a gRPC call) names `named`.

        Raises VersionNotFound.
        """
        if named is not None:
            return Choice(self.find(named), "path")
        if request.asked_version is not None:
            return Choice(self.find(request.asked_version), "override")
        if self.rule is not None:
            headers = (*request.headers, *request.metadata) if request.metadata else request.headers
            chosen = self.rule.choose(headers, self.can_answer)
            if chosen is not None:
                return Choice(self.versions[chosen[0]], chosen[1])
        return Choice(self.versions[self.default], "default")

    def find(self, word: str) -> Version:
        """The version of this name, or of this label. Raises VersionNotFound."""
        version = self.versions.get(word)
        if version is not None:
            return version
        label = self.labels.get(word)
        if label is None:
            raise VersionNotFound(self.name, word, known=(*self.versions, *self.labels))
        return self.versions[self.settle(label)]

    def settle(self, label: Label) -> str:
        """The version that a label names now; it changes to `wanted` once that can answer."""
        if label.wanted is not None and self.can_answer(label.wanted):
            label.target, label.wanted = label.wanted, None
        return label.target

    def can_answer(self, version: str) -> bool:
        """Whether a version is listed and can answer."""
        found = self.versions.get(version)
        return found is not None and found.can_answer

    def share_of(self, version: Version) -> float:
        """The share of the requests naming no version that this one gets now, 0 to 1."""
        shares = {} if self.rule is None else self.rule.shares(self.can_answer)
        return (shares or {self.default: 1.0}).get(version.name, 0.0)

    def names_of(self, version: str) -> list[str]:
        """The labels that name a version or will name it."""
        return [name for name, label in self.labels.items() if version in (label.target, label.wanted)]

    def weight_of(self, version: str) -> float:
        """The weight of a version; 0 without a rule."""
        return 0.0 if self.rule is None else self.rule.traffic.weights.get(version, 0.0)

    def notice(self) -> None:
        """Follow a change of its versions, rule or labels."""
        self.is_plain = len(self.versions) == 1 and self.rule is None and not self.labels
        if self.beside is not None:
            self.beside.notice()


class Versions:
    """Every model of a registry. Other modules may read `models`; only this class changes it.

    `leaving` are versions off the list, or not on it yet, whose workers have not ended. `held` are names,
    (model, version), of versions that may come back to the list: no other version may take such a name. `states` is
    called at each change of what is listed and of what its workers do.
    """

    def __init__(self, sequence_header: str | None = None) -> None:
        """`sequence_header` is the header that names a request's sequence."""
        self.models: dict[str, Model] = {}
        self.states = Changes()
        self.leaving: set[Version] = set()
        self.held: set[tuple[str, str]] = set()
        self._sequence_header = sequence_header

    # ---------------------------------------------------------------------------------------------- looking

    def model(self, name: str) -> Model:
        """A model by its name. Raises ModelNotFound."""
        model = self.models.get(name)
        if model is None:
            raise ModelNotFound(name, self.models.keys())
        return model

    def find(self, model: str, version: str | None) -> Version:
        """The version of this name, or the default one. Raises ModelNotFound or VersionNotFound."""
        entry = self.model(model)
        return entry.versions[entry.default] if version is None else entry.find(version)

    def get(self, model: str, version: str) -> Version | None:
        """The listed version of this very name, or None."""
        entry = self.models.get(model)
        return None if entry is None else entry.versions.get(version)

    def all(self) -> Iterator[Version]:
        """Every version on the list."""
        return (version for model in self.models.values() for version in model.versions.values())

    def defaults(self) -> Iterator[Version]:
        """The default version of every model."""
        return (model.versions[model.default] for model in self.models.values())

    def find_leaver(self, model: str, version: str | None, *, force: bool) -> Version:
        """The version of this name (None: the default's) that may be taken off the list; a label is not enough.

        Raises ModelNotFound, VersionNotFound, DefaultVersionInUse while there are other versions, and without `force`
        VersionInUse for a version with a weight or a label.
        """
        entry = self.model(model)
        name = entry.default if version is None else version
        if name not in entry.versions:
            raise VersionNotFound(model, name, known=tuple(entry.versions))
        if len(entry.versions) > 1:
            if name == entry.default:
                raise DefaultVersionInUse(model)
            labels, has_weight = entry.names_of(name), entry.weight_of(name) > 0
            if (labels or has_weight) and not force:
                raise VersionInUse(model, name, has_weight=has_weight, labels=labels)
        return entry.versions[name]

    def is_listed(self, version: Version) -> bool:
        """Whether this version itself, not one of its name, is on the list."""
        return self.get(version.model, version.name) is version

    def is_default(self, version: Version) -> bool:
        """Whether this version itself is its model's default."""
        model = self.models.get(version.model)
        return model is not None and model.versions[model.default] is version

    def refuse_conflict(self, model: str, name: str) -> None:
        """Raise VersionConflict if the version is registered or may come back, LabelTaken if its name is a label."""
        entry = self.models.get(model)
        if self.is_held(model, name) or (entry is not None and name in entry.versions):
            raise VersionConflict(model, name)
        if entry is not None and name in entry.labels:
            raise LabelTaken(model, name)

    def is_held(self, model: str, name: str) -> bool:
        """Whether the name is held for a version that may come back."""
        return (model, name) in self.held

    # ---------------------------------------------------------------------------------------------- changing

    def add(self, version: Version) -> None:
        """Put a version on the list; a model's first version is its default."""
        model = self.models.get(version.model)
        if model is None:
            model = self.models[version.model] = Model(version)
        else:
            model.versions[version.name] = version
        model.notice()
        self._tell_share(version, model)
        self.states.tell()

    def replace(self, old: Version, new: Version, *, keeps_old: bool = False) -> None:
        """Put `new` in the place of `old`: it gets default, weight and labels.

        `old` is listed, and leaves unless `keeps_old`; `new` has its name (if `old` leaves), or a free one.
        """
        model = self.models[old.model]
        if keeps_old:
            model.versions[new.name] = new
        else:
            model.versions = {
                (new.name if listed is old else name): (new if listed is old else listed)
                for name, listed in model.versions.items()
            }
            self.leaving.add(old)
        if model.default == old.name:
            model.default = new.name
        if model.rule is not None:
            self.set_rule(new.model, model.rule.traffic.renamed(old.name, new.name), model.rule.position)
        for label in model.labels.values():
            label.renamed(old.name, new.name)
        model.notice()
        self._tell_share(new, model)
        self.leaving.discard(new)
        self.states.tell()

    def put(self, version: Version) -> Version | None:
        """Put a version on the list, in place of one of its name; returns that one, which leaves."""
        before = self.get(version.model, version.name)
        self.leaving.discard(version)
        if before is None:
            self.add(version)
        else:
            self.replace(before, version)
        return before

    def remove(self, version: Version) -> None:
        """Take a version off the list, with its weight and labels.

        If it was the default, the oldest of the others becomes the default.
        """
        model = self.models[version.model]
        del model.versions[version.name]
        if not model.versions:
            del self.models[version.model]
        else:
            if model.default == version.name:
                model.default = next(iter(model.versions))
            self._forget(model, version)
            model.notice()
        self.leaving.add(version)
        self.states.tell()

    def _forget(self, model: Model, version: Version) -> None:
        if model.rule is not None and version.name in model.rule.traffic.weights:
            self.set_rule(version.model, model.rule.traffic.without(version.name), model.rule.position)
        for name in model.names_of(version.name):
            label = model.labels[name]
            if label.target == version.name:
                del model.labels[name]
            else:
                label.wanted = None

    def set_rule(self, model: str, traffic: Traffic | None, position: int) -> None:
        """Share out requests by these weights from now on; without weights, give them all to the default version.

        `position` is the rule's begin among the golden ratio's multiples. Raises ModelNotFound.
        """
        entry = self.model(model)
        entry.rule = None
        if traffic is not None:
            listed = (entry.versions.get(name) for name in traffic.weights)
            has_sequences = any(version is not None and version.has_sequences for version in listed)
            entry.rule = Rule(model, traffic, position, self._sequence_header if has_sequences else None)
        entry.notice()

    def set_label(self, model: str, label: str, version: str) -> Label:
        """Let a label name a version: at once if the label is new, else as soon as that version can answer.

        The version is listed, and no version has the label's name. Raises ModelNotFound.
        """
        entry = self.model(model)
        known = entry.labels.get(label)
        if known is None:
            known = entry.labels[label] = Label(version)
        else:
            known.wanted = version if version != known.target else None
            entry.settle(known)
        entry.notice()
        return known

    def remove_label(self, model: str, label: str) -> None:
        """Remove a label, which exists. Raises ModelNotFound."""
        entry = self.model(model)
        del entry.labels[label]
        entry.notice()

    def role_of(self, version: Version) -> Role:
        """The part of a listed version in its model's traffic."""
        model = self.models[version.model]
        traffic = model.rule.traffic if model.rule is not None else None
        weight = None if traffic is None else traffic.weights.get(version.name)
        labels = [name for name, label in model.labels.items() if (label.wanted or label.target) == version.name]
        return Role(weight, traffic.sticky if traffic is not None else None, tuple(labels))

    def describe_role(self, version: Version) -> dict[str, Any]:
        """Describe's members about a version's traffic; empty for a version off the list or without rule and labels."""
        if not self.is_listed(version):
            return {}
        model = self.models[version.model]
        labels = sorted(name for name, label in model.labels.items() if model.settle(label) == version.name)
        share = {} if model.rule is None else {"trafficShare": round(model.share_of(version), 6)}
        return {**({"labels": labels} if labels else {}), **share}

    def restore_role(self, version: Version, role: Role, position: int) -> None:
        """Give a listed version its part in its model's traffic back, beside the parts of others.

        `position` is the begin of a rule that has to be made.
        """
        model = self.models[version.model]
        for label in role.labels:
            if label not in model.versions and label not in model.labels:
                model.labels[label] = Label(version.name)
        if role.weight is not None:
            before = dict(model.rule.traffic.weights) if model.rule is not None else {}
            traffic = Traffic({**before, version.name: role.weight}, role.sticky)
            if any(traffic.weights.values()):
                self.set_rule(version.model, traffic, model.rule.position if model.rule is not None else position)
        model.notice()

    def _tell_share(self, version: Version, model: Model) -> None:
        version.pool.metrics.read_share = lambda: model.share_of(version)

    def find_named(self, model: str, version: str) -> Version:
        """The version of this name; a label does not count. Raises ModelNotFound or VersionNotFound."""
        entry = self.model(model)
        if version not in entry.versions:
            text = f"Model version {version} does not exist for model {model}"
            raise VersionNotFound(model, version, text, tuple(entry.versions))
        return entry.versions[version]

    def set_default(self, model: str, version: str) -> Version:
        """Let a version answer requests that name none, from now on. Raises ModelNotFound or VersionNotFound."""
        found = self.find_named(model, version)
        self.models[model].default = version
        self.states.tell()
        return found
