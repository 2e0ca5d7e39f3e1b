"""`marserve plan --estimate`: the memory of weights by rank, without a server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from marserve.cli.changes.plan import plan
from support.archives import manifest, zip_of
from support.checkpoints import safetensors_bytes

app = typer.Typer()
app.command()(plan)
runner = CliRunner(env={"COLUMNS": "200"})
WEIGHTS = safetensors_bytes({"up.weight": ("F32", [32, 8]), "up.bias": ("F32", [32]), "n.weight": ("F32", [8])})
PARALLEL = "parallel: {mesh: {tp: 2}, plan: {up: colwise}}\n"


def _archive(folder: Path, config: str, name: str = "w/m.safetensors", **model: str) -> Path:
    said = manifest("m", "base_handler", modelFile="net.py", configFile="c.yaml", **model)
    path = folder / "m.mar"
    path.write_bytes(zip_of({"MAR-INF/MANIFEST.json": said, "net.py": b"", "c.yaml": config.encode(), name: WEIGHTS}))
    return path


def _ask(source: Path, *more: str) -> dict[str, object]:
    result = runner.invoke(app, [str(source), "--estimate", "--json", *more])
    assert result.exit_code in (0, 1), result.output
    found: dict[str, object] = json.loads(result.stdout)
    return found


def test_a_checkpoint_of_an_archive_is_divided_by_its_plan(tmp_path: Path) -> None:
    """For a person and for a script."""
    path = _archive(tmp_path, "checkpoint: w\n" + PARALLEL)

    found = _ask(path)
    shown = runner.invoke(app, [str(path), "--estimate"])

    assert found["weightBytes"] == 1024 + 128 + 32
    assert (found["ranks"], found["bytesOfARank"], found["problems"]) == (2, (1024 + 128) // 2 + 32, [])
    assert not found["isMapped"]
    assert shown.exit_code == 0
    assert [line.split()[0] for line in shown.stdout.splitlines()[:3]] == ["rank", "0", "1"]
    assert "3 tensors, 1.2 kB together" in shown.stdout


def test_one_process_maps_safetensors_of_its_archive(tmp_path: Path) -> None:
    """Not a folder that lies in a store."""
    assert _ask(_archive(tmp_path, "checkpoint: w\n"))["isMapped"] is True
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "m.safetensors").write_bytes(WEIGHTS)
    found = _ask(tmp_path / "w")
    assert (found["isMapped"], found["tensors"], found["bytesOfARank"]) == (False, 3, 1184)


def test_files_in_folders_below_the_index_are_weighed(tmp_path: Path) -> None:
    """Of a folder, and of an archive."""
    index = json.dumps({"weight_map": {"a": "x/m.safetensors", "b": "y/m.safetensors"}}).encode()
    files = {"w/model.safetensors.index.json": index}
    files |= {f"w/{folder}/m.safetensors": safetensors_bytes({name: ("F32", [8])}) for name, folder in ("ax", "by")}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    said = manifest("m", "base_handler", modelFile="net.py", configFile="c.yaml")
    others = {"MAR-INF/MANIFEST.json": said, "net.py": b"", "c.yaml": b"checkpoint: w\n"}
    (tmp_path / "m.mar").write_bytes(zip_of(others | files))

    for source in (tmp_path / "w", tmp_path / "m.mar"):
        found = _ask(source)
        assert (found["tensors"], found["weightBytes"]) == (2, 64)


def test_weights_in_the_archive_count_as_well(tmp_path: Path) -> None:
    """By their header, or else as large as they are."""
    one = _ask(_archive(tmp_path, PARALLEL, "m.safetensors", serializedFile="m.safetensors"))
    other = _ask(_archive(tmp_path, PARALLEL, "m.pt", serializedFile="m.pt"))

    assert (one["ranks"], one["tensors"]) == (2, 3)
    assert (other["ranks"], other["tensors"], other["weightBytes"]) == (1, None, len(WEIGHTS))


@pytest.mark.parametrize("leads_out", ["absolute", "above", "linked"])
def test_headers_beside_the_archive_are_not_read_for_it(leads_out: str, tmp_path: Path) -> None:
    """A name that a stranger wrote would show what lies in other folders."""
    beside, folder = tmp_path / "beside", tmp_path / "archive"
    for each in (beside, folder):
        each.mkdir()
    (beside / "m.safetensors").write_bytes(WEIGHTS)
    named = {"absolute": str(beside), "above": "../beside", "linked": "link"}[leads_out]
    (folder / "link").symlink_to(beside)
    (folder / "MAR-INF").mkdir()
    said = manifest("m", "base_handler", modelFile="net.py", configFile="c.yaml")
    (folder / "MAR-INF" / "MANIFEST.json").write_bytes(said)
    (folder / "c.yaml").write_text(f"checkpoint: {named}\n")

    result = runner.invoke(app, [str(folder), "--estimate"])

    assert result.exit_code == 1
    assert "lies apart from it" in result.stderr


def test_a_plan_that_does_not_fit_has_status_1(tmp_path: Path) -> None:
    """With the sentence."""
    path = _archive(tmp_path, "checkpoint: w\n" + PARALLEL.replace("up:", "upp:"))

    result = runner.invoke(app, [str(path), "--estimate"])

    assert result.exit_code == 1
    assert "Problem: upp matches no module whose weights are there." in result.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--estimate"], 2, "--estimate is of one archive or folder"),
        (["gone", "--estimate"], 2, "gone cannot be read (No such file or directory)"),
        (["m.mar", "--estimate"], 1, "its checkpoint elsewhere lies apart from it"),
        (["text", "--estimate"], 1, "text is no zip file"),
        ([".", "--estimate"], 1, "it holds neither .metadata"),
    ],
)
def test_what_cannot_be_estimated_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], status: int, words: str
) -> None:
    """And no traceback."""
    monkeypatch.chdir(tmp_path)
    _archive(tmp_path, "checkpoint: elsewhere\n")
    (tmp_path / "text").write_text("text")

    result = runner.invoke(app, arguments)

    assert result.exit_code == status
    assert words in result.stderr
    assert "Traceback" not in result.output
