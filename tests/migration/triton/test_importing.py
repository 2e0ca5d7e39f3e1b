"""Tests for the import of whole repositories: what is written, and that nothing is of what cannot be used."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from marserve.errors import CannotArchive
from marserve.migration.triton.importing import check_output, plan_import, write_import
from marserve.migration.triton.repository import MOST_FILES
from support.triton_models import NEGATIVE, write_config, write_negative, write_onnx, write_torchscript

pytest.importorskip("onnx")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with one model of one version."""
    root = tmp_path / "models"
    write_negative(root)
    write_config(root, "negative", NEGATIVE)
    return root


def actions(root: Path) -> dict[str, str]:
    """What needs an action, by place."""
    return {each.place: f"{each.what}; {each.fix}" for each in plan_import(root).findings if each.verdict == "action"}


def configuration(root: Path, *, version: int = 1) -> dict[str, Any]:
    """The configuration of the only model's version."""
    (found,) = [each for each in plan_import(root).versions if each.number == version]
    read: dict[str, Any] = yaml.safe_load(found.plan.made["model-config.yaml"])
    return read


def test_a_folder_with_archives_and_settings_is_written_the_same_each_time(root: Path, tmp_path: Path) -> None:
    """The versions of a model, its default first; the archive has the model, a configuration and a declaration."""
    write_negative(root, version=12)
    (root / "negative" / "12" / "weights.bin").write_bytes(b"beside the model")
    write_config(root, "negative", f"{NEGATIVE} version_policy {{ all {{}} }}")
    one, other = tmp_path / "one", tmp_path / "other"

    for output in (one, other):
        write_import(plan_import(root), output, source_date_epoch=0)

    assert sorted(path.relative_to(one).as_posix() for path in one.rglob("*") if path.is_file()) == [
        "config.properties",
        "model_store/negative-1.mar",
        "model_store/negative-12.mar",
    ]
    settings = (one / "config.properties").read_text()
    assert "\nload_models=negative-12.mar,negative-1.mar\n" in settings
    assert str(tmp_path) not in settings
    for name in ("negative-1.mar", "negative-12.mar"):
        assert (one / "model_store" / name).read_bytes() == (other / "model_store" / name).read_bytes()
    with zipfile.ZipFile(one / "model_store" / "negative-12.mar") as archive:
        manifest = json.loads(archive.read("MAR-INF/MANIFEST.json"))["model"]
        declaration = json.loads(archive.read("MAR-INF/declaration.json"))
        assert archive.read("weights.bin") == b"beside the model"
    assert (manifest["modelName"], manifest["modelVersion"], manifest["handler"]) == ("negative", "12", "base_handler")
    assert manifest["serializedFile"] == "model.onnx"
    assert declaration["outputs"] == [{"name": "minus", "dtype": "float32", "shape": ["batch", 2]}]


def test_a_model_without_a_configuration_is_what_its_file_says(tmp_path: Path) -> None:
    """With a batch axis where every first size varies, as Triton completes it; else its whole shapes."""
    root = tmp_path / "models"
    write_negative(root)
    write_negative(tmp_path / "fixed", rows=3)

    batched, whole = configuration(root), configuration(tmp_path / "fixed")

    tensor = {"dtype": "float32", "shape": ["batch", 2]}
    assert batched["signature"] == {"inputs": {"x": tensor}, "outputs": {"minus": tensor, "size": tensor}}
    assert batched["batchSize"] == 4
    assert whole["signature"]["batch"] is False
    assert whole["signature"]["inputs"] == {"x": {"dtype": "float32", "shape": [3, 2]}}


