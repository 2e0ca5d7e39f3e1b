"""A trial of a start: what would keep a server or its models from starting, and nothing left behind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from marserve.app.trial import try_start
from marserve.errors import BadSettings
from marserve.settings import load_settings
from support.archives import manifest, zip_of

GOOD = {"h.py": b"def handle(d, c):\n    return d\n", "MAR-INF/MANIFEST.json": manifest("good")}


def attempt(root: Path, lines: str, flags: Mapping[str, object] = {}) -> list[BadSettings]:
    """Try a start with these lines of settings in `root`, with the store beside them."""
    (root / "ts.properties").write_text(f"model_store=store\n{lines}")
    given = {"ts_config": str(root / "ts.properties"), **flags}
    return try_start(load_settings("torchserve", given, {}, root))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with a store of one sound archive."""
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "good.mar").write_bytes(zip_of(GOOD))
    return tmp_path


def test_a_start_that_would_succeed_leaves_nothing(root: Path) -> None:
    """No log, no key file, no folder of anything: all that was written is gone."""
    before = sorted(root.rglob("*"))

    assert attempt(root, "load_models=all\n") == []
    assert sorted(root.rglob("*")) == sorted([*before, root / "ts.properties"])


def test_a_file_of_metrics_that_does_not_load_is_found_at_its_line(root: Path) -> None:
    """The server would not start."""
    (root / "metrics.yaml").write_text("ts_metrics: [\n")

    (problem,) = attempt(root, "metrics_config=metrics.yaml\n")

    assert "is no YAML" in problem.message
    assert str(problem.source).endswith("ts.properties, line 2")


def test_every_model_of_the_start_is_looked_at(root: Path) -> None:
    """One that is missing and one that is damaged; the sound one is not told of."""
    (root / "store" / "cut.mar").write_bytes(b"PK cut")

    problems = attempt(root, "load_models=good.mar,lost.mar,cut.mar\n")

    assert [problem.message.split()[0] for problem in problems] == ["lost.mar", "cut.mar"]
    assert {problem.key for problem in problems} == {"load_models"}


def test_the_models_of_a_snapshot_are_looked_at(root: Path) -> None:
    """In place of those of load_models."""
    numbers = {"defaultVersion": True, "minWorkers": 1, "maxWorkers": 1, "batchSize": 1, "maxBatchDelay": 100}
    models = {"good": {"1.0": {**numbers, "marName": "bad.mar"}}}
    (root / "store" / "bad.mar").write_bytes(zip_of({"MAR-INF/MANIFEST.json": manifest("good")}))
    snapshot = json.dumps({"name": "s.cfg", "modelCount": 1, "models": models})

    (problem,) = attempt(root, f"load_models=lost.mar\nmodel_snapshot={snapshot}\n")

    assert problem.key == "model_snapshot"
    assert problem.message.startswith("bad.mar would not be loaded")


def test_nothing_is_fetched(root: Path) -> None:
    """An address that is allowed is left to the start; nothing answers at this one."""
    assert attempt(root, "allowed_urls=http://127.0.0.1:1/.*\nload_models=http://127.0.0.1:1/m.mar\n") == []


def test_a_taken_address_is_no_fault(root: Path) -> None:
    """TorchServe may still be running beside it: no port is looked at."""
    assert attempt(root, "inference_address=http://127.0.0.1:1\n") == []
