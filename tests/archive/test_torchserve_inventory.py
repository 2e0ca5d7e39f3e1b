"""A walk of what an archive can say to TorchServe: each key of `model-config.yaml` and of the manifest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from marserve.archive.manifest import MANIFEST_PATH, Manifest, read_manifest
from marserve.archive.model_config import KEYS, ModelConfig, read_model_config
from support.inventory import inventory

# What a key may well be set to, where its type does not say it.
SAMPLES: dict[str, Any] = {
    "cpu|gpu": "gpu",
    "list[int]": [0, 1],
    "pp|tp|pptp|custom": "pp",
    "map": {"nproc-per-node": 2},
    "string|map": {"enable": True},
    "int": 7,
    "bool": True,
}


def read(folder: Path, document: dict[str, Any]) -> ModelConfig:
    """A configuration with these keys."""
    (folder / "model-config.yaml").write_text(yaml.safe_dump(document))
    return read_model_config(folder, Manifest(config_file="model-config.yaml"))


@pytest.mark.parametrize("entry", inventory("model_config_keys"), ids=lambda entry: entry["key"])
def test_every_key_of_model_config_is_read(tmp_path: Path, entry: dict[str, Any]) -> None:
    """By the server under its attribute, without a warning; handlers find theirs in the document."""
    name = entry["key"]
    sample = SAMPLES[entry["type"]]

    config = read(tmp_path, {"minWorkers": 1, name: sample} if name == "maxWorkers" else {name: sample})

    assert config.warnings == []
    assert config.document is not None
    assert config.document[name] == sample
    if entry.get("read_by") != "handler":
        attribute = next(key.attribute for key in KEYS if key.name == name)
        assert getattr(config, attribute) != getattr(ModelConfig(), attribute)


def test_torchruns_words_are_taken(tmp_path: Path) -> None:
    """Those that the inventory does not call ignored count; none is warned about."""
    (entry,) = [entry for entry in inventory("model_config_keys") if entry["key"] == "torchrun"]
    words = {word["key"]: word["default"] for word in entry["keys"] if word["default"] is not None}

    config = read(tmp_path, {"parallelType": "tp", "torchrun": words | {"nproc-per-node": 2}})

    assert config.warnings == []
    assert config.parallel_level == 2


# Keys that TorchServe itself does nothing with: they stay in the document that handlers see.
ONLY_IN_THE_DOCUMENT = {"model.extensions", "model.version", "model.description"}


@pytest.mark.parametrize("entry", inventory("manifest_keys"), ids=lambda entry: entry["key"])
def test_every_key_of_the_manifest_is_read(tmp_path: Path, entry: dict[str, Any]) -> None:
    """Under its attribute, and in the document as handlers see it."""
    where, _, name = entry["key"].rpartition(".")
    document: dict[str, Any] = {"createdOn": "x", "archiverVersion": "x"}
    (document.setdefault("model", {}) if where else document)[name] = "sample"
    (tmp_path / MANIFEST_PATH).parent.mkdir()
    (tmp_path / MANIFEST_PATH).write_text(json.dumps(document))

    manifest = read_manifest(tmp_path)

    assert manifest.document == document
    if entry["key"] not in ONLY_IN_THE_DOCUMENT:
        held = {
            getattr(manifest, slot) for slot in manifest.__dataclass_fields__ if slot not in ("document", "warnings")
        }
        assert "sample" in held
