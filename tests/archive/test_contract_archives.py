"""The archives of TorchServe's contract: the good ones unpack and pass the checks, the odd ones are told apart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from marserve.archive.contents.manifest import Manifest, read_manifest
from marserve.archive.contents.model_config import ModelConfig, read_model_config
from marserve.archive.pickles.pickle_check import check_folder
from marserve.archive.reading.reader import unpack
from marserve.errors import BadArchive
from marserve.store.sources.local import LocalStore

MAKER = Path(__file__).resolve().parents[3] / "shared" / "contract" / "fixtures" / "make_fixtures.py"

REFUSED = {
    "bad_json.mar": "Failed to parse signature.json.",
    "not_zip.mar": "not_zip.mar is no model archive",
    "truncated.mar": "truncated.mar is no complete zip file",
    "slip.mar": "Refused archive member '../../slipped.txt'",
}
NAMELESS = {"empty.mar", "no_manifest.mar", "no_model.mar", "null_model.mar", "no_name.mar", "echo_dir_nomanifest"}
WARNED = {"config_odd.mar": 4, "config_bad.mar": 1, "config_missing.mar": 1}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> LocalStore:
    """The contract's archives that need no torch, made here."""
    if not MAKER.is_file():
        pytest.skip("the contract's archives are not beside this checkout (../shared/contract/fixtures)")
    folder = tmp_path_factory.mktemp("contract")
    subprocess.run([sys.executable, str(MAKER), str(folder), "--no-torch"], check=True, timeout=60, capture_output=True)
    return LocalStore(folder)


@pytest.mark.shared
def test_each_archive_of_the_contract_is_read_or_refused_as_it_should_be(store: LocalStore, tmp_path: Path) -> None:
    """By name: refused in these words, without a name of its own, with warnings, or simply good."""
    names = store.names()
    assert set(REFUSED) | NAMELESS | set(WARNED) <= set(names)

    for name in names:
        if name in REFUSED:
            with pytest.raises(BadArchive) as refusal:
                take_in(store, name, tmp_path)
            assert refusal.value.message.startswith(REFUSED[name])
            continue
        manifest, config = take_in(store, name, tmp_path)
        assert (manifest.model_name is None) is (name in NAMELESS), name
        assert manifest.has_model_entry is (name != "null_model.mar")
        assert len(config.warnings) == WARNED.get(name, 0), name
    assert not (tmp_path.parent / "slipped.txt").exists()


def take_in(store: LocalStore, name: str, scratch: Path) -> tuple[Manifest, ModelConfig]:
    """What a registration does before it looks at its parameters."""
    found = store.find(name)
    folder = found.path if found.kind == "folder" else scratch / name
    if found.kind != "folder":
        unpack(found.path, folder)
    check_folder(folder)
    manifest = read_manifest(folder)
    return manifest, read_model_config(folder, manifest)
