"""What a terminal is shown of the logs while `marserve run` serves: what the model prints, and warnings.

All lines are in the log files. A terminal that takes none holds up nothing: its lines wait in a bounded buffer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from marserve.names import escaped
from marserve.telemetry.logs.line_ids import TRACEBACK
from marserve.telemetry.logs.line_writer import DescriptorSink, LineWriter
from marserve.telemetry.logs.logs import WorkerLog

_STDERR = 2


class TerminalLog(logging.Handler):
    """A handler of Python's logging, and a further outlet of what workers print. `shorten` cuts texts to what helps.

    Texts that are empty when they are cut are left out.
    """

    def __init__(self, shorten: Callable[[str], str], descriptor: int = _STDERR) -> None:
        super().__init__(logging.WARNING)
        self._shorten = shorten
        self._writer: LineWriter[str] = LineWriter(
            "terminal", DescriptorSink(descriptor), "\n".join, lambda count: f"… {count} lines were lost here"
        )
        self._writer.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Show a warning or an error of the server, with the traceback that it has of a worker."""
        traceback = getattr(record, TRACEBACK, None)
        self.show([record.getMessage(), *([traceback] if traceback else [])])

    def show(self, texts: Sequence[str]) -> None:
        """Show lines. Never blocks."""
        for text in texts:
            shown = self._shorten(text)
            if shown:
                self._writer.write(escaped(shown, keep="\n\t"))

    def close(self) -> None:
        """Write what waits."""
        super().close()
        self._writer.close(1.0)


class ShownWorkerLog(WorkerLog):
    """A log of workers whose lines a terminal shows too."""

    def __init__(self, log: WorkerLog, terminal: TerminalLog) -> None:
        self.budget = log.budget
        self._log, self._terminal = log, terminal

    def write(self, *record: Any, **further: Any) -> None:
        """As `WorkerLog.write`."""
        self._log.write(*record, **further)
        self._terminal.show(record[5])
