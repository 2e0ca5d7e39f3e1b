"""Names and values of a client's, as messages show them: cut to `MAX_SHOWN` characters."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

MAX_SHOWN: Final = 80
MAX_NAMES: Final = 8


def short(text: str, most: int = MAX_SHOWN) -> str:
    """A text, cut to `most` characters."""
    return text if len(text) <= most else f"{text[:most]}…"


def shown(value: object) -> str:
    """A value as Python writes it, cut."""
    return short(repr(value))


def names_of(names: Iterable[str]) -> str:
    """The first `MAX_NAMES` names, each cut, and a sign if there are more."""
    first = [short(name) for name in islice(names, MAX_NAMES + 1)]
    return ", ".join([*first[:MAX_NAMES], "…"] if len(first) > MAX_NAMES else first)
