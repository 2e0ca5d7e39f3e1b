"""The archiver as Python calls it."""

from __future__ import annotations

import json
import zipfile
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

import pytest

from marserve.archive.writing.model_archiver import ModelArchiver, ModelArchiverConfig, RuntimeType
from marserve.errors import CannotArchive


@pytest.fixture
def config(tmp_path: Path) -> ModelArchiverConfig:
    """A handler and an extra file."""
    (tmp_path / "h.py").write_text("def handle(data, context):\n    return data\n")
    (tmp_path / "labels.json").write_text("{}")
    return ModelArchiverConfig(
        "shout",
        str(tmp_path / "h.py"),
        "1.0",
        extra_files=f"{tmp_path / 'labels.json'}, ",
        export_path=str(tmp_path / "store"),
    )


def test_an_archive_is_written(config: ModelArchiverConfig) -> None:
    """As the command line writes it."""
    ModelArchiver.generate_model_archive(config)

    with zipfile.ZipFile(Path(config.export_path, "shout.mar")) as archive:
        manifest = json.loads(archive.read("MAR-INF/MANIFEST.json"))
        assert {"h.py", "labels.json"} <= set(archive.namelist())
    assert manifest["runtime"] == RuntimeType.PYTHON.value
    assert manifest["model"]["handler"] == "h.py"


def test_one_that_is_there_stays_unless_forced(config: ModelArchiverConfig) -> None:
    """Raises; with `force` it is replaced."""
    ModelArchiver.generate_model_archive(config)

    with pytest.raises(CannotArchive, match="already exists"):
        ModelArchiver.generate_model_archive(config)
    config.force = True
    ModelArchiver.generate_model_archive(config)


def test_parsed_flags_make_a_configuration(config: ModelArchiverConfig) -> None:
    """Every flag by its name."""
    assert ModelArchiverConfig.from_args(Namespace(**asdict(config), further=1)) == config
