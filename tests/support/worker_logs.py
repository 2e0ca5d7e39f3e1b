"""A model log that keeps what workers printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from marserve.telemetry.logs.output_budget import OutputBudget


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

    def write(
        self,
        model: str,
        version: str,
        worker_id: str,
        stream: Literal["stdout", "stderr"],
        level: str,
        texts: Sequence[str],
        ids: str = "",
    ) -> None:
        """Take records; their lines are kept one by one."""
        self.pieces.append(list(texts))
        lines = [line for text in texts for line in text.split("\n")]
        self.lines += [Line(model, version, worker_id, stream, level, line, ids) for line in lines]

    @property
    def texts(self) -> list[str]:
        """The lines' texts alone."""
        return [line.text for line in self.lines]
