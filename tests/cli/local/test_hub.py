"""`marserve run hf://…`: what is fetched, what is served of it, and each refusal with its status."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from marserve.archive.writing.sources import Wishes, plan_source
from marserve.archive.writing.staging import Staging
from marserve.cli.local.hub import HubModel, fetch_model
from marserve.cli.output import CommandFailed, Output, WrongArguments
from marserve.cli.run.source import LocalModel
from marserve.settings import Settings, load_settings
from support.hub_server import HubProgram, HubServer, hub_server

pytest.importorskip("huggingface_hub")

CONFIG = b'{"architectures": ["BertForSequenceClassification"], "model_type": "bert"}'
FILES = {
    "config.json": CONFIG,
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "1_Pooling/config.json": b"{}",
    "pytorch_model.bin": b"pickle",
    "handler.py": b"raise SystemExit",
    "onnx/model.onnx": b"onnx",
}
SERVED = {"config.json", "model.safetensors", "tokenizer.json", "1_Pooling/config.json"}


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    """A hub with a repository of each kind."""
    with hub_server() as server:
        server.commit("org/film", FILES)
        server.commit("org/pickles", {"config.json": CONFIG, "pytorch_model.bin": b"pickle"})
        server.commit("org/code", {"model.py": b"", "README.md": b""})
        server.commit("org/other", {"config.json": b"{}", "model.safetensors": b""})
        server.commit("org/archive", {"README.md": b"", "a/m.mar": b"PK"})
        server.commit("org/gated", FILES)
        server.gated.add("org/gated")
        yield server


class Desk:
    """Fetches as one run does, with a cache and a working directory of its own."""

    def __init__(self, hub: HubServer, folder: Path) -> None:
        self.folder = folder
        self.settings: Settings = load_settings("marserve", {}, {}, folder, reads_file=False)
        names = ("HF_", "HUGGING")
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(names)},
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(folder / "cache"),
            "HF_HUB_DISABLE_XET": "1",
        }

    def fetch(self, address: str, place: str = "links", **variables: str) -> HubModel:
        """Fetch a model."""
        environment = {**self.environment, **variables}
        return fetch_model(address, Wishes(), self.settings, self.folder / place, Output(as_json=True), environment)


@pytest.fixture
def desk(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """In an empty working directory; the hub is open, and knows no request."""
    monkeypatch.setattr(subprocess, "Popen", HubProgram)
    (tmp_path / "here").mkdir()
    (tmp_path / "model_store").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    hub.token, hub.status = None, None
    hub.asked.clear()
    return Desk(hub, tmp_path)


def files_below(folder: Path) -> set[str]:
    """The names of all files."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_safetensors_and_what_the_handler_reads_are_served_and_no_code(hub: HubServer, desk: Desk) -> None:
    """By links into the hub's cache, under the repository's name; the working directory stays empty."""
    commit = hub.branches["org/film", "main"]

    found = desk.fetch("hf://org/film@main")
    staging = Staging(desk.folder / "models")
    model = LocalModel(str(found.path), Wishes(task="fill-mask"), staging, address=found.address)
    model.find()
    entry = staging.root / model.stage_first(print)
    [folder] = entry.iterdir()

    assert found == HubModel(desk.folder / "links" / "film", f"hf://org/film@{commit}")
    assert files_below(found.path) == SERVED
    assert files_below(folder) == SERVED | {"MAR-INF/MANIFEST.json", "model-config.yaml"}
    assert (folder / "model.safetensors").is_symlink()
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert (model.name, model.shown, model.can_change) == ("film", found.address, False)
    assert model.example == '{"text": "a good [MASK]"}'
    assert not list(Path.cwd().iterdir())
    assert not [path for _, path in hub.asked if path.endswith((".bin", ".py", ".onnx"))]


