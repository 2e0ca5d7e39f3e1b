"""The keys of `handler` in a model's configuration, as the ready handlers read them. Pure.

Each handler lists its keys once. A key that is unknown, or has a value that is not allowed, is an error of the load
that names the key, the value and what is allowed.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from marserve_handlers.errors import ModelNotLoadable

ALL = "all"
LONGEST_SHOWN = 80


@dataclass(frozen=True)
class Key:
    """One key: `is_allowed` judges a value, `allowed` says in words what may stand there.

    `default` is the value where the configuration does not have the key.
    """

    name: str
    is_allowed: Callable[[Any], bool]
    allowed: str
    default: Any = None


def whole(name: str, default: int | None = None, *, least: int = 1, most: int | None = None) -> Key:
    """A whole number from `least` to `most`."""
    allowed = f"a whole number from {least} to {most}" if most is not None else f"a whole number, {least} or more"
    return Key(name, lambda value: type(value) is int and least <= value <= (most or value), allowed, default)


def count_or_all(name: str, default: int | None = None) -> Key:
    """A whole number above 0, or the word `all`."""
    return Key(
        name,
        lambda value: value == ALL or (type(value) is int and value >= 1),
        "a whole number, 1 or more, or all",
        default,
    )


def flag(name: str, default: bool | None = None) -> Key:
    """A boolean."""
    return Key(name, lambda value: type(value) is bool, "true or false", default)


def word(name: str, words: Iterable[str], default: str | None = None) -> Key:
    """One of several words."""
    known = tuple(words)
    return Key(name, lambda value: value in known, f"one of {', '.join(known)}", default)


def text(name: str, allowed: str) -> Key:
    """Any text that is not empty; `allowed` says what it means."""
    return Key(name, lambda value: isinstance(value, str) and bool(value), allowed)


def names(name: str) -> Key:
    """A list of different texts."""
    return Key(name, _are_names, "a list of different texts")


def _are_names(value: Any) -> bool:
    is_list = isinstance(value, list) and bool(value)
    return is_list and all(isinstance(each, str) for each in value) and len(set(value)) == len(value)


# Keys that each ready handler has. `profile` is read by `support/timing.py`.
SHARED = (whole("max_items", 64, most=4096), flag("profile", False))


def read_options(section: Any, handler: str, keys: Iterable[Key]) -> dict[str, Any]:
    """The value of each key. `section` is `handler` of the configuration, None if it has none.

    Raises ModelNotLoadable for a section that is no map, an unknown key, and a value that is not allowed.
    """
    if section is None:
        section = {}
    if not isinstance(section, Mapping):
        raise ModelNotLoadable(f"handler of the model's configuration is {shown(section)}; it must be a map.")
    known = {key.name: key for key in (*keys, *SHARED)}
    for name in section:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ModelNotLoadable(
                f"handler.{name} of the model's configuration is not known: {handler} has the keys "
                f"{', '.join(known)}.{hint}"
            )
    options = {}
    for name, key in known.items():
        options[name] = section.get(name, key.default)
        if name in section and not key.is_allowed(section[name]):
            raise refuse(name, section[name], key.allowed)
    return options


def refuse(name: str, value: Any, allowed: str) -> ModelNotLoadable:
    """The error for a value of a key that is not allowed."""
    return ModelNotLoadable(
        f"handler.{name} of the model's configuration is {shown(value)}; it must be {allowed.rstrip('.')}."
    )


def check_labels(labels: list[str] | None, classes: int) -> None:
    """Raise ModelNotLoadable if there are labels, and not one for each class."""
    if labels is not None and len(labels) != classes:
        raise refuse("labels", labels, f"a list of {classes} texts, one for each class of the model")


def shown(value: Any) -> str:
    """A value for a message, short."""
    said = repr(value)
    return said if len(said) <= LONGEST_SHOWN else f"{said[: LONGEST_SHOWN - 1]}…"
