"""Findings of a survey or an import, as a person reads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from marserve.cli.output import table
from marserve.migration.findings import Finding, counts

if TYPE_CHECKING:
    from rich.table import Table

_WORDS = {"action": "needs action", "differs": "differs", "works": "works"}


def lines_of(findings: Sequence[Finding], folder: Path, *, show_all: bool) -> list[str | Table]:
    """A table, of what works only with `show_all`, and a line with the counts."""
    rows = [
        [_WORDS[each.verdict], each.place, _sentences(each.what, each.fix)]
        for each in findings
        if show_all or each.verdict != "works"
    ]
    number = counts(findings)
    summary = ", ".join(f"{number[verdict]} {word}" for verdict, word in _WORDS.items())
    return [*([table(["", "where", "what"], rows)] if rows else []), f"{folder}: {summary}."]


def _sentences(what: str, fix: str) -> str:
    return f"{what.rstrip('.')}. {fix[:1].upper()}{fix[1:]}." if fix else what