def test_a_model_in_a_folder_of_its_files_name_brings_what_lies_beside_it(tmp_path: Path) -> None:
    """`model.onnx/model.onnx`, as Triton takes models with weights in files of their own."""
    root = tmp_path / "models"
    path = write_negative(root)
    path.rename(path.with_name("inner"))
    path.mkdir()
    path.with_name("inner").rename(path / "model.onnx")
    (path / "weights.bin").write_bytes(b"weights")
    write_config(root, "negative", NEGATIVE)

    (planned,) = plan_import(root).versions

    assert sorted(planned.plan.members) == ["model.onnx", "weights.bin"]


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ('name: "negative"\ninput [ { dims 2 } ]', "negative/config.pbtxt:2", "column 16: '2' stands where a colon"),
        (NEGATIVE.replace('"negative"', '"../negative"'), "negative/config.pbtxt:2", "name is '../negative', and the"),
        (
            NEGATIVE.replace("TYPE_FP32", "TYPE_FLOAT"),
            "negative/config.pbtxt:5",
            "data_type is 'TYPE_FLOAT'; it must be",
        ),
        (NEGATIVE.replace("TYPE_FP32", "TYPE_FP64"), "negative/config.pbtxt:5", "is float64 here and float32 in the"),
        (NEGATIVE.replace('"x"', '"y"'), "negative/config.pbtxt:5", "the model has no input 'y', but x"),
        (NEGATIVE.replace("[ 2 ]", "[ 3 ]"), "negative/config.pbtxt:5", "has dims [3] here and [2] in the model"),
        (NEGATIVE.replace("[ 2 ]", "[ 0 ]"), "negative/config.pbtxt:5", "dims of the input 'x' has 0"),
        (NEGATIVE.replace("size: 4", "size: -4"), "negative/config.pbtxt:4", "max_batch_size is -4"),
        (
            NEGATIVE.replace("size: 4", "size: 0"),
            "negative/config.pbtxt:5",
            "has dims [2] here and [-1, 2] in the model",
        ),
        (NEGATIVE.replace("onnxruntime_onnx", "tensorrt_plan"), "negative/config.pbtxt:3", "platform tensorrt_plan"),
        ('backend: "python"', "negative/config.pbtxt:1", "backend python: marserve runs ONNX"),
        ('default_model_filename: "../m.onnx"', "negative/config.pbtxt:1", "default_model_filename is '../m.onnx'"),
        ('default_model_filename: "m.onnx"', "negative/1", "there is no m.onnx, but model.onnx"),
        (
            NEGATIVE.replace("} ]\n", ' label_filename: "../x" } ]\n'),
            "negative/config.pbtxt:6",
            "label_filename is '../x'",
        ),
        (NEGATIVE.replace("} ]\n", ' label_filename: "l" } ]\n'), "negative/config.pbtxt:6", "there is no l beside"),
        (
            "version_policy { specific { versions: 3 } }",
            "negative/config.pbtxt:1",
            "names version 3, and there is version",
        ),
        ("sequence_batching { }", "negative/config.pbtxt:1", "sequence_batching"),
        ("model_transaction_policy { decoupled: true }", "negative/config.pbtxt:1", "decoupled"),
        ("batch_input [ { kind: BATCH_ELEMENT_COUNT } ]", "negative/config.pbtxt:1", "batch_input is made by Triton"),
    ],
)
def test_a_model_that_cannot_be_served_is_left_out_and_said_by_its_line(
    root: Path, text: str, place: str, words: str
) -> None:
    """With what was seen and a next step; the others are imported."""
    write_negative(root, "other")
    write_config(root, "negative", text)

    found = actions(root)

    assert list(found) == [place]
    assert words in found[place]
    assert [each.archive for each in plan_import(root).versions] == ["other-1.mar"]


def test_an_ensemble_is_said_with_its_steps(root: Path) -> None:
    """Its models are imported."""
    step = 'step [ { model_name: "negative" input_map { key: "x" value: "X" } }, { model_name: "b" } ]'
    write_config(root, "both", f'platform: "ensemble"\nensemble_scheduling {{ {step} }}')

    found = actions(root)

    assert list(found) == ["both/config.pbtxt:2"]
    assert "ensemble: negative(x=X) → b()" in found["both/config.pbtxt:2"]
    assert "context.call" in found["both/config.pbtxt:2"]


def test_a_version_without_a_model_is_left_out_alone(root: Path) -> None:
    """Of the latest two one remains; what is no version is said."""
    for name in ("2", "02", "notes"):
        (root / "negative" / name).mkdir()
    write_config(root, "negative", f"{NEGATIVE} version_policy {{ latest {{ num_versions: 2 }} }}")

    planned = plan_import(root)

    assert [each.archive for each in planned.versions] == ["negative-1.mar"]
    said = {each.place: each.what for each in planned.findings}
    assert said["negative/2"] == "there is no model.onnx, but no files"
    assert said["negative/02"].startswith("is no version")
    assert "negative/notes" not in said


@pytest.mark.parametrize("name", ["model.onnx", "model.pt"])
def test_a_file_that_is_no_model_is_refused(tmp_path: Path, name: str) -> None:
    """By its content."""
    (tmp_path / "models" / "m" / "1").mkdir(parents=True)
    (tmp_path / "models" / "m" / "1" / name).write_bytes(b"no model at all")

    (words,) = actions(tmp_path / "models").values()

    assert words.startswith(f"{name} is no ")


