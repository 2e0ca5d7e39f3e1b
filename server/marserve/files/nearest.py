"""Finds the known name that an unknown one may stand for. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final

# The time of a comparison grows with the square of the lengths, and names come from requests and documents.
LONGEST_COMPARED: Final = 200


def nearest(word: str, known: Iterable[str], *, least: float = 0.6, is_loose: bool = False) -> str | None:
    """The known name most like a word; None if none has at least the likeness `least`, between 0 and 1.

    `is_loose` compares without capitals, dashes and underscores.
    """
    if len(word) > LONGEST_COMPARED:
        return None
    names = {_fold(name) if is_loose else name: name for name in known}
    near = get_close_matches(_fold(word) if is_loose else word, names, 1, least)
    return names[near[0]] if near else None


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "", *, least: float = 0.6) -> str:
    """The end of a message about an unknown name: `; did you mean NAME?`, or `otherwise`."""
    near = nearest(word, known, least=least)
    return otherwise if near is None else f"; did you mean {near}?"


def _fold(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()
