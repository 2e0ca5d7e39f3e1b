"""The findings about one file of a repository, as they are collected, and the refusal of a model."""

from __future__ import annotations

from marserve.migration.findings import Finding, Spot


class Refused(Exception):
    """A model, or one of its versions, cannot be imported: `what` is wrong at `line`, `fix` mends it."""

    def __init__(self, line: int, what: str, fix: str) -> None:
        super().__init__(what)
        self.line, self.what, self.fix = line, what, fix


class Notes:
    """Findings about one file, whose name in reports is `file`."""

    def __init__(self, file: str, findings: list[Finding]) -> None:
        self.file, self._findings = file, findings

    def of(self, file: str) -> Notes:
        """Notes about another file, collected with these."""
        return Notes(file, self._findings)

    def works(self, line: int, what: str) -> None:
        """It is mapped to what means the same."""
        self._findings.append(Spot(self.file, line).works(what))

    def differs(self, line: int, what: str) -> None:
        """It is approximated, or left out."""
        self._findings.append(Spot(self.file, line).differs(what))

    def action(self, line: int, what: str, fix: str) -> None:
        """Something has to be done first."""
        self._findings.append(Spot(self.file, line).action(what, fix))

    def refuse(self, refused: Refused) -> None:
        """What is refused needs an action."""
        self.action(refused.line, refused.what, refused.fix)
