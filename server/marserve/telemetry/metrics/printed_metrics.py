"""Takes metrics out of what workers print: lines that begin with `[METRICS]`, as TorchServe's workers send them.

marserve's workers send numbers over the wire. Such lines come from handlers that print them themselves, or call
TorchServe's older `emit_metrics`. They are counted and kept out of the model log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from marserve.messages import Metric
from marserve.telemetry.logs.logs import WorkerLog
from marserve.telemetry.logs.output_budget import OutputBudget
from marserve.telemetry.logs.worker_lines import WorkerLines
from marserve.telemetry.metrics.metric_line import MARK, marked_part, parse_line


class PrintedMetrics:
    """A worker log that passes metrics to `take(model, metrics)` and every other line to `log`."""

    def __init__(self, log: WorkerLog, take: Callable[[str, Sequence[Metric]], None]) -> None:
        self._log = log
        self._take = take

    @property
    def budget(self) -> OutputBudget:
        """The budget for all workers; metrics count like other lines."""
        return self._log.budget

    def write(self, lines: WorkerLines) -> None:
        """Take records. A metric that cannot be parsed stays in the log, where its author finds it."""
        if lines.stream == "stdout" and any(MARK in text for text in lines.texts):
            texts, metrics = _sorted_out(lines.texts)
            if metrics and "." not in lines.worker_id:  # all ranks of a group run the same code, so only rank 0 counts
                self._take(lines.model, metrics)
            lines = lines._replace(texts=texts)
        if lines.texts:
            self._log.write(lines)


def _sorted_out(texts: Sequence[str]) -> tuple[list[str], list[Metric]]:
    """The lines without a metric, and the metrics of the others."""
    others: list[str] = []
    metrics: list[Metric] = []
    for text in [line for each in texts for line in (each.split("\n") if MARK in each else [each])]:
        said = marked_part(text)
        metric = parse_line(said) if said is not None else None
        if metric is None:
            others.append(text)
        else:
            metrics.append(metric)
    return others, metrics
