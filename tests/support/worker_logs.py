"""A model log that keeps what workers printed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from marserve.telemetry.logs.output_budget import OutputBudget
from marserve.telemetry.logs.worker_lines import WorkerLines


class Line(NamedTuple):
    """One line, and who said it how."""

    model: str
    version: str
    worker_id: str
    stream: str
    level: str
    text: str
    ids: str = ""


@dataclass
class KeptLines:
    """As `telemetry.logs.WorkerLog`, in memory."""

    lines: list[Line] = field(default_factory=list)
    pieces: list[list[str]] = field(default_factory=list)
    budget: OutputBudget = field(default_factory=OutputBudget)

    def write(self, lines: WorkerLines) -> None:
        """Take records; their lines are kept one by one."""
        self.pieces.append(list(lines.texts))
        *of, texts, ids = lines
        self.lines += [Line(*of, line, ids) for text in texts for line in text.split("\n")]

    @property
    def texts(self) -> list[str]:
        """The lines' texts alone."""
        return [line.text for line in self.lines]
