"""A walk of the manifest's keys, as TorchServe's archiver writes them and its server and handlers read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from marserve.archive.contents.manifest import MANIFEST_PATH, read_manifest
from support.inventory import inventory

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
