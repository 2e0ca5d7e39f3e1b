"""Names and values of a client's, and what errors say, as messages show them: cut to so many characters."""

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


def shown_name(name: str) -> str:
    """A name, cut; as Python writes it where it has characters that are not for printing, such as ends of lines."""
    return short(name) if name.isprintable() else shown(name)


def first_line(error: BaseException, most: int = 300) -> str:
    """What an error says in its first line, cut; its class's name if it says nothing. Libraries' further lines are
    advice for their own users.
    """
    lines = (line.strip() for line in str(error).splitlines())
    return short(next((line for line in lines if line), type(error).__name__), most)


def first_line_with_kind(error: BaseException, most: int = 300) -> str:
    """The same after its class's name: `ValueError: no such shape`."""
    kind, said = type(error).__name__, first_line(error, most)
    return kind if said == kind else f"{kind}: {said}"


def names_of(names: Iterable[str]) -> str:
    """The first `MAX_NAMES` names, each cut, and a sign if there are more."""
    first = [short(name) for name in islice(names, MAX_NAMES + 1)]
    return ", ".join([*first[:MAX_NAMES], "…"] if len(first) > MAX_NAMES else first)
