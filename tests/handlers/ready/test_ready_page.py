"""The section on ready handlers in docs/handlers.md: its tables are the code's, its commands work as they are typed."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from marserve_handlers.ready.lightgbm import LightGBMHandler
from marserve_handlers.ready.options import read_options
from marserve_handlers.ready.sklearn import ENDINGS, OUTPUTS, SklearnHandler
from marserve_handlers.ready.transformers.handler import TransformersHandler
from marserve_handlers.ready.transformers.tasks import TASKS
from marserve_handlers.ready.xgboost import XGBoostHandler
from support import tiny_transformers as tiny
from support.command_line import marserve
from support.model_context import FakeItem, make_context

PAGE = (Path(__file__).parents[3] / "docs" / "handlers.md").read_text()
SECTION = PAGE.partition("## Ready handlers")[2].partition("\n## ")[0]
TRANSFORMERS, _, FEATURES = SECTION.partition("### Models of features")


def blocks(text: str) -> list[str]:
    """The indented blocks of a text."""
    return [textwrap.dedent(block).strip() for block in re.findall(r"(?:^(?: {4}.*)?\n)*^ {4}.*$", text, re.MULTILINE)]


def first_words(text: str, head: str) -> list[str]:
    """The words in backticks of the first column of the table with this head."""
    table = text.partition(head)[2].partition("\n\n")[0]
    return [word for row in table.splitlines()[2:] for word in re.findall(r"`(\w[\w-]*)`", row.split("|")[1])]


def sent(curl: str) -> Any:
    """What a handler gets of this command's body."""
    words = shlex.split(curl)
    body = words[words.index("-d") + 1]
    return json.loads(body) if "Content-Type: application/json" in words else body


def answers(handler: Any, folder: Path, archive: str, curls: list[str]) -> list[Any]:
    """What the handler of an archive answers to these commands."""
    with zipfile.ZipFile(folder / "model_store" / archive) as file:
        file.extractall(folder / "unpacked")
        manifest = json.loads(file.read("MAR-INF/MANIFEST.json"))
    context = make_context(folder / "unpacked", manifest["model"].get("serializedFile"))
    handler.initialize(context)
    found = []
    for curl in curls:
        context.begin_batch([FakeItem()])
        found += handler.handle([{"body": sent(curl)}], context)
    return found


def test_each_task_and_each_key_is_in_its_table() -> None:
    """And no other."""
    assert first_words(TRANSFORMERS, "| `task` |") == [
        "text-classification",
        "token-classification",
        "fill-mask",
        "embeddings",
        "summarization",
        "text-generation",
        "image-classification",
    ]
    assert set(first_words(TRANSFORMERS, "| `task` |")) == set(TASKS)
    keys = [key.name for key in TransformersHandler.keys]
    assert sorted(first_words(TRANSFORMERS, "| key of `handler` |")) == sorted([*keys, "max_items"])


def test_files_and_outputs_are_in_the_table_of_features() -> None:
    """Each word of the code stands in the row of its handler."""
    rows = {row.split("`")[1]: row for row in FEATURES.splitlines() if row.startswith("| `")}
    for word in (*OUTPUTS, *(each for each in ENDINGS if "p" not in each[1:3])):
        assert f"`{word}`" in rows["sklearn"], word
    for handler in (XGBoostHandler, LightGBMHandler, SklearnHandler):
        assert {key.name for key in handler.keys} >= {"output", "labels"}
        assert handler.name in rows


def test_the_configuration_of_the_page_is_allowed() -> None:
    """Each block of YAML has keys and values that the handler takes."""
    (document,) = [yaml.safe_load(block) for block in blocks(TRANSFORMERS) if block.startswith("batchSize")]

    assert read_options(document["handler"], "transformers", TransformersHandler.keys)["top_k"] == "all"


@pytest.mark.ready
def test_the_folders_commands_work_as_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tiny model in the folder."""
    tiny.transformers()
    monkeypatch.chdir(tmp_path)
    tiny.save_bert(tmp_path / "sentiment", "ForSequenceClassification")
    archive, _, *curls = next(block for block in blocks(TRANSFORMERS) if block.startswith("marserve")).splitlines()

    assert marserve(*shlex.split(archive)[1:]).status == 0

    raw, single, listed = answers(TransformersHandler(), tmp_path, "sentiment.mar", curls)
    assert raw == single
    assert [each["label"] for each in listed[0]] == [each["label"] for each in raw]
    assert listed[0][0]["score"] == pytest.approx(raw[0]["score"], abs=1e-5)  # a padded batch
    assert len(listed) == 2


@pytest.mark.ready
def test_the_script_and_the_commands_of_features_work_as_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their answers are those of the page."""
    for name in ("sklearn", "skops"):
        pytest.importorskip(name, reason=f"needs {name}: `make test-ready` installs it")
    monkeypatch.chdir(tmp_path)
    script, commands = blocks(FEATURES)
    (tmp_path / "train.py").write_text(script)
    _, archive, _, *curls = commands.splitlines()

    runpy.run_path(str(tmp_path / "train.py"))
    assert marserve(*shlex.split(archive)[1:]).status == 0

    one, several = answers(SklearnHandler(), tmp_path, "iris.mar", curls)
    said = re.search(r"The answers are `(\w+)` and `(.*?)`\.", FEATURES)
    assert said is not None
    assert (one, several) == (said[1], json.loads(said[2]))
