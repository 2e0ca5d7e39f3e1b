"""Which metrics the server begins with."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from marserve.app.building.metrics import build_metrics, declare_families
from marserve.errors import BadSettings
from marserve.machine.describe import describe_machine
from marserve.settings import load_settings
from marserve.telemetry.logs.logs import configure_logs


class Page:
    """Notes what is declared."""

    def __init__(self) -> None:
        self.families: dict[str, Any] = {}

    def declare(self, name: str, read: Any) -> None:
        """Note it."""
        self.families[name] = read


def test_families_are_read_off_the_part_that_keeps_them() -> None:
    """Each time anew, each from its own."""
    page: Any = Page()
    counted = {"a": 1.0}
    declare_families(
        page,
        [
            ("x_total", lambda numbers: dict(numbers)),
            ("x", lambda numbers: {"": float(len(numbers))}),
        ],
        counted,
    )
    counted["b"] = 2.0

    assert page.families["x_total"]() == {"a": 1.0, "b": 2.0}
    assert page.families["x"]() == {"": 2.0}


def test_a_metrics_file_that_is_none_keeps_the_server_from_starting(tmp_path: Path) -> None:
    """Its name and what is wrong are said."""
    (tmp_path / "metrics.yaml").write_text("ts_metrics: [")
    (tmp_path / "config.properties").write_text("model_store=.\nmetrics_config=metrics.yaml\n")
    settings = load_settings("marserve", {}, {}, tmp_path)
    logs = configure_logs(folder=tmp_path / "logs", to_stdout=False)
    try:
        with contextlib.ExitStack() as outer:
            outer.enter_context(pytest.raises(BadSettings, match=r"metrics\.yaml"))
            build_metrics(settings, logs, describe_machine({}), contextlib.AsyncExitStack())
    finally:
        logs.close()
