"""What a terminal is shown of the logs while a server runs in it: what models print, warnings, failed requests.

All lines are in the log files. A terminal that takes none holds up nothing: its lines wait in a bounded buffer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from marserve.messages import without_traces
from marserve.names import escaped
from marserve.telemetry.logs.line_ids import TRACEBACK
from marserve.telemetry.logs.line_writer import DescriptorSink, LineWriter
from marserve.telemetry.logs.log_limit import LogLimit
from marserve.telemetry.logs.logs import WorkerLog
from marserve.telemetry.logs.worker_lines import WorkerLines

_STDERR = 2
# Of an exception, in characters.
MOST_SAID = 200
# Warnings that are not shown again.
MOST_KEPT = 100


class TerminalLog(logging.Handler):
    """A handler of Python's logging, and a further outlet of what workers print. `shorten` cuts texts to what helps.

    Texts that are empty when they are cut are left out.
    """

    def __init__(self, shorten: Callable[[str], str], descriptor: int = _STDERR) -> None:
        super().__init__(logging.WARNING)
        self._shorten = shorten
        self._said: dict[str, None] = {}
        self._writer: LineWriter[str] = LineWriter(
            "terminal", DescriptorSink(descriptor), "\n".join, lambda count: f"… {count} lines were lost here"
        )
        self._writer.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Show a warning or an error of the server, with the traceback that it has of a worker, once."""
        text, traceback = record.getMessage(), getattr(record, TRACEBACK, None)
        if text not in self._said:  # such as a load that is tried again and again
            self._said[text] = None
            if len(self._said) > MOST_KEPT:
                del self._said[next(iter(self._said))]
            self.show([text, *([traceback] if traceback else [])])

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


_TRACEBACK = "Traceback (most recent call last):"


class ShownWorkerLog(WorkerLog):
    """A log of workers whose lines a terminal shows too.

    Without `shows_tracebacks` a request's exception is one line: the model, the exception, the request's id, and the
    command that shows the whole. `telemetry/logs/log_limit.py` bounds these lines, as clients cause them.
    """

    def __init__(self, log: WorkerLog, terminal: TerminalLog, *, shows_tracebacks: bool = True) -> None:
        self.budget = log.budget
        self._log, self._terminal, self._shows_tracebacks = log, terminal, shows_tracebacks
        self._limit = LogLimit()

    def write(self, lines: WorkerLines) -> None:
        """As `WorkerLog.write`."""
        self._log.write(lines)
        if self._shows_tracebacks:
            self._terminal.show(lines.texts)
            return
        now = time.monotonic()
        self._terminal.show(self._limit.sentences(now))
        shown = [self._line_of(lines.model, text, lines.ids, now) for text in lines.texts]
        self._terminal.show([line for line in shown if line])

    def _line_of(self, model: str, text: str, ids: str, now: float) -> str:
        said = failure_line(model, text, ids)
        if said is None:
            return f"{model}: {text}"
        admitted = self._limit.admit("failure", f"{model}: a request failed", model, len(said), now)
        return said if admitted else ""


def failure_line(model: str, text: str, ids: str) -> str | None:
    """The line for a record that ends with a request's traceback; None for other records."""
    if not ids or _TRACEBACK not in text:
        return None
    said = text.rstrip().rpartition("\n")[2].strip()
    said = said if len(said) <= MOST_SAID else f"{said[: MOST_SAID - 1]}…"
    request = without_traces(ids.partition(",")[0]).partition("/")[0]
    more = ids.count(",")
    others = f" and {more} more requests" if more else ""
    return f"{model}: {said}{others} (marserve logs {model} --request {request})"
