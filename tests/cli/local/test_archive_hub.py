"""`marserve archive hf://…`: the refusals of `marserve run`, and a complete archive of what that serves."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from marserve.archive.writing.sources import Wishes
from marserve.archive.writing.staging import Staging
from marserve.cli.local.archive import archive
from marserve.cli.local.hub import HubModel, fetch_model
from marserve.cli.output import Output
from marserve.cli.run.source import LocalModel
from marserve.settings import load_settings
from support.hub_server import HubProgram, HubServer, hub_server
from support.server import poll

pytest.importorskip("huggingface_hub")

app = typer.Typer()
app.command()(archive)

CONFIG = b'{"architectures": ["BertForSequenceClassification"], "model_type": "bert"}'
FILES = {
    "config.json": CONFIG,
    "model.safetensors": b"weights" * 1000,
    "tokenizer.json": b"{}",
    "1_Pooling/config.json": b"{}",
    "pytorch_model.bin": b"pickle",
    "handler.py": b"raise SystemExit",
}
PACKED = {"config.json", "model.safetensors", "tokenizer.json", "1_Pooling/config.json"}


@pytest.fixture(scope="module")
def shared_hub() -> Iterator[HubServer]:
    """A hub with a repository of each kind."""
    with hub_server() as server:
        server.commit("org/film", FILES)
        server.commit("org/pickles", {"config.json": CONFIG, "pytorch_model.bin": b"pickle"})
        server.commit("org/code", {"model.py": b"", "README.md": b""})
        server.commit("org/other", {"config.json": b"{}", "model.safetensors": b""})
        server.commit("org/archive", {**FILES, "a/m.mar": b"PK"})
        server.commit("org/unpacked", {**FILES, "MAR-INF/MANIFEST.json": b"{}"})
        server.commit("org/gated", FILES)
        server.gated.add("org/gated")
        yield server


@pytest.fixture
def hub(shared_hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """The hub, which the environment names, with an empty cache, working directory and temporary folder."""
    monkeypatch.setattr(subprocess, "Popen", HubProgram)
    for name in ("here", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    for name in [name for name in os.environ if name.startswith(("HF_", "HUGGING"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_ENDPOINT", shared_hub.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    shared_hub.stuck = None
    shared_hub.asked.clear()
    return shared_hub


def run(*arguments: str) -> Result:
    """Run the command."""
    return CliRunner(env={"COLUMNS": "300", "SOURCE_DATE_EPOCH": "0"}).invoke(app, arguments)


def fetched_to_run(address: str, wishes: Wishes, folder: Path) -> HubModel:
    """What `marserve run` serves of an address."""
    (folder / "model_store").mkdir()
    settings = load_settings("marserve", {}, {}, folder, reads_file=False)
    return fetch_model(address, wishes, settings, folder / "links", Output(as_json=True))


def left_behind(folder: Path) -> list[Path]:
    """What is in the working directory and the temporary folder, hidden files too."""
    return [*(folder / "here").iterdir(), *(folder / "temporary").iterdir()]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["hf://org/film"], "hf://org/film names no revision"),
        (["hf://org@main"], "is named by hf://OWNER/NAME@REVISION"),
        (["hf://org/film@v9"], "hf://org/film@v9 cannot be archived: org/film has no revision v9"),
        (["hf://org/none@main"], "the hub has no org/none"),
        (["hf://org/pickles@main"], "org/pickles has no weights that end in .safetensors"),
        (["hf://org/code@main"], "org/code has no config.json; archive packs models of transformers"),
        (["hf://org/gated@main"], "org/gated is gated: ask for access at the hub, and set a token (HF_TOKEN)"),
        (["hf://org/film@main", "--task", "sentiment"], "--task takes text-classification, "),
        (["hf://org/film@main", "--handler", "transformers"], "leave out --handler and --model-file."),
        (["hf://org/film@main/config.json"], "hf://org/film@main/config.json names one file of a repository"),
        (["hf://org/archive@main"], "org/archive is an archive already (a/m.mar); archive packs models of"),
        (["hf://org/unpacked@main"], "org/unpacked is an archive already (MAR-INF/MANIFEST.json); archive packs"),
    ],
)
def test_what_run_refuses_is_one_sentence_and_status_2_before_anything_is_fetched_or_made(
    hub: HubServer, tmp_path: Path, arguments: list[str], words: str
) -> None:
    """Beside them what is an archive already, which a server loads as it is."""
    result = run(*arguments)

    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert not [path for _, path in hub.asked if path.endswith((".safetensors", ".mar"))]
    assert not left_behind(tmp_path)


@pytest.mark.system
def test_an_archive_in_the_cache_is_refused_while_the_hub_is_away(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same words."""
    fetched_to_run("hf://org/archive@main", Wishes(), tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    result = run("hf://org/archive@main")

    assert result.exit_code == 2, result.output
    assert "org/archive is an archive already (a/m.mar); archive packs models of transformers." in result.stderr
    assert not left_behind(tmp_path)


def test_an_archive_of_the_hub_is_registered_by_the_next_step(hub: HubServer) -> None:
    """At its commit, as it can be typed."""
    result = run("hf://org/archive@main")

    assert f"marserve register hf://org/archive@{hub.branches['org/archive', 'main']}" in result.stderr


def test_a_folder_of_another_library_leaves_nothing(hub: HubServer, tmp_path: Path) -> None:
    """Its config.json, which names no class of transformers, is fetched to be looked at."""
    result = run("hf://org/other@main")

    assert result.exit_code == 2, result.output
    assert "is not one of transformers; archive packs models of transformers." in result.stderr
    assert not left_behind(tmp_path)


@pytest.mark.system
@pytest.mark.parametrize("arguments", [["--name", "no/name"], ["--version", "a\nb"], ["-c", "gone.yaml"]])
def test_what_cannot_be_in_an_archive_leaves_nothing(hub: HubServer, tmp_path: Path, arguments: list[str]) -> None:
    """By the rules of any source."""
    result = run("hf://org/film@main", *arguments)

    assert result.exit_code == 2, result.output
    assert not left_behind(tmp_path)


@pytest.mark.system
@pytest.mark.parametrize("variables", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
def test_a_hub_that_is_not_reached_is_status_1_unless_the_cache_has_the_model(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    """Another try may help."""
    with monkeypatch.context() as away:
        for name, value in variables.items():
            away.setenv(name, value)
        failed = run("hf://org/film@main")
    assert failed.exit_code == 1, failed.output
    assert not left_behind(tmp_path)
    run("hf://org/film@main", "-o", "first")

    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    again = run("hf://org/film@main", "-o", "second")

    assert again.exit_code == 0, again.output
    assert Path("first/film.mar").read_bytes() == Path("second/film.mar").read_bytes()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_it_is_fetched_leaves_nothing(
    hub: HubServer, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    """With the status of a command that this signal ended, and the signal's handler is as before."""
    hub.stuck = threading.Event()
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def end_when_asked() -> None:
        for _ in poll(60, "the weights asked for"):
            if [path for _, path in hub.asked if path.endswith(".safetensors")]:
                break
        os.kill(os.getpid(), number)

    ending = threading.Thread(target=end_when_asked)
    ending.start()
    try:
        result = run("hf://org/film@main")
    finally:
        hub.stuck.set()
        ending.join()
        after = signal.signal(signal.SIGTERM, before)

    assert result.exit_code == status, result.output
    assert after is signal.SIG_DFL
    assert not left_behind(tmp_path)


def test_what_is_packed_is_what_run_serves_byte_for_byte(hub: HubServer, tmp_path: Path) -> None:
    """Also the name, the task in the configuration, and the manifest; as files, and no code."""
    commit = hub.branches["org/film", "main"]
    result = run("hf://org/film@main", "--task", "fill-mask", "--format", "no-archive")
    wishes = Wishes(task="fill-mask")
    found = fetched_to_run("hf://org/film@main", wishes, tmp_path)
    with contextlib.closing(LocalModel(str(found.path), wishes, Staging(tmp_path / "models"))) as model:
        model.find()
        [served] = (model.staging.root / model.stage_first(print)).iterdir()

    packed = Path("film")
    own = {"MAR-INF/MANIFEST.json", "model-config.yaml"}
    assert result.exit_code == 0, result.output
    assert f"): model film of hf://org/film@{commit}, version 1.0, handler transformers" in result.stdout
    assert contents(packed).keys() == PACKED | own
    assert without_date(contents(packed)) == without_date(contents(served))
    assert not [path for path in packed.rglob("*") if path.is_symlink()]
    assert [path.name for path in left_behind(tmp_path)] == ["film"]


def test_an_archive_is_complete_and_says_where_it_is_from(hub: HubServer, tmp_path: Path) -> None:
    """A zip file of the fetched bytes, under the name that is asked for; a script gets the commit."""
    commit = hub.branches["org/film", "main"]

    result = run(f"hf://org/film@{commit}", "--name", "reviews", "--version", "2", "--json")

    document = json.loads(result.stdout)
    assert result.exit_code == 0, result.output
    assert (document["path"], document["model"], document["version"]) == ("reviews.mar", "reviews", "2")
    assert document["source"] == f"hf://org/film@{commit}"
    with zipfile.ZipFile("reviews.mar") as file:
        assert {name: file.read(name) for name in PACKED} == {name: FILES[name] for name in PACKED}
        assert set(file.namelist()) == PACKED | {"MAR-INF/MANIFEST.json"}
    assert [path.name for path in left_behind(tmp_path)] == ["reviews.mar"]


def test_a_dry_run_writes_no_archive_and_names_files_that_stay(hub: HubServer, tmp_path: Path) -> None:
    """Those of the hub's cache, where they were fetched for the look."""
    result = run("hf://org/film@main", "--dry-run", "--json")

    document = json.loads(result.stdout)
    assert result.exit_code == 0, result.output
    assert {member["name"] for member in document["members"]} == PACKED
    assert all(Path(member["file"]).is_relative_to(tmp_path / "cache") for member in document["members"])
    assert all(Path(member["file"]).is_file() for member in document["members"])
    assert not left_behind(tmp_path)


def contents(folder: Path) -> dict[str, bytes]:
    """The files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def without_date(files: dict[str, bytes]) -> dict[str, object]:
    """The files with the manifest read, less its date: that of the archive is said by a variable."""
    manifest = json.loads(files["MAR-INF/MANIFEST.json"])
    return {**files, "MAR-INF/MANIFEST.json": {**manifest, "createdOn": ""}}
