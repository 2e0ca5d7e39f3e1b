"""Objects of JSON read entry by entry, for headers of up to 100 MB. Pure.

`json.loads` holds the interpreter from the first byte to the last: ten seconds in which a server answers nothing, and
gigabytes of memory for what no header holds. Here no more of an entry is read than it can have.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from json.decoder import scanstring  # type: ignore[attr-defined]  # typeshed lacks it
from typing import Any

# Characters of a value that is neither a text nor a map of texts. A tensor with the most dimensions has 2,000.
MOST_OF_VALUE = 1 << 16
# Those that most have; to copy more of the text for each of them costs more than to read it.
_OF_MOST_VALUES = 1 << 9

#: Names of one object: the largest models have half as many tensors.
MOST_NAMES = 200_000
_SPACE = re.compile(r"[ \t\n\r]*")
#: Reads the value of a name from a place in the text on: the value, and where it ends.
Reader = Callable[[str, str, int], tuple[Any, int]]


class Twice(ValueError):
    """A name stands in one object twice, which readers understand differently; the text is the name."""


class TooMany(ValueError):
    """An object has more names than it may; the text is `more than` that."""


def read_object(text: str, at: int, read: Reader) -> tuple[dict[str, Any], int]:
    """The object that begins at this place, and where it ends. Raises ValueError, RecursionError, Twice, TooMany."""
    entries: dict[str, Any] = {}
    at = _after(text, at, "{")
    if text[at : at + 1] == "}":
        return entries, at + 1
    while True:
        name, at = read_text("", text, at)
        if name in entries:
            raise Twice(name)
        if len(entries) == MOST_NAMES:
            raise TooMany(f"more than {MOST_NAMES}")
        at = _after(text, _skip(text, at), ":")
        entries[name], at = read(name, text, at)
        at = _skip(text, at)
        if text[at : at + 1] == "}":
            return entries, at + 1
        at = _after(text, at, ",")


def read_text(_: str, text: str, at: int) -> tuple[str, int]:
    """A text. Raises ValueError for anything else."""
    if text[at : at + 1] != '"':
        raise ValueError("no text")
    found: tuple[str, int] = scanstring(text, at + 1, True)
    return found


def read_texts(name: str, text: str, at: int) -> tuple[Any, int]:
    """A map of texts, None in it for other values; or any small value in its place. Raises as `read_object`."""
    return read_object(text, at, _text_or_none) if text[at : at + 1] == "{" else read_small(name, text, at)


def _text_or_none(name: str, text: str, at: int) -> tuple[str | None, int]:
    return read_text(name, text, at) if text[at : at + 1] == '"' else (None, read_small(name, text, at)[1])


def read_small(_: str, text: str, at: int) -> tuple[Any, int]:
    """Any value that is not long. Raises as `read_object`."""
    try:
        value, end = _DECODER.raw_decode(text[at : at + _OF_MOST_VALUES])
    except Twice:
        raise
    except ValueError:
        value, end = _DECODER.raw_decode(text[at : at + MOST_OF_VALUE])
    return value, at + end


def skip_to_end(text: str, at: int) -> None:
    """Raise ValueError if anything but spaces follows."""
    if _skip(text, at) != len(text):
        raise ValueError("something follows")


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _after(text: str, at: int, sign: str) -> int:
    if text[at : at + 1] != sign:
        raise ValueError(f"no {sign}")
    return _skip(text, at + 1)


def _only_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    known = dict(pairs)
    if len(known) < len(pairs):
        raise Twice(Counter(key for key, _ in pairs).most_common(1)[0][0])
    return known


_DECODER = json.JSONDecoder(object_pairs_hook=_only_once)
