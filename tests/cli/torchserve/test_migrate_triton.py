"""`marserve migrate triton`."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.command_line import marserve
from support.triton_models import NEGATIVE, write_config, write_negative

pytest.importorskip("onnx")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one model, in the folder where the command runs."""
    monkeypatch.chdir(tmp_path)
    write_negative(tmp_path / "models")
    write_config(tmp_path / "models", "negative", NEGATIVE)
    return tmp_path / "models"


def test_a_repository_is_imported_and_a_start_is_tried(root: Path) -> None:
    """Status 0 where nothing needs an action; `--all` lists what means the same."""
    ran = marserve("migrate", "triton", "models", "--all")

    assert ran.status == 0, ran.err
    assert "negative/config.pbtxt:4     max_batch_size 4: batchSize 4\n" in ran.out
    assert "migrated/config.properties  a start was tried with these settings, without workers\n" in ran.out
    assert ran.out.endswith(
        "models: 0 needs action, 3 differs, 4 works.\n"
        "migrated: 1 archive of 1 model. `marserve start` in this folder serves them.\n"
    )
    assert (root.parent / "migrated" / "model_store" / "negative-1.mar").is_file()


def test_scripts_get_the_archives_and_the_findings(root: Path) -> None:
    """Status 1 while a model needs an action; the others are written."""
    write_config(root, "odd", 'backend: "dali"')
    (root / "odd" / "1").mkdir()

    ran = marserve("migrate", "triton", root, "-o", "out", "--json")

    assert ran.status == 1
    assert (ran.document["output"], ran.document["counts"]["action"]) == ("out", 1)
    assert ran.document["archives"] == [{"archive": "negative-1.mar", "model": "negative", "version": "1"}]
    (action,) = [each for each in ran.document["findings"] if each["verdict"] == "action"]
    assert (action["file"], action["line"], action["fix"][:16]) == ("odd/config.pbtxt", 1, "export the model")
    assert (root.parent / "out" / "config.properties").is_file()


def test_a_dry_run_writes_nothing(root: Path) -> None:
    """Nor does an import of nothing."""
    dry = marserve("migrate", "triton", "models", "--dry-run", "--json")
    (root / "negative" / "config.pbtxt").write_text("}")
    nothing = marserve("migrate", "triton", "models")

    assert (dry.status, dry.document["isDryRun"], len(dry.document["archives"])) == (0, True, 1)
    assert nothing.status == 1
    assert "column 1: '}' stands where the name of a field should. Mend the line." in nothing.out
    assert nothing.out.endswith("No model can be imported; nothing was written.\n")
    assert sorted(path.name for path in root.parent.iterdir()) == ["models"]


def test_what_is_there_is_replaced_by_wish_alone(root: Path) -> None:
    """And only what the command wrote."""
    assert marserve("migrate", "triton", root).status == 0
    there = marserve("migrate", "triton", root)
    forced = marserve("migrate", "triton", root, "--force")
    (root.parent / "migrated" / "logs").mkdir()
    other = marserve("migrate", "triton", root, "-f")

    assert (there.status, forced.status, other.status) == (2, 0, 2)
    assert "migrated already exists. Use --force (-f)" in there.err
    assert "migrated is not replaced: it has logs" in other.err


def test_an_archive_that_a_server_would_refuse_is_said(root: Path) -> None:
    """The start that is tried finds it, such as a pickle that runs code beside the model."""
    (root / "negative" / "1" / "extra.pkl").write_bytes(b"cos\nsystem\n(S'true'\ntR.")

    ran = marserve("migrate", "triton", root)

    assert ran.status == 1
    assert "a start was tried and failed: negative-1.mar would not be loaded" in ran.out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["triton"], "takes the folder of Triton's model repository"),
        (["triton", "nowhere"], "nowhere is no folder"),
        (["triton", "models", "-o", "models/out"], "lie in each other"),
        (["triton", "models", "-o", "a/b"], "there is no folder a"),
        (["torchserve", "models"], "one folder is surveyed, or triton REPOSITORY is imported"),
        (["triton", "models", "--compare", "http://127.0.0.1:1"], "does not go with triton"),
        (["models", "--force"], "go with triton REPOSITORY"),
        (["models", "--dry-run"], "go with triton REPOSITORY"),
        (["models", "-o", "out"], "go with triton REPOSITORY"),
    ],
)
def test_words_that_do_not_belong_together_are_refused(root: Path, words: list[str], sentence: str) -> None:
    """Nothing is tried."""
    ran = marserve("migrate", *words)

    assert ran.status == 2
    assert sentence in ran.err
    assert sorted(path.name for path in root.parent.iterdir()) == ["models"]
