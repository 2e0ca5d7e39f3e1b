"""The results of a survey: findings with a place, and the three verdicts. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["works", "differs", "action"]
ORDER: tuple[Verdict, ...] = ("action", "differs", "works")


@dataclass(frozen=True, slots=True)
class Spot:
    """What findings are about: a file, as `Finding.file` has it, and a line; 0 without a line."""

    file: str
    line: int = 0

    def works(self, what: str) -> Finding:
        """A finding that this works."""
        return Finding("works", self.file, self.line, what)

    def differs(self, what: str) -> Finding:
        """A finding that this works in another way."""
        return Finding("differs", self.file, self.line, what)

    def action(self, what: str, fix: str) -> Finding:
        """A finding that needs an action."""
        return Finding("action", self.file, self.line, what, fix)


@dataclass(frozen=True, slots=True)
class Finding:
    """One result.

    `works`: as before. `differs`: it works, but not as before in every respect. `action`: the operator has to do
    something first; `fix` says what. `file` is relative to the surveyed folder; a member of an archive follows `!`.
    `line` counts from 1; 0 without a line.
    """

    verdict: Verdict
    file: str
    line: int
    what: str
    fix: str = ""

    @property
    def place(self) -> str:
        """`config.properties:14`."""
        return f"{self.file}:{self.line}" if self.line else self.file


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Findings that need action first, then by place."""
    return sorted(findings, key=lambda found: (ORDER.index(found.verdict), found.file, found.line, found.what))


def counts(findings: Iterable[Finding]) -> dict[str, int]:
    """How many of each verdict."""
    found = list(findings)
    return {verdict: sum(each.verdict == verdict for each in found) for verdict in ORDER}


def as_document(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """For JSON."""
    return [{**asdict(each), "place": each.place} for each in findings]
