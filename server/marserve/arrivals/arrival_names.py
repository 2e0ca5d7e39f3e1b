"""The model and version of an archive, by its place and by its manifest. Pure.

model/1.2/anything.mar, model/1.2/        both, the layout of servers that serve folders of versions
model/1.2.mar                             both
model-1.2.mar, model-v3.mar, model@7.mar  both; a number alone (`resnet-18.mar`) is part of a name
model.mar, model/                         the model
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from marserve.settings.watches import NameRule

DEFAULT_VERSION = "1.0"
_ENDINGS = re.compile(r"\.(mar|model|tar\.gz|tgz)$", re.IGNORECASE)
_VERSION = re.compile(r"[vV]?[0-9]+([._-][0-9]+)*([-+._]?[A-Za-z][A-Za-z0-9.]{0,31})?")
_FILE_VERSION = re.compile(
    r"(?P<model>.+?)(-(?P<dotted>[0-9]+(\.[0-9]+)+([-+.]?[A-Za-z][A-Za-z0-9.]*)?)|[-_](?P<v>[vV][0-9]+(\.[0-9]+)*)"
    r"|@(?P<at>[A-Za-z0-9][A-Za-z0-9._+-]*))"
)


@dataclass(frozen=True, slots=True)
class PlaceName:
    """The names in an archive's key; None for a missing one. `is_layout`: the key is `model/version/…`."""

    model: str | None
    version: str | None
    is_layout: bool = False


def name_from_place(key: str) -> PlaceName:
    """The names in an archive's key, which is relative to the watched place."""
    parts = [part for part in key.split("/") if part]
    if not parts:
        return PlaceName(None, None)
    if key.endswith("/"):
        if len(parts) > 1 and _VERSION.fullmatch(parts[-1]):
            return PlaceName(parts[-2], parts[-1], is_layout=True)
        return PlaceName(parts[-1], None)
    stem = _ENDINGS.sub("", parts[-1])
    if len(parts) > 2 and _VERSION.fullmatch(parts[-2]):
        return PlaceName(parts[-3], parts[-2], is_layout=True)
    if len(parts) > 1 and _VERSION.fullmatch(stem):
        return PlaceName(parts[-2], stem, is_layout=True)
    found = _FILE_VERSION.fullmatch(stem)
    if found is not None:
        return PlaceName(_clean(found["model"]), found["dotted"] or found["v"] or found["at"])
    return PlaceName(_clean(stem), None)


def choose_name(key: str, model: str | None, version: str | None, rule: NameRule) -> tuple[str, str]:
    """Model and version of the archive at `key`. `model` and `version` are its manifest's, None for a missing one.

    `rule` says whether the manifest or the key names it first; the other fills in missing names.
    """
    place = name_from_place(key)
    if rule == "path" or (rule == "auto" and place.is_layout):
        return place.model or model or "model", place.version or version or DEFAULT_VERSION
    if model is not None and model != place.model:
        # If the file has another name than the model, what looks like a version may be part of that name.
        place = PlaceName(model, place.version if place.is_layout else None)
    return model or place.model or "model", version or place.version or DEFAULT_VERSION


def version_order(version: str) -> tuple[tuple[int, int, str], ...]:
    """The sort key of versions: 1.9 is before 1.10, and 2.0rc1 before 2.0."""
    keys: list[tuple[int, int, str]] = []
    for part in (*re.findall(r"[0-9]+|[A-Za-z]+", version.lstrip("vV")), ""):
        if not part.isdecimal():
            while keys and keys[-1] == (1, 0, ""):
                keys.pop()  # 2 and 2.0 are one
        keys.append((1, int(part), "") if part.isdecimal() else (-1, 0, part.lower()) if part else (0, 0, ""))
    return tuple(keys)


def oldest_first(versions: list[str]) -> list[str]:
    """Versions sorted, the oldest first, if all of them are numbered; else as they came."""
    return sorted(versions, key=version_order) if are_numbered(versions) else versions


def are_numbered(versions: Iterable[str]) -> bool:
    """Whether all of these are numbered, so that their order is known."""
    return all(map(_VERSION.fullmatch, versions))


def is_newer(version: str, than: str) -> bool:
    """Whether a later version replaces another: yes, unless both are numbered and it has the lower number."""
    return not are_numbered((version, than)) or version_order(version) >= version_order(than)


def _clean(stem: str) -> str:
    """A model's name made of a file's (contract 6.4)."""
    return re.sub(r"[^A-Za-z0-9_]", "_", stem)
