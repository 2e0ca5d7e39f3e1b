"""Tests for an archive's declaration: what is read, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from marserve.archive.contents.declaration import DECLARATION_PATH, read_declaration
from marserve.errors import BadArchive
from marserve.messages import MAX_DECLARATION_BYTES
from marserve_handlers.declared import declaration as handlers_declaration

GOOD = b'{"version":1,"kind":"item","input":{"type":"text"},"output":{"type":"any"}}'


def written(folder: Path, text: bytes) -> Path:
    """An unpacked archive with this declaration."""
    path = folder / DECLARATION_PATH
    path.parent.mkdir()
    path.write_bytes(text)
    return folder


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"{", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[]", "is no declaration"),
        (b'{"version":1}', "is no declaration"),
        (b'{"version":2,"kind":"item"}', "has the version 2, and this server reads version 1"),
        (b'{"version":1,"kind":"item","input":' + b"[" * 70 + b"]" * 70 + b"}", "nested more than 64 deep"),
        (b'{"version":1,"kind":"item","input":{"schema":{"default":NaN}}}', "is not JSON"),
        (b'{"version":1,"kind":"item","input":{"schema":{"default":-Infinity}}}', "is not JSON"),
        (b'{"version":1,"kind":"item","input":{"schema":{"default":1e999}}}', "is not JSON"),
        (b" " * (MAX_DECLARATION_BYTES + 1), "more than 65536 bytes"),
    ],
)
def test_what_is_no_declaration_is_refused(tmp_path: Path, text: bytes, words: str) -> None:
    """One sentence, before a worker is started."""
    with pytest.raises(BadArchive, match=words):
        read_declaration(written(tmp_path, text))


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """As for the manifest."""
    (tmp_path / "MAR-INF").mkdir()
    (tmp_path / "other").write_bytes(GOOD)
    (tmp_path / DECLARATION_PATH).mkdir()

    with pytest.raises(BadArchive, match="cannot be read"):
        read_declaration(tmp_path)


def test_an_archive_need_not_have_one(tmp_path: Path) -> None:
    """Those of TorchServe have none."""
    assert read_declaration(tmp_path) is None


def test_text_and_document_are_kept(tmp_path: Path) -> None:
    """The text for the worker, the document for describe."""
    declared = read_declaration(written(tmp_path, GOOD))

    assert declared is not None
    assert declared.text == GOOD
    assert declared.document["input"] == {"type": "text"}


def test_server_and_handlers_agree() -> None:
    """On the file's name, its version and its bound, which the server may not import."""
    assert DECLARATION_PATH == handlers_declaration.DECLARATION_PATH
    assert MAX_DECLARATION_BYTES == handlers_declaration.MAX_DECLARATION_BYTES
    assert handlers_declaration.DECLARATION_VERSION == 1
