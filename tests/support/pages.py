"""The fenced blocks of the pages in `docs/`, for tests that run or check what a page tells its reader to type.

A block that has a name in its info string (```` ```sh name=start ````) is fetched with `block(page, name)`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```\s*$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """One fenced block: its language, its name (None without one), and its text without the fences' indent."""

    language: str
    name: str | None
    text: str
    line: int


def blocks(page: str) -> Iterator[Block]:
    """The fenced blocks of a page, whose path is given from the repository's root."""
    written = (ROOT / page).read_text(encoding="utf-8")
    for found in _FENCE.finditer(written):
        language, *attributes = found["info"].split() or [""]
        names = [word.removeprefix("name=") for word in attributes if word.startswith("name=")]
        indent = found["indent"]
        text = "".join(line.removeprefix(indent) for line in found["text"].splitlines(keepends=True))
        yield Block(language, names[0] if names else None, text, written.count("\n", 0, found.start()) + 1)


def block(page: str, name: str) -> str:
    """The text of the page's one block of this name. Raises LookupError where there is none, or more than one."""
    found = [one.text for one in blocks(page) if one.name == name]
    if len(found) != 1:
        raise LookupError(f"{page} has {len(found)} blocks named {name}, not one")
    return found[0]
