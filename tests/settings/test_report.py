"""The block of lines that the server log begins with."""

from __future__ import annotations

from pathlib import Path

from marserve.settings import load_settings, startup_report


def test_the_report_has_torchserves_labels(tmp_path: Path) -> None:
    """Tools look for these; absent values are N/A."""
    (tmp_path / "config.properties").write_text("load_models=a.mar,b=c.mar\nallowed_urls=http://h/.*\n")
    (tmp_path / "model_store").mkdir()
    settings = load_settings("marserve", {}, {}, tmp_path)

    lines = startup_report(settings, version="1.2.3", cores=4, accelerators=0)

    assert lines[0] == "Torchserve version: 1.2.3"
    for line in (
        "Number of GPUs: 0",
        "Number of CPUs: 4",
        f"Config file: {tmp_path / 'config.properties'}",
        "Inference address: http://127.0.0.1:8080",
        f"Model Store: {tmp_path / 'model_store'}",
        "Initial Models: a.mar,b=c.mar",
        "Log dir: standard output only",
        "Default workers per model: 4",
        "Blacklist Regex: N/A",
        "Allowed Urls: http://h/.*",
        "Metrics mode: prometheus",
        "Model API enabled: true",
    ):
        assert line in lines
    assert len(lines) == 35


def test_default_workers_are_one_an_accelerator(tmp_path: Path) -> None:
    """And what was set goes before both."""
    (tmp_path / "model_store").mkdir()

    by_device = startup_report(load_settings("marserve", {}, {}, tmp_path), version="1", cores=4, accelerators=2)
    by_setting = startup_report(
        load_settings("marserve", {"default_workers_per_model": 3}, {}, tmp_path), version="1", cores=4, accelerators=2
    )

    assert "Default workers per model: 2" in by_device
    assert "Default workers per model: 3" in by_setting
