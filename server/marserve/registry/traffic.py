"""Chooses which version of a model answers a request. Pure: knows names, no pools, no clock and no state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from marserve.errors import VersionNotFound

Version = TypeVar("Version")


def choose_version(model: str, versions: Mapping[str, Version], default: str, named: str | None) -> Version:
    """The version that takes the request: the one it names, else the default.

    `default` is always a key of `versions`. Raises VersionNotFound for a name that is not there; a version is never
    chosen in place of the one that was asked for.
    """
    try:
        return versions[default if named is None else named]
    except KeyError:
        raise VersionNotFound(model, str(named)) from None
