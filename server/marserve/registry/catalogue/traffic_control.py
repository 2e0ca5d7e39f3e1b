"""Calls about the traffic of models: weights, sticky keys, labels.

`traffic.py` chooses the version of a request; the rules in force stand in the table (`versions.py`).
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from typing import Any

from marserve.errors import BadInput, LabelNotFound, LabelTaken, VersionNotFound
from marserve.registry.catalogue.traffic import Traffic, check_label, read_traffic
from marserve.registry.catalogue.versions import Label, Model, Version, Versions

log = logging.getLogger("marserve.registry")

# More are a mistake, and the removal of a version looks at each.
MOST_LABELS = 100


class TrafficControl:
    """The traffic of one registry's models. Every method is called on the event loop, and none waits."""

    def __init__(self, versions: Versions, note_change: Callable[[Version], None]) -> None:
        """`note_change` is called after each change of what a snapshot keeps."""
        self._versions = versions
        self._note_change = note_change

    # ---------------------------------------------------------------------------------------------- weights

    def describe(self, model: str) -> dict[str, Any]:
        """The weights in force, in the shape of `PUT`; `pending` are the versions among them that cannot answer now.

        If no weights were set, the default version has them all, and `isDefault` is true. Raises ModelNotFound.
        """
        entry = self._versions.model(model)
        if entry.rule is None:
            return {"weights": {entry.default: 100}, "isDefault": True}
        pending = entry.rule.pending(entry.can_answer)
        return {**entry.rule.traffic.document(), **({"pending": pending} if pending else {})}

    def rule_of(self, model: str) -> Traffic | None:
        """The weights that were set; None without any, when the default version answers. Raises ModelNotFound."""
        rule = self._versions.model(model).rule
        return None if rule is None else rule.traffic

    def put(self, model: str, traffic: Traffic, *, dry_run: bool = False) -> dict[str, Any]:
        """Share out the requests that name no version by these weights, from the next one on.

        A version that cannot answer gets no requests until it can. With `dry_run` nothing changes. Raises
        ModelNotFound, VersionNotFound, and BadInput for a label in the place of a version.
        """
        entry = self._versions.model(model)
        for name in traffic.weights:
            if name in entry.versions:
                continue
            if name in entry.labels:
                raise BadInput(
                    f"{name} is a label, and weights are of versions; version {entry.labels[name].target} has it."
                )
            raise VersionNotFound(model, name, known=tuple(entry.versions))
        if dry_run:
            pending = [name for name, weight in traffic.weights.items() if weight and not entry.can_answer(name)]
            return {**traffic.document(), **({"pending": pending} if pending else {})}
        position = random.getrandbits(64) if entry.rule is None else entry.rule.position
        self._versions.set_rule(model, traffic, position)
        log.info("Model %s: traffic by weights %s", model, dict(traffic.weights))
        self._note(entry)
        return self.describe(model)

    def reset(self, model: str, *, dry_run: bool = False) -> dict[str, Any]:
        """Let the default version answer requests that name none. Raises ModelNotFound."""
        entry = self._versions.model(model)
        if dry_run:
            return {"weights": {entry.default: 100}, "isDefault": True}
        if entry.rule is not None:
            self._versions.set_rule(model, None, 0)
            log.info("Model %s: traffic to the default version %s", model, entry.default)
            self._note(entry)
        return self.describe(model)

    def put_document(self, model: str, document: Mapping[str, Any] | None) -> None:
        """As `put` with the body of a client's call, or as `reset` with None. Raises BadInput, too."""
        if document is None:
            self.reset(model)
        else:
            self.put(model, read_traffic(document))

    # ---------------------------------------------------------------------------------------------- labels

    def labels(self, model: str) -> dict[str, Any]:
        """The `version` that each label names; while that cannot answer, `answeredBy` is the one that does.

        Raises ModelNotFound.
        """
        entry = self._versions.model(model)
        return {name: _describe_label(entry, label) for name, label in sorted(entry.labels.items())}

    def put_label(self, model: str, label: str, version: str, *, dry_run: bool = False) -> dict[str, Any]:
        """Let a label name a version; a label that names another one changes as soon as the new one can answer.

        Raises BadInput, ModelNotFound, VersionNotFound, and LabelTaken if a version has the label's name.
        """
        entry = self._versions.model(model)
        check_label(label)
        if label in entry.versions or self._versions.is_held(model, label):
            raise LabelTaken(model, label)
        if version not in entry.versions:
            raise VersionNotFound(model, version, known=tuple(entry.versions))
        if label not in entry.labels and len(entry.labels) >= MOST_LABELS:
            raise BadInput(f"Model {model} has {MOST_LABELS} labels, as many as it may have; remove one.")
        if dry_run:
            return {"version": version, **({} if entry.can_answer(version) else {"isPending": True})}
        labelled = self._versions.set_label(model, label, version)
        log.info("Model %s: label %s names version %s", model, label, version)
        self._note(entry)
        return _describe_label(entry, labelled)

    def put_all_labels(self, model: str, labels: Mapping[str, str]) -> None:
        """Set these labels, from label to version, and remove all others. Raises as `put_label`."""
        for label in set(self._versions.model(model).labels) - set(labels):
            self.remove_label(model, label)
        for label, version in labels.items():
            self.put_label(model, label, version)

    def remove_label(self, model: str, label: str, *, dry_run: bool = False) -> None:
        """Remove a label. Raises ModelNotFound, LabelNotFound."""
        entry = self._versions.model(model)
        if label not in entry.labels:
            raise LabelNotFound(model, label)
        if not dry_run:
            self._versions.remove_label(model, label)
            log.info("Model %s: label %s is removed", model, label)
            self._note(entry)

    def _note(self, entry: Model) -> None:
        self._note_change(entry.versions[entry.default])


def _describe_label(entry: Model, label: Label) -> dict[str, Any]:
    entry.settle(label)
    if label.wanted is not None:
        return {"version": label.wanted, "isPending": True, "answeredBy": label.target}
    return {"version": label.target, **({} if entry.can_answer(label.target) else {"isPending": True})}
