"""Tests for the weights that a configuration names by `checkpoint`: where they are looked for, and what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from marserve.archive.checkpoints.contents import BadCheckpoint
from marserve.archive.contents.model_config import parse_model_config
from marserve.archive.reading.reader import Limits
from marserve.errors import AddressNotAllowed, BadArchive
from marserve.model_options import Said
from marserve.registry.catalogue.plan import FoundCheckpoint, Unpacked
from marserve.registry.catalogue.snapshot import SnapshotVersion
from marserve.registry.intake.checkpoints.found import CheckpointFiles
from marserve.registry.intake.intake import Intake
from marserve.registry.intake.plan import make_plan
from marserve.registry.intake.registration import RegisterParameters, RegistryOptions
from marserve.store.sources.local import LocalStore
from support.archives import manifest, zip_of
from support.checkpoints import safetensors_bytes, save_in_pieces

WEIGHTS = safetensors_bytes({"a": ("F32", [2, 3])})


class Store:
    """A model store with an archive whose configuration names `checkpoint`."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "store"
        self.root.mkdir()
        self.intake = Intake(LocalStore(self.root), folder / "scratch", Limits())

    def take_in(
        self, checkpoint: str, files: dict[str, bytes] | None = None, instead: str | None = None, **model: Any
    ) -> Unpacked:
        """The archive `m.mar` with these files, taken in with another checkpoint `instead`."""
        said = {"handler": "base_handler", "modelFile": "model.py", "configFile": "c.yaml"} | model
        said = {key: value for key, value in said.items() if value is not None}
        members = {
            "MAR-INF/MANIFEST.json": manifest("m", **said),
            "model.py": b"class Net: pass\n",
            "c.yaml": f"checkpoint: {json.dumps(checkpoint)}\n".encode(),
            **(files or {}),
        }
        (self.root / "m.mar").write_bytes(zip_of(members))
        return self.intake.take_in("m.mar", None, instead)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """With a folder of weights in it."""
    store = Store(tmp_path)
    (store.root / "beside").mkdir()
    (store.root / "beside" / "model.safetensors").write_bytes(WEIGHTS)
    return store


def _checkpoint(unpacked: Unpacked) -> FoundCheckpoint:
    assert unpacked.checkpoint is not None
    return unpacked.checkpoint


def test_a_folder_of_the_archive_comes_first_and_may_be_mapped(store: Store) -> None:
    """Only the server writes where it unpacked it."""
    unpacked = store.take_in("beside", {"beside/model.safetensors": WEIGHTS})
    found = _checkpoint(unpacked)

    assert found.folder == (unpacked.folder / "beside").resolve()
    assert (found.may_map, found.is_beside) == (True, False)
    assert found.read.bytes == 24


def test_else_it_is_a_folder_of_the_model_store_and_is_not_mapped(store: Store) -> None:
    """Anyone may overwrite a file there, which ends a worker that has it mapped."""
    found = _checkpoint(store.take_in("beside"))

    assert found.folder == store.root / "beside"
    assert (found.may_map, found.is_beside) == (False, True)


def test_workers_get_the_folder_and_its_bytes_count_as_weights(store: Store) -> None:
    """One in the archive below the model's folder, wherever that is; one beside it by its path."""
    plans = [
        make_plan(RegisterParameters("m.mar"), store.take_in(name, files), RegistryOptions())
        for name, files in (("w/x", {"w/x/model.safetensors": WEIGHTS}), ("beside", None))
    ]
    inside, beside = (plan.load.checkpoint for plan in plans)

    assert inside is not None
    assert (inside.folder, inside.may_map, inside.size) == ("w/x", True, 24)
    assert beside is not None
    assert (beside.folder, beside.may_map, beside.size) == (str(store.root / "beside"), False, 24)
    assert [plan.facts.options.weight_bytes for plan in plans] == [24, 24]


@pytest.mark.parametrize(
    ("checkpoint", "more", "words"),
    [
        ("missing", {}, "neither the archive nor the model store has such a folder"),
        ("w/missing", {}, "there is no such folder in the archive"),
        ("../store/beside", {}, "there is no such folder in the archive"),
        ("/etc", {}, "neither the archive nor the model store has such a folder"),
        (".", {}, "neither the archive nor the model store has such a folder"),
        ("m.mar", {}, "is a file of the model store; a checkpoint is a folder"),
        ("beside", {"serializedFile": "w.pt"}, "names the weights w.pt as serializedFile; leave one out"),
        ("beside", {"modelFile": None}, "names no modelFile, whose class the weights are of"),
    ],
)
def test_what_names_no_checkpoint_is_refused(store: Store, checkpoint: str, more: Any, words: str) -> None:
    """With the word; nothing stays of the archive."""
    with pytest.raises(BadArchive) as raised:
        store.take_in(checkpoint, **more)

    assert raised.value.message.startswith(f"checkpoint of the model's configuration is {checkpoint}")
    assert words in raised.value.message
    assert list(store.intake.scratch.iterdir()) == []


class FakeFetcher:
    """Has fetched a folder of weights, and notes what is asked of it and released."""

    def __init__(self, folder: Path, file: bytes = WEIGHTS) -> None:
        self.folder, self.asked, self.released = folder, [], 0  # type: ignore[var-annotated]
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(file)

    def fetch_below(self, address: str, wanted: Any, otherwise: Path) -> Any:
        """A lease of the folder."""
        self.asked.append(
            (address, sorted(wanted.choose(["model.safetensors", "model.bin", "README.md"])), otherwise.name)
        )
        return self

    def release(self) -> None:
        """As a lease does."""
        self.released += 1


