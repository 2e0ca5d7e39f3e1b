"""The benchmark of downloads, with little of everything: it measures what it says, and a folder is not copied."""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from support.nginx import program


@pytest.mark.system
def test_it_measures_with_real_servers_and_nginx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four figures; of a folder that is served in place the server writes no copy (a promise, whatever the machine)."""
    if not shutil.which(program()):
        pytest.skip("nginx is not where it can be started")
    downloads: Any = import_module("downloads")
    plan_module: Any = import_module("plan")
    for name, value in {"QUICK_LARGE_BYTES": 8_000_000, "QUICK_MODELS": 2, "MODEL_BYTES": 6_000_000}.items():
        monkeypatch.setattr(downloads, name, value)
    plan = plan_module.Plan(tmp_path, 1, True, None, lambda text: None)

    figures = {figure.name: figure for figure in [*downloads.measure(plan), *downloads.measure_start(plan)]}

    assert len(figures) == 4
    [written] = [figure for name, figure in figures.items() if name.startswith("written until")]
    assert 0 <= written.own[0] < 4
    assert all(value > 0 for name, figure in figures.items() if figure is not written for value in figure.own)
