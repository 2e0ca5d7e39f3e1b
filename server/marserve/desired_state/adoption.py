"""Makes a document of models that no document names, so that a desired state can keep them, or bring them back. Pure.

`ActualVersion.as_declared` has a version's registration and its changes since. A document with it changes nothing of
that version, and loads the same version on a server that does not have it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from marserve.desired_state.document import DesiredModel, DesiredState, DesiredVersion, read
from marserve.registry.changes.actual import ActualModel, ActualState, ActualVersion
from marserve.settings.shown_address import hide_query

Name = tuple[str, str]
"""A model and one of its versions."""


def as_document(actual: ActualState, current: DesiredState | None = None) -> DesiredState:
    """All models of a server as a document; its policies for new versions are those of `current`, the one in force."""
    plain = DesiredState() if current is None else replace(current, models={})
    state = adopt(plain, actual, [(name, version) for name, model in actual.items() for version in model.versions])
    policies = {} if current is None else {name: model.new_versions for name, model in current.models.items()}
    models = {name: replace(model, new_versions=policies.get(name)) for name, model in state.models.items()}
    return replace(state, models=models)


def adopt(state: DesiredState, actual: ActualState, names: Collection[Name]) -> DesiredState:
    """The document with these versions added, which it does not name.

    A model that it does not name is added with its default version, labels, weights and shadow. For a model that it
    names the document decides these; a label that clients use for an added version stays with that version.
    """
    models = dict(state.models)
    for name in sorted({model for model, _ in names}):
        have = actual[name]
        added = {
            version: as_wanted(found) for version, found in sorted(have.versions.items()) if (name, version) in names
        }
        want = state.models.get(name)
        models[name] = _new_model(have, added) if want is None else _with_versions(want, have, added)
    return replace(state, models=models)


def as_wanted(found: ActualVersion) -> DesiredVersion:
    """The version as a document would declare it."""
    said = dict(found.as_declared)
    own = {key: said.pop(key, None) for key in ("sha256", "handler", "runtime")}
    return DesiredVersion(said.pop("url"), **own, config=said)


def problems(state: DesiredState, names: Collection[Name], *, is_shown: bool) -> list[str]:
    """Why these versions cannot be in a document, one sentence each; empty if they can.

    With `is_shown` a client gets the document, so addresses with keys are refused. Blocks for a second with thousands
    of versions. Raises BadDesiredState for values that no document can have.
    """
    read(state.write(), "the document with the models that are there")
    if not is_shown:
        return []
    return [
        f"{model} {version} came from {hide_query(state.models[model].versions[version].url)}, an address with a key "
        "in it, which is not shown: write that version into the document yourself"
        for model, version in sorted(names)
        if hide_query(state.models[model].versions[version].url) != state.models[model].versions[version].url
    ]


def _new_model(have: ActualModel, versions: Mapping[str, DesiredVersion]) -> DesiredModel:
    """A declared model with some of the versions that the server has."""
    default = have.default if have.default in versions else max(versions)
    labels = {label: version for label, version in have.labels.items() if version in versions}
    traffic = have.traffic if have.traffic is not None and set(have.traffic["weights"]) <= set(versions) else None
    shadow = have.shadow if have.shadow is not None and have.shadow["version"] in versions else None
    return DesiredModel(versions, default, labels, _plain(traffic), _plain(shadow))


def _with_versions(want: DesiredModel, have: ActualModel, added: Mapping[str, DesiredVersion]) -> DesiredModel:
    versions = {**want.versions, **added}
    labels = {
        label: version for label, version in have.labels.items() if version in added and label not in want.versions
    }
    return replace(want, versions=versions, labels={**labels, **want.labels})


def _plain(value: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if value is None else dict(value)