def test_what_leads_out_of_the_repository_is_refused(root: Path, tmp_path: Path) -> None:
    """A model's folder, a version, a file, a configuration; and links that lead nowhere, or in circles."""
    outside = tmp_path / "outside"
    write_negative(tmp_path, "outside")
    (outside / "config.pbtxt").write_text(NEGATIVE)
    (root / "whole").symlink_to(outside)
    (root / "loop").symlink_to(root / "loop")
    for name in ("version", "file", "config", "broken", "pipe", "deep"):
        (root / name).mkdir()
    (root / "version" / "1").symlink_to(outside / "1")
    for name in ("file", "config", "broken", "pipe", "deep"):
        write_negative(root, name)
    (root / "file" / "1" / "weights.bin").symlink_to("/etc/passwd")
    (root / "config" / "config.pbtxt").symlink_to(outside / "config.pbtxt")
    (root / "broken" / "1" / "weights.bin").symlink_to("nowhere")
    os.mkfifo(root / "pipe" / "1" / "weights.bin")
    (root / "deep" / "1" / "again").symlink_to(root / "deep")

    found = actions(root)

    assert {place: words.partition(";")[0] for place, words in found.items()} == {
        "whole": "it is a link that leads out of the repository",
        "loop": "it is a link that leads nowhere",
        "version/1": "it is a link that leads out of the repository",
        "version": "it has no version: no folder whose name is a number",
        "file": "weights.bin is a link that leads out of the repository",
        "config": "config.pbtxt is a link that leads out of the repository",
        "broken": "weights.bin is a link that leads nowhere",
        "pipe": "weights.bin is no regular file",
        "deep": "again is a link to a folder",
    }
    assert [each.model for each in plan_import(root).versions] == ["negative"]


def test_a_link_within_the_repository_is_a_file(root: Path) -> None:
    """Versions that share weights."""
    (root / "negative" / "2").mkdir()
    (root / "negative" / "2" / "model.onnx").symlink_to(root / "negative" / "1" / "model.onnx")

    assert [each.number for each in plan_import(root).versions] == [2]


def test_names_that_no_archive_may_have_are_refused(root: Path) -> None:
    """With what to do; hidden folders are none of Triton's models."""
    for name in ("-m", "a b", "ü", ".git"):
        write_negative(root, name)

    assert sorted(actions(root)) == ["-m", "a b", "ü"]


def test_too_large_a_configuration_and_too_many_files_are_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read without a bound."""
    monkeypatch.setattr("marserve.migration.triton.repository.MOST_FILES", 3)
    assert MOST_FILES == 10_000
    write_negative(root, "large")
    (root / "large" / "config.pbtxt").write_bytes(b"#" * (1 << 20 | 1))
    for number in range(3):
        (root / "negative" / "1" / f"{number}.bin").write_bytes(b"")

    found = actions(root)

    assert "it has more than 3 files" in found["negative/1"]
    assert "it has more than 1048576 bytes" in found["large/config.pbtxt:1"]


def test_an_archive_keeps_its_own_names_for_itself(root: Path) -> None:
    """A version's file of such a name would be lost."""
    (root / "negative" / "1" / "model-config.yaml").write_text("batchSize: 3")

    assert "it has a file model-config.yaml" in actions(root)["negative/1"]


def test_a_folder_without_models_says_what_to_name(tmp_path: Path) -> None:
    """Also one model's folder in the place of a repository, and a file."""
    write_config(tmp_path, "one", NEGATIVE)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")

    assert "name the folder that tritonserver has" in actions(tmp_path / "empty")["."]
    assert "it is one model's folder; name the folder above it" in actions(tmp_path / "one")["."]
    for name in ("file", "nowhere"):
        with pytest.raises(NotADirectoryError, match=f"{name} is no folder"):
            plan_import(tmp_path / name)


def test_only_what_an_import_wrote_is_replaced(root: Path, tmp_path: Path) -> None:
    """And only by wish; never the repository, or what it lies in."""
    planned, output = plan_import(root), tmp_path / "out"
    check_output(output, planned.root, force=False)
    write_import(planned, output)

    with pytest.raises(CannotArchive, match=r"already exists\. Use --force"):
        check_output(output, planned.root, force=False)
    check_output(output, planned.root, force=True)
    (output / "logs").mkdir()
    with pytest.raises(CannotArchive, match="it has logs, which marserve migrate triton does not write"):
        check_output(output, planned.root, force=True)
    (output / "logs").rmdir()
    (output / "config.properties").write_text("model_store=mine\n")
    with pytest.raises(CannotArchive, match=r"its config\.properties is not of"):
        check_output(output, planned.root, force=True)
    for place in (root, root / "out", tmp_path):
        with pytest.raises(CannotArchive, match="lie in each other"):
            check_output(place, planned.root, force=True)
    with pytest.raises(CannotArchive, match="there is no folder"):
        check_output(tmp_path / "a" / "b", planned.root, force=False)