def test_an_address_is_fetched_mapped_and_held_until_the_version_goes(store: Store, tmp_path: Path) -> None:
    """Only servers write there; of what lies below it only a checkpoint's files are wanted."""
    fetcher = FakeFetcher(tmp_path / "fetched")
    store.intake._fetcher = fetcher  # type: ignore[assignment]

    unpacked = store.take_in("s3://bucket/weights/")
    found = _checkpoint(unpacked)

    assert (found.folder, found.may_map, found.is_beside) == (fetcher.folder, True, True)
    assert fetcher.asked == [("s3://bucket/weights/", ["model.safetensors"], "checkpoints")]
    plan = make_plan(RegisterParameters("m.mar"), unpacked, RegistryOptions())
    plan.borrowed().discard()
    assert fetcher.released == 0
    plan.discard()
    assert fetcher.released == 1


def test_a_bad_checkpoint_that_was_fetched_is_released_again(store: Store, tmp_path: Path) -> None:
    """With the sentence."""
    fetcher = FakeFetcher(tmp_path / "fetched", WEIGHTS[:-1])
    store.intake._fetcher = fetcher  # type: ignore[assignment]

    with pytest.raises(BadCheckpoint, match="it may be cut off"):
        store.take_in("s3://bucket/weights/")
    assert fetcher.released == 1


def test_without_a_fetcher_no_address_is_allowed(store: Store) -> None:
    """As for archives."""
    with pytest.raises(AddressNotAllowed):
        store.take_in("s3://bucket/weights/")


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["a.safetensors", "model.safetensors.index.json", "a.bin", "config.json"], [0, 1]),
        ([".metadata", "__0_0.distcp", "x.safetensors", "notes"], [0, 1]),
        (["a.bin"], []),
    ],
)
def test_of_a_prefix_only_a_checkpoints_files_are_wanted(names: list[str], chosen: list[int]) -> None:
    """The same weights often lie there in other formats."""
    assert list(CheckpointFiles(lambda: False).choose(names)) == [names[number] for number in chosen]


def test_a_bad_checkpoint_is_refused_by_its_own_sentence(store: Store) -> None:
    """In the archive and in the store."""
    (store.root / "beside" / "model.safetensors").write_bytes(WEIGHTS[:-1])

    with pytest.raises(BadCheckpoint, match=r"model.safetensors: .* it may be cut off"):
        store.take_in("beside")
    with pytest.raises(BadCheckpoint, match=r"model.safetensors: .* it may be cut off"):
        store.take_in("w", {"w/model.safetensors": WEIGHTS[:-1]})


@pytest.mark.parametrize("value", ["7", "s3://bucket/weights", "[a]", "''", "true", "x" * 3000])
def test_a_word_that_can_be_none_is_refused(value: str) -> None:
    """The key is strict: a model without its weights is none."""
    with pytest.raises(BadArchive, match=r"^checkpoint of the model's configuration is .*; it must be a folder"):
        parse_model_config(f"checkpoint: {value}\n".encode())


def test_a_document_and_a_snapshot_go_before_the_archive(store: Store) -> None:
    """And both say where; a later start without the document finds the same weights."""
    declared = RegisterParameters("m.mar", declared={"url": "m.mar", "checkpoint": "beside"})

    unpacked = store.take_in("missing", instead=declared.checkpoint)
    plan = make_plan(declared, unpacked, RegistryOptions())

    assert _checkpoint(unpacked).folder == store.root / "beside"
    assert plan.facts.options.checkpoint == "beside"
    workers = {"min_workers": 1, "max_workers": 1}
    restored = SnapshotVersion("m", "1.0", "m.mar", True, Said(plan.facts.asked, workers))
    assert RegisterParameters("m.mar", restored=restored).checkpoint == "beside"
    assert RegisterParameters("m.mar", restored=replace(restored, options=Said(workers))).checkpoint is None
    with pytest.raises(BadArchive, match=r"^checkpoint of the desired state is nowhere, and neither the archive nor"):
        store.take_in("beside", instead="nowhere")


def test_what_an_index_and_metadata_name_are_files_of_the_checkpoint(tmp_path: Path) -> None:
    """Each once; what is neither is refused by the sentence of a folder."""
    pytest.importorskip("torch")
    import torch

    files = CheckpointFiles(lambda: False)
    folder = save_in_pieces(tmp_path / "pieces", {"a": torch.ones(2, 3), "b": torch.ones(4)}, 2)
    index = {"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors", "c": "m-1.safetensors"}}
    heads = {"model.safetensors.index.json": json.dumps(index).encode()}
    heads[".metadata"] = (folder / ".metadata").read_bytes()

    named = {head: set(files.named_in(head, data)) for head, data in heads.items()}

    assert list(named.values()) == [{"m-1.safetensors", "m-2.safetensors"}, {"__0_0.distcp", "__1_0.distcp"}]
    assert [files.heads[head] > 0 for head in [*heads, "model.safetensors"]] == [True, True, False]
    for head, data in heads.items():
        with pytest.raises(BadCheckpoint, match=f"^The checkpoint cannot be used: {re.escape(head)}: "):
            files.named_in(head, data[:-3])
