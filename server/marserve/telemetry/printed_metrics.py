"""Takes metrics out of what workers print: lines that begin with `[METRICS]`, TorchServe's way from worker to server.

Our workers send numbers over the wire; such lines come from handlers that print them themselves, or call TorchServe's
older `emit_metrics`. They are counted and kept out of the model log. Knows no pipes: it stands before a worker log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from marserve.messages import Metric
from marserve.telemetry.metric_line import marked_part, parse_line


class WorkerLog(Protocol):
    """Where lines of workers go."""

    def line(
        self, model: str, version: str, worker_id: str, stream: Literal["stdout", "stderr"], level: str, text: str
    ) -> None:
        """Take one line; never blocks."""


class PrintedMetrics:
    """A worker log that hands metrics to `take(model, metrics)` and every other line on to `log`."""

    def __init__(self, log: WorkerLog, take: Callable[[str, Sequence[Metric]], None]) -> None:
        self._log = log
        self._take = take

    def line(
        self, model: str, version: str, worker_id: str, stream: Literal["stdout", "stderr"], level: str, text: str
    ) -> None:
        """Take one line. A metric that nobody can read stays in the log, where its author finds it."""
        said = marked_part(text) if stream == "stdout" else None
        metric = parse_line(said) if said is not None else None
        if metric is None:
            self._log.line(model, version, worker_id, stream, level, text)
        elif "." not in worker_id:  # of a group of ranks, which all run the same code, rank 0 counts
            self._take(model, [metric])
