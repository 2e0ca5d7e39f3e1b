"""Writes and reads the models of a server as a document: TorchServe's `model_snapshot`. Pure.

A snapshot with an invalid value is refused as a whole: a server with half of its models is worse than one that says why
it does not start.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from marserve.errors import BadInput, InvalidSnapshot
from marserve.model_options import IN_FORCE, IN_PLACE, ModelOptions, Said, said_in, written
from marserve.option_values import Unusable
from marserve.registry.catalogue.traffic import NO_ROLE, Role, read_role
from marserve.store.addresses.fetch_guard import is_address
from marserve.store.addresses.pinned_digest import split_digest

# The values of options that a snapshot of TorchServe leaves out.
_DEFAULTS = written(ModelOptions(), *(key for key in IN_FORCE if key not in IN_PLACE))


@dataclass(frozen=True, slots=True)
class SnapshotVersion:
    """One version as a snapshot has it; its `options` take precedence over the archive.

    `archive` is its name in the store. `handler` is the one that a registration asked for in place of the archive's.
    `role` is its part in its model's traffic. TorchServe ignores the members that hold these two, and options that it
    does not know.
    """

    model: str
    version: str
    archive: str
    is_default: bool
    options: Said
    runtime: str = "python"
    handler: str | None = None
    role: Role = NO_ROLE


def archive_name(url: str) -> str:
    """The archive's name in the store, from the URL or name that it was registered with."""
    if is_address(url):
        url = url.partition("?")[0]
    return url.rstrip("/\\").replace("\\", "/").rpartition("/")[2]


def restored_archive(word: str) -> str:
    """What a later start is to load, from the `marName` of a snapshot: an address or an absolute path as it stands.

    Addresses and paths are of archives that got no name in the store: it was read-only, or they lie below a further
    root.
    """
    return word if is_address(word) or word.startswith("/") else archive_name(word)


def lies_as(word: str, model: str, version: str, *, says_version: bool) -> bool:
    """Whether an archive's path names this model and version: `model/version/…`, `model/version.mar`.

    A watch names models so, whatever the manifest says. `model-version.mar` names the version if the manifest does not.
    """
    parts = [unquote(part) for part in split_digest(word)[0].split("/") if part]
    stem = re.sub(r"\.(mar|model|tar\.gz|tgz)$", "", parts[-1], flags=re.IGNORECASE) if parts else ""
    if [model, version] in (parts[-3:-1], parts[-2:], [*parts[-2:-1], stem]):
        return True
    return not says_version and stem in (f"{model}-{version}", f"{model}_{version}", f"{model}@{version}")


def write_models(versions: Sequence[SnapshotVersion], name: str, created_ms: int) -> str:
    """The document of these versions, in the snapshot file `name`; JSON on one line."""
    models: dict[str, dict[str, Any]] = {}
    for version in versions:
        models.setdefault(version.model, {})[version.version] = {
            "defaultVersion": version.is_default,
            "marName": version.archive,
            **written(version.options),
            "runtimeType": version.runtime,
            **({"handler": version.handler} if version.handler else {}),
            **({"traffic": role} if (role := version.role.document()) else {}),
        }
    return json.dumps({"name": name, "modelCount": len(versions), "created": created_ms, "models": models})


def read_models(text: str) -> list[SnapshotVersion]:
    """The versions of a document, in its order. Unknown members are ignored.

    Raises InvalidSnapshot for any other document.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidSnapshot(f"model_snapshot is no JSON ({error})") from None
    models = _members(document, "model_snapshot").get("models", {})
    return [
        _read_version(model, version, _members(values, f"version {version} of model {model}"))
        for model, versions in _members(models, "models of model_snapshot").items()
        for version, values in _members(versions, f"model {model}").items()
    ]


def check_archives(versions: Iterable[SnapshotVersion], has_archive: Callable[[str], bool]) -> None:
    """Raise InvalidSnapshot, in TorchServe's words, for the first version whose archive is missing from the store."""
    for version in versions:
        if not has_archive(version.archive):
            raise InvalidSnapshot(
                f"Model archive file for model :{version.model}, version :{version.version} not found in model store"
            )


def _read_version(model: str, version: str, values: dict[str, Any]) -> SnapshotVersion:
    def wrong(key: str, right: str) -> InvalidSnapshot:
        said = f"is {json.dumps(values[key])[:60]}" if key in values else "is missing"
        return InvalidSnapshot(f"{key} of model {model}, version {version} {said}; it must be {right}")

    def options() -> Said:
        said: dict[str, Any] = {}
        given = {**_DEFAULTS, **values}
        for option in said_in("snapshot"):
            if given.get(option.key) is None and option.key not in IN_PLACE:
                continue
            try:
                said[option.attribute] = option.kind_in("snapshot").read(given.get(option.key))
            except Unusable as error:
                raise wrong(option.key, str(error)) from None
        if said["max_workers"] < said["min_workers"]:
            raise wrong("maxWorkers", f"a whole number of {said['min_workers']} or more")
        return Said(said)

    def text(key: str, default: str | None = None) -> str:
        value = values.get(key, default)
        if not isinstance(value, str) or not value:
            raise wrong(key, "a text")
        return value

    def role() -> Role:
        try:
            return read_role(values.get("traffic", {}))
        except BadInput as error:
            raise InvalidSnapshot(f"traffic of model {model}, version {version}: {error}") from None

    if not isinstance(values.get("defaultVersion"), bool):
        raise wrong("defaultVersion", "true or false")
    archive = text("marName")
    if archive_name(archive) in ("", ".", ".."):
        raise wrong("marName", "the name of an archive in the model store")
    return SnapshotVersion(
        model=model,
        version=version,
        archive=restored_archive(archive),
        is_default=values["defaultVersion"],
        options=options(),
        runtime=text("runtimeType", "python"),
        handler=text("handler") if "handler" in values else None,
        role=role(),
    )


def _members(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidSnapshot(f"{what} is {json.dumps(value)[:60]}; it must be an object")
    return value