def test_code_that_another_program_fetched_is_not_served(hub: HubServer, desk: Desk) -> None:
    """The hub's cache is shared; what is in it of the same commit does not change the model."""
    snapshot = desk.folder / "cache" / "hub" / "models--org--film" / "snapshots" / hub.branches["org/film", "main"]
    desk.fetch("hf://org/film@main")
    (snapshot / "handler.py").write_bytes(FILES["handler.py"])

    again = desk.fetch("hf://org/film@main", "again")

    assert files_below(again.path) == SERVED
    assert plan_source(str(again.path)).plan.spec.handler == "transformers"


def test_an_archive_in_a_repository_is_run_as_one(desk: Desk) -> None:
    """The only one, without the files beside it."""
    assert desk.fetch("hf://org/archive@main").path.name == "m.mar"


@pytest.mark.parametrize(
    ("address", "more", "words"),
    [
        ("hf://org/film", {}, "hf://org/film names no revision"),
        ("hf://org@main", {}, "is named by hf://OWNER/NAME@REVISION"),
        ("hf://org/film@v9", {}, "org/film has no revision v9: name a commit, tag or branch of it."),
        ("hf://org/none@main", {}, "the hub has no org/none"),
        ("hf://org/pickles@main", {}, "org/pickles has no weights that end in .safetensors"),
        ("hf://org/code@main", {}, "org/code has neither a config.json nor one archive"),
        ("hf://org/film@main/config.json", {}, "config.json of org/film is no archive"),
        ("hf://org/gated@main", {}, "org/gated is gated: ask for access at the hub, and set a token (HF_TOKEN)"),
        ("hf://org/film@main", {"token": "hf_right"}, "or the token (HF_TOKEN) may not see it (401)"),
    ],
)
def test_what_would_fail_again_is_one_sentence_and_status_2(
    hub: HubServer, desk: Desk, address: str, more: dict[str, Any], words: str
) -> None:
    """Before any weights are fetched."""
    for name, value in more.items():
        setattr(hub, name, value)

    with pytest.raises(WrongArguments) as refused:
        desk.fetch(address)

    assert words in refused.value.message
    assert refused.value.message.endswith(".")
    assert not [path for _, path in hub.asked if path.endswith(".safetensors")]


def test_a_folder_of_another_library_is_refused(desk: Desk) -> None:
    """Its config.json names no class of transformers."""
    with pytest.raises(WrongArguments, match=r"is not one of transformers; run serves"):
        desk.fetch("hf://org/other@main")


def test_without_a_revision_the_next_step_has_one(desk: Desk) -> None:
    """It can be typed as it is."""
    with pytest.raises(WrongArguments) as refused:
        desk.fetch("hf://org/film")

    assert "hf://org/film@main" in str(refused.value.next_step)


@pytest.mark.parametrize("variables", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
def test_a_hub_that_is_not_reached_is_status_1_unless_the_cache_has_the_model(
    desk: Desk, variables: dict[str, str]
) -> None:
    """Another try may help."""
    with pytest.raises(CommandFailed, match="not complete in the cache, and the hub is not asked") as failed:
        desk.fetch("hf://org/film@main", **variables)
    assert failed.value.status == 1

    desk.fetch("hf://org/film@main")

    assert files_below(desk.fetch("hf://org/film@main", "again", **variables).path) == SERVED


def test_a_task_that_there_is_not_is_refused_before_the_hub_is_asked(hub: HubServer, desk: Desk) -> None:
    """What was typed wrongly costs no fetching."""
    with pytest.raises(WrongArguments, match=r"--task takes text-classification, .*; it got 'sentiment'\.?"):
        fetch_model("hf://org/film@main", Wishes(task="sentiment"), desk.settings, desk.folder, Output(as_json=True))

    assert not hub.asked


def test_without_huggingface_hub_the_sentence_has_the_command(desk: Desk) -> None:
    """As it is typed."""
    (desk.folder / "huggingface_hub.py").write_text("raise ImportError('not installed')\n")
    paths = os.pathsep.join([str(desk.folder), os.environ.get("PYTHONPATH", "")])

    with pytest.raises(WrongArguments, match=r"pip install 'marserve\[hf\]'\.$"):
        desk.fetch("hf://org/film@main", PYTHONPATH=paths)
