"""Metrics that handlers print are counted and kept out of the model log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pytest

from marserve.messages import Metric
from marserve.telemetry.logs.output_budget import OutputBudget
from marserve.telemetry.logs.worker_lines import WorkerLines
from marserve.telemetry.metrics.printed_metrics import PrintedMetrics

LINE = "[METRICS]Seen.Count:1|#ModelName:m,Level:Model|#type:COUNTER|#hostname:box,1717105307,id"


class House:
    """A worker log and a taker of metrics that remember."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.metrics: list[tuple[str, Metric]] = []
        self.budget = OutputBudget()
        self.printed = PrintedMetrics(self, self.take)

    def write(self, lines: WorkerLines) -> None:
        """Lines of a worker."""
        self.lines += lines.texts

    def take(self, model: str, metrics: Sequence[Metric]) -> None:
        """Metrics of a model."""
        self.metrics += [(model, metric) for metric in metrics]


@pytest.mark.parametrize("text", [LINE, f"INFO > {LINE}"])
def test_a_printed_metric_is_counted_and_not_logged(text: str) -> None:
    """Under the model whose worker printed it."""
    house = House()

    house.printed.write(WorkerLines("m", "1.0", "9000", "stdout", "INFO", [text]))

    assert house.lines == []
    assert [(model, metric.name, metric.kind) for model, metric in house.metrics] == [("m", "Seen", "counter")]


@pytest.mark.parametrize(
    ("stream", "text"),
    [("stdout", "hello"), ("stderr", LINE), ("stdout", f"see {LINE}"), ("stdout", "[METRICS]Seen: one")],
    ids=["another line", "standard error", "in the middle", "no metric"],
)
def test_every_other_line_is_logged(stream: Literal["stdout", "stderr"], text: str) -> None:
    """Also one that only looks like a metric: its author should find it."""
    house = House()

    house.printed.write(WorkerLines("m", "1.0", "9000", stream, "INFO", [text]))

    assert (house.lines, house.metrics) == ([text], [])


def test_of_a_group_of_ranks_one_counts() -> None:
    """All ranks run the same code; others' lines are neither counted nor logged."""
    house = House()

    for worker_id in ("9000", "9000.1", "9000.2"):
        house.printed.write(WorkerLines("m", "1.0", worker_id, "stdout", "INFO", [LINE]))

    assert (len(house.metrics), house.lines) == (1, [])


def test_lines_that_come_together_are_sorted_out() -> None:
    """Metrics are counted, the others are logged together and in order."""
    house = House()

    house.printed.write(WorkerLines("m", "1.0", "9000", "stdout", "INFO", ["one", LINE, "two", LINE]))

    assert (house.lines, len(house.metrics)) == (["one", "two"], 2)
    assert house.printed.budget is house.budget
