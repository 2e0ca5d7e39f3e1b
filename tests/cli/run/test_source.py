"""The source of one run: its texts name the author's own files."""

from __future__ import annotations

import contextlib
import zipfile
from pathlib import Path

import pytest

from marserve.archive.writing.sources import Wishes
from marserve.archive.writing.staging import Staging
from marserve.cli.run.source import LocalModel
from marserve.errors import CannotArchive


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalModel:
    """A model of a file and a file with a blank in its name, found in the working directory."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    Path("shout.py").write_text("def handle(data, context):\n    return data\n")
    Path("two words.txt").write_text("quiet")
    found = LocalModel("shout.py", Wishes(extra_files=("two words.txt",)), staging(tmp_path))
    found.find()
    return found


def staging(tmp_path: Path) -> Staging:
    """The folder of the copies."""
    return Staging(tmp_path / "models")


@pytest.mark.parametrize(
    ("text", "own"),
    [
        ('  File "COPY/shout.py", line 2, in handle', '  File "HERE/shout.py", line 2, in handle'),
        ("cannot read 'COPY/two words.txt'", "cannot read 'HERE/two words.txt'"),
        ("COPY/shout.py: not that", "HERE/shout.py: not that"),
        ("it is COPY/shout.py.", "it is HERE/shout.py."),
        ("COPY/shout.py", "HERE/shout.py"),
        ("COPY/other.py is not the author's", "COPY/other.py is not the author's"),
        ("HERE/shout.py", "HERE/shout.py"),
        ('a "COPY/shout.py"\nand "COPY/shout.py"', 'a "HERE/shout.py"\nand "HERE/shout.py"'),
    ],
)
def test_a_text_names_the_authors_files_and_no_copies(model: LocalModel, text: str, own: str, tmp_path: Path) -> None:
    """Of each of its lines, with and without quotes; what is no file of the source stays."""
    copy, here = str(tmp_path / "models" / "shout-1" / "shout"), str(tmp_path / "here")

    said = model.with_own_paths(text.replace("COPY", copy).replace("HERE", here))

    assert said == own.replace("COPY", copy).replace("HERE", here)


def test_a_source_that_has_gone_is_said_once(model: LocalModel) -> None:
    """Not what else lies there: its author saves it, and it comes again."""
    Path("shout.pid").touch()
    Path("shout.py").unlink()

    with pytest.raises(CannotArchive, match=r"^shout\.py is gone$"):
        model.stage_again()
    assert model.stage_again() is None


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("m.pt", "", "is a JSON array: m.pt does not declare its inputs; signature in model-config.yaml does"),
        ("lit.py", "import litserve as ls\n\nclass A(ls.LitAPI):\n    pass\n", "is what decode_request reads"),
    ],
)
def test_no_request_is_made_up_for_what_declares_nothing(
    file: str, text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its line has a word in the place of the body."""
    monkeypatch.chdir(tmp_path)
    Path(file).write_text(text)
    Path("litserve.py").touch()
    if file.endswith(".pt"):
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("m/constants.pkl", b"")
            archive.writestr("m/code/__torch__.py", b"")
            archive.writestr("m/data.pkl", b"")
    model = LocalModel(file, Wishes(), staging(tmp_path))

    with contextlib.closing(model):
        model.find()

        assert model.example == "BODY"
        assert model.body_words.startswith(words)


@pytest.mark.parametrize(
    ("predict", "returns", "config", "is_warned"),
    [
        ("def", "yield text", None, True),
        ("def", "yield text", "batchSize: 2\n", True),
        ("def", "yield text", "asyncCommunication: true\n", False),
        ("def", "return text", None, False),
        ("async def", "yield text", None, False),
    ],
)
def test_it_is_said_that_streams_of_plain_generators_come_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, predict: str, returns: str, config: str | None, is_warned: bool
) -> None:
    """Other servers send those of one worker side by side."""
    monkeypatch.chdir(tmp_path)
    Path("say.py").write_text(
        f"from marserve_handlers import model\n\n\n@model\n{predict} say(text: str):\n    {returns}\n"
    )
    if config is not None:
        Path("model-config.yaml").write_text(config)
    found = LocalModel("say.py", Wishes(), staging(tmp_path))
    found.find()

    with contextlib.closing(found):
        found.stage_first(lambda file: None)

    assert ("say.py: each worker sends one stream after the other" in found.warning) is is_warned
