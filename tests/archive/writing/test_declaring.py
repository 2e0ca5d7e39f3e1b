"""Tests for what is found of a handler's declaration when its archive is made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from marserve.archive.writing import declaring
from marserve.archive.writing.declaring import Declaring, Importing
from marserve.errors import CannotArchive, CannotImport

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


def find_declaration(files: dict[str, Path], handler: str, *, must_import: bool = False) -> Declaring:
    """As `marserve archive` does, with `must_import` as `marserve run`."""
    with Importing(files, handler) as importing:
        return importing.declared(must_import=must_import)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (DECLARED.replace("-> KIND", "-> object()"), "up.py: What up returns is annotated with"),
        (
            "from marserve_handlers import model\n@model\nclass Up:\n  def load(self): ...\n"
            "  def predict(self, x: str): ...",
            "up.py: Up.load needs a parameter for the context: def load(self, context).",
        ),
        (DECLARED + "\n@model\ndef other(text: str): ...\n", "defines several models, up and other"),
        (
            DECLARED + "\nfrom marserve import Tensor\n",
            "up.py, line 10: ImportError: Tensor is in marserve_handlers: from marserve_handlers import Tensor.",
        ),
        (DECLARED + "\n1 / 0\n", "up.py, line 10: ZeroDivisionError: division by zero."),
        (DECLARED + "\ndef (\n", "up.py, line 10: invalid syntax"),
        (DECLARED + "\nraise SystemExit\n", "up.py, line 10: it ends the process while it is imported (SystemExit)."),
        (DECLARED + "\nraise KeyboardInterrupt\n", "up.py, line 10: KeyboardInterrupt."),
        (DECLARED + "\nimport os; os._exit(3)\n", "its import ended the process with status 3"),
    ],
)
def test_a_handler_that_cannot_be_served_is_not_archived(tmp_path: Path, source: str, words: str) -> None:
    """One sentence says why."""
    with pytest.raises(CannotArchive) as caught:
        find_declaration(members(tmp_path, source), "up.py", must_import=True)

    assert words in caught.value.message


def test_an_import_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the processes that it started."""
    monkeypatch.setattr(declaring, "IMPORT_S", 0.5)
    source = DECLARED + "\nimport threading; threading.Event().wait()\n"

    with pytest.raises(CannotArchive, match=r"its import did not end within 0\.5 s"):
        find_declaration(members(tmp_path, source), "up.py")


def test_a_fault_in_a_module_beside_has_that_modules_line_and_the_authors_traceback(tmp_path: Path) -> None:
    """Without the frames of the import system and without the folder in which it was tried."""
    with pytest.raises(CannotImport) as caught:
        find_declaration(members(tmp_path, DECLARED, "KIND = str\nKIND.no\n"), "up.py")

    assert caught.value.message.startswith("beside.py, line 2: AttributeError: type object 'str' has no")
    assert caught.value.traceback.startswith('Traceback (most recent call last):\n  File "up.py", line 3, in <module>')
    assert 'File "beside.py", line 2' in caught.value.traceback


def test_a_syntax_error_in_a_module_beside_has_its_line(tmp_path: Path) -> None:
    """And not that of the import."""
    with pytest.raises(CannotImport, match=r"^beside\.py, line 2: invalid syntax\.$"):
        find_declaration(members(tmp_path, DECLARED, "KIND = str\ndef (\n"), "up.py")


def test_a_handler_that_marks_nothing_is_imported_where_that_is_asked_for(tmp_path: Path) -> None:
    """And an import that is not here is a fault then."""
    files = members(tmp_path, "import nothing_of_that_name\ndef handle(data, context): ...\n")

    with (
        Importing(files, "up.py", always=True) as importing,
        pytest.raises(CannotImport, match=r"^up\.py, line 1: ModuleNotFoundError: No module named 'nothing_of_that_"),
    ):
        importing.declared(must_import=True)


def test_a_caller_hears_of_a_long_import_and_may_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the name of the file; nothing of it is left."""
    monkeypatch.setattr(declaring, "WAIT_S", 0.0)
    heard: list[str] = []
    source = DECLARED + "\nimport threading; threading.Event().wait()\n"

    with Importing(members(tmp_path, source), "up.py") as importing:

        def on_wait(file: str) -> None:
            heard.append(file)
            importing.end()

        with pytest.raises(CannotArchive, match="its import ended the process with status -9"):
            importing.declared(on_wait=on_wait)

    assert heard == ["up.py"]
    assert not importing.is_under_way


def test_a_package_that_is_not_here_is_a_warning(tmp_path: Path) -> None:
    """The worker's machine may have it; there the worker says what is declared."""
    found = find_declaration(members(tmp_path, DECLARED, "import nothing_of_that_name"), "up.py")

    assert found.text is None
    assert found.warning.endswith("ModuleNotFoundError: No module named 'nothing_of_that_name'")


@pytest.mark.parametrize(("signature", "is_advised"), [("text", True), ("text: dict", False)])
def test_an_item_without_an_annotation_is_served_with_a_warning(
    tmp_path: Path, signature: str, is_advised: bool
) -> None:
    """It is a JSON object, as the page says; the sentence names what else it could be."""
    found = find_declaration(members(tmp_path, DECLARED.replace("text: str", signature)), "up.py")

    assert found.text is not None
    assert found.warning.startswith("up.py: the parameter text of up has no annotation, so") is is_advised


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
        ("from marserve_handlers import Tensor\nraise SystemExit", "up.py"),
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