def test_an_import_that_fails_leaves_what_was_there(root: Path, tmp_path: Path) -> None:
    """A file that goes away while archives are written."""
    output = tmp_path / "out"
    write_negative(root, "other")
    write_import(plan_import(root), output)
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    planned = plan_import(root)
    (root / "other" / "1" / "model.onnx").unlink()

    with pytest.raises(CannotArchive):
        write_import(planned, output)

    assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models", "out"]


def test_torchscript_has_its_tensors_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """Whatever the order of the configuration; a gap, and a configuration without tensors, are refused."""
    torch = pytest.importorskip("torch")
    root = tmp_path / "models"
    write_torchscript(root / "m" / "1" / "model.pt", lambda a, b: a - b, torch.ones(1, 2), torch.ones(1, 2))
    tensor = '{ name: "%s" data_type: TYPE_FP32 dims: [ -1 ] }'
    inputs = ", ".join(tensor % name for name in ("IN__1", "IN__0"))
    whole = f'backend: "pytorch" max_batch_size: 2 input [ {inputs} ] output {tensor % "OUT__0"}'

    write_config(root, "m", whole)
    signature = configuration(root)["signature"]
    write_config(root, "m", whole.replace("IN__1", "IN__2"))
    gap = actions(root)
    write_config(root, "m", whole.replace("IN__1", "b").replace("IN__0", "a"))
    other = configuration(root)["signature"]
    write_config(root, "m", whole.replace("TYPE_FP32", "TYPE_STRING"))
    texts = actions(root)
    write_config(root, "m", "max_batch_size: 2")
    none = actions(root)

    assert list(signature["inputs"]) == ["IN__0", "IN__1"]
    assert signature["inputs"]["IN__1"]["shape"] == ["batch", "IN__1_size_1"]
    assert "there is no input whose name ends in __1" in gap["m/config.pbtxt:1"]
    assert list(other["inputs"]) == ["b", "a"]
    assert "is string: a model here takes numbers" in texts["m/config.pbtxt:1"]
    assert "there is no input in the configuration" in none["m/1"]


def test_a_reshape_and_labels_become_the_signatures(tmp_path: Path) -> None:
    """The sizes that vary keep their names; a reshape of another size is refused."""
    root = tmp_path / "models"
    sizes: list[int | str] = ["n", "m", 2]
    write_onnx(
        root / "m" / "1" / "model.onnx", [("Abs", ["x"], ["y"])], {"x": ("FLOAT", sizes)}, {"y": ("FLOAT", sizes)}
    )
    text = """max_batch_size: 2
    input { name: "x" data_type: TYPE_FP32 dims: [ 2, -1 ] reshape { shape: [ -1, 2 ] } }
    output { name: "y" data_type: TYPE_FP32 dims: [ -1, 2 ] label_filename: "labels.txt" }"""
    write_config(root, "m", text)
    (root / "m" / "labels.txt").write_text("cat\n")

    signature = configuration(root)["signature"]
    (planned,) = plan_import(root).versions
    write_config(root, "m", text.replace("shape: [ -1, 2 ]", "shape: [ -1, 3 ]"))

    assert signature["inputs"]["x"] == {
        "dtype": "float32",
        "shape": ["batch", 2, "x_size_2"],
        "reshape": ["batch", "x_size_2", 2],
    }
    assert signature["outputs"]["y"]["labels"] == "labels.txt"
    assert sorted(planned.plan.members) == ["labels.txt", "model.onnx"]
    assert "do not hold equally many values" in actions(root)["m/config.pbtxt:2"]


def test_a_file_whose_name_is_no_text_is_refused(root: Path) -> None:
    """No archive could have it."""
    try:
        Path(os.fsdecode(bytes(root / "negative" / "1" / "x") + b"\xff")).write_bytes(b"")
    except OSError:
        pytest.skip("this file system has no such names")

    assert list(actions(root)) == ["negative/1"]


def test_a_backend_is_found_by_the_file_of_any_version(root: Path) -> None:
    """Where the configuration names none; with neither, that is said."""
    (root / "negative" / "2").mkdir()
    write_config(root, "negative", "version_policy { all {} }")
    (root / "empty" / "1").mkdir(parents=True)

    planned = plan_import(root)

    assert [each.archive for each in planned.versions] == ["negative-1.mar"]
    assert "neither backend nor platform is said" in actions(root)["empty"]
