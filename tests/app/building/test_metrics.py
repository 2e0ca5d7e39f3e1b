"""Which metrics the server begins with."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from marserve.app.building.cannot_start import CannotStart
from marserve.app.building.metrics import build_metrics, build_recorder, declare_families
from marserve.errors import BadSettings
from marserve.machine.describe import describe_machine
from marserve.settings import load_settings
from marserve.telemetry.logs.logs import configure_logs
from marserve.telemetry.recorder import Recorder


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


def recorder_for(folder: Path, stack: contextlib.ExitStack, **settings: str) -> Recorder | None:
    """The recorder of a server with these settings."""
    file = folder / "config.properties"
    file.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    return build_recorder(load_settings("marserve", {}, {}, folder), stack)


def test_requests_are_recorded_unless_that_is_switched_off(tmp_path: Path) -> None:
    """In memory, without a file."""
    with contextlib.ExitStack() as stack:
        assert type(recorder_for(tmp_path, stack)) is Recorder
        assert recorder_for(tmp_path, stack, flight_recorder_size="0") is None


def test_a_recorders_file_that_cannot_be_had_keeps_the_server_from_starting(tmp_path: Path) -> None:
    """It is named with its key; another server may have it."""
    path = tmp_path / "requests"
    with contextlib.ExitStack() as stack:
        assert recorder_for(tmp_path, stack, flight_recorder_file=str(path)) is not None
        with pytest.raises(CannotStart, match=f"flight_recorder_file cannot be used: {path} belongs to another server"):
            recorder_for(tmp_path, stack, flight_recorder_file=str(path))
    with contextlib.ExitStack() as stack:
        assert recorder_for(tmp_path, stack, flight_recorder_file=str(path)) is not None
