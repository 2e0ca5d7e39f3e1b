"""A model log that keeps what workers printed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple


class Line(NamedTuple):
    """One line, and who said it how."""

    model: str
    version: str
    worker_id: str
    stream: str
    level: str
    text: str


@dataclass
class KeptLines:
    """As `telemetry.logs.WorkerLog`, in memory."""

    lines: list[Line] = field(default_factory=list)

    def line(
        self, model: str, version: str, worker_id: str, stream: Literal["stdout", "stderr"], level: str, text: str
    ) -> None:
        """Take one line."""
        self.lines.append(Line(model, version, worker_id, stream, level, text))

    @property
    def texts(self) -> list[str]:
        """The lines' texts alone."""
        return [line.text for line in self.lines]
