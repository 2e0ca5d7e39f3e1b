"""Reads the lines, rows and figures of what vendors' tools print, within bounds. Pure: text in, plain data out."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator

# Some tools print the sentences about all devices of a machine as one line.
LONGEST_LINE = 4096
# No device has so much of anything, in bytes, percent or degrees.
LARGEST_FIGURE = 1 << 60
_LONGEST_NUMBER = 19
_SHOWN = 60


class Unreadable(ValueError):
    """A tool's output is not what the tool prints; the text describes it in a few words."""


def read_lines(text: str) -> list[str]:
    """The lines of a tool's output. Raises Unreadable for a line that is too long."""
    lines = text.splitlines()
    for line in lines:
        if len(line) > LONGEST_LINE:
            raise Unreadable(f"a line of {len(line)} characters, {_show(line)}")
    return lines


def read_rows(text: str) -> Iterator[list[str]]:
    """The cells of each line, without the spaces around them. Raises Unreadable."""
    try:
        for row in csv.reader(read_lines(text), skipinitialspace=True):
            yield [cell.strip() for cell in row]
    except csv.Error as error:
        raise Unreadable(str(error)) from None


def read_integer(cell: str) -> int | None:
    """A whole number; None for words. Raises Unreadable for a number that is too large."""
    if not cell.isdecimal():
        return None
    if len(cell) > _LONGEST_NUMBER or int(cell) > LARGEST_FIGURE:
        raise Unreadable(f"the number {_show(cell)}")
    return int(cell)


def read_figure(cell: str) -> float | None:
    """A number; None for words, such as `[N/A]`. Raises Unreadable for one that is infinite, none or too large."""
    try:
        figure = float(cell)
    except ValueError:
        return None
    if not math.isfinite(figure) or abs(figure) > LARGEST_FIGURE:
        raise Unreadable(f"the number {_show(cell)}")
    return figure


def _show(text: str) -> str:
    return ascii(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
