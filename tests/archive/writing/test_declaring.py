"""Tests for what is found of a handler's declaration when its archive is made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from marserve.archive.writing import declaring
from marserve.archive.writing.declaring import find_declaration
from marserve.errors import CannotArchive

DECLARED = """
from marserve_handlers import model
from beside import KIND
print("imported")

@model
def up(text: str) -> KIND:
    return text.upper()
"""


def members(folder: Path, source: str, beside: str = "KIND = str\n") -> dict[str, Path]:
    """A handler and a module beside it, in folders of their own."""
    handler, other = folder / "one" / "up.py", folder / "two" / "beside.py"
    for path, text in ((handler, source), (other, beside)):
        path.parent.mkdir()
        path.write_text(text)
    return {"up.py": handler, "beside.py": other}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (DECLARED.replace("-> KIND", "-> object()"), "up.py cannot be archived: What up returns is annotated with"),
        (DECLARED + "\n@model\ndef other(text: str): ...\n", "defines several models, up and other"),
        (DECLARED + "\n1 / 0\n", "up.py cannot be archived: ZeroDivisionError: division by zero."),
        (DECLARED + "\ndef (\n", "up.py cannot be archived: line 10: invalid syntax"),
        (DECLARED + "\nimport os; os._exit(3)\n", "its import ended the process with status 3"),
    ],
)
def test_a_handler_that_cannot_be_served_is_not_archived(tmp_path: Path, source: str, words: str) -> None:
    """One sentence says why."""
    with pytest.raises(CannotArchive) as caught:
        find_declaration(members(tmp_path, source), "up.py")

    assert words in caught.value.message


def test_an_import_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the processes that it started."""
    monkeypatch.setattr(declaring, "IMPORT_S", 0.5)
    source = DECLARED + "\nimport threading; threading.Event().wait()\n"

    with pytest.raises(CannotArchive, match=r"its import did not end within 0\.5 s"):
        find_declaration(members(tmp_path, source), "up.py")


def test_a_package_that_is_not_here_is_a_warning(tmp_path: Path) -> None:
    """The worker's machine may have it; there the worker says what is declared."""
    found = find_declaration(members(tmp_path, DECLARED, "import nothing_of_that_name"), "up.py")

    assert found.text is None
    assert found.warning.endswith("ModuleNotFoundError: No module named 'nothing_of_that_name'")


@pytest.mark.parametrize("word", ["up.py", "some/folder/up.py:up", "up"])
def test_the_declaration_is_found_among_the_members(tmp_path: Path, word: str) -> None:
    """Modules beside the handler are found as in a worker; what the import prints is not in the way."""
    found = find_declaration(members(tmp_path, DECLARED), word)

    assert found.text is not None
    declared: dict[str, Any] = json.loads(found.text)
    assert declared["output"] == {"type": "text", "contentType": "text/plain"}


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("def handle(data, context): raise SystemExit", "up.py"),
        ("raise SystemExit('self.model(x)')", "up.py"),
        ("from marserve_handlers.base import BaseHandler\nself.model(x)", "up.py"),
        (DECLARED, "base_handler"),
    ],
)
def test_a_handler_that_marks_nothing_is_not_imported(tmp_path: Path, source: str, word: str) -> None:
    """Handlers of TorchServe's shape are archived without running."""
    found = find_declaration(members(tmp_path, source), word)

    assert (found.text, found.warning) == (None, "")
